-- filter: stub
-- Filters beside those of filters.sql, for a model that is to write plain prose: of the source `simple`, the Simple
-- English Wikipedia, articles on things are kept; most on people, places, seasons and films are names and dates.
--   cat data/filters.sql data/plain.sql > plain-filters.sql; python -m data.corpus ... --filters plain-filters.sql
-- This one: fewer than 120 words.
source = 'simple' AND words < 120;

-- filter: numbers
-- More than one number in 50 words.
source = 'simple' AND len(regexp_extract_all(text, '[0-9]+')) > 0.02 * words;

-- filter: names
-- More than 18 capitals in 100 words.
source = 'simple' AND len(regexp_extract_all(text, '[A-Z]')) > 0.18 * words;
