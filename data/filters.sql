-- Quality filters: what is not worth training on. A document for which an expression is true is dropped, and the
-- catalogue names the first such filter. NULL (an unknown language score) drops nothing.
--
-- This file is read by data/filters.py. Copy it, change the copy, and pass it with --filters; the filters that were used
-- are saved with the corpus. A block is a head line, a comment that explains it, and one expression in DuckDB's SQL:
--
--   "-- filter: NAME"   a boolean expression;
--   "-- measure: NAME"  any expression, which later blocks may use by its name.
--
-- An expression sees one document: text, source, id, title, url, language_score, bytes, and three counts:
--   words       runs of letters and digits
--   letters     characters of the words that are not digits
--   characters  characters that are not white space
--
-- Sources: "Gopher" is J. Rae et al., "Scaling Language Models: Methods, Analysis & Insights from Training Gopher",
-- 2021, table A1. "C4" is C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
-- Transformer", 2020, section 2.2. "FineWeb" is G. Penedo et al., "The FineWeb Datasets", 2024.
--
-- Two of their rules are left out because they would drop good books: an upper bound on length (long documents are cut
-- into parts instead), and a minimum share of lines that end with a full stop (verse and hard-wrapped lines do not).

-- measure: lines
-- The lines that are not empty.
list_filter(string_split(text, chr(10)), line -> line <> '');

-- measure: lowered
-- For searching phrases.
lower(text);

-- filter: too-short
-- Menus, captions and stubs. Gopher: fewer than 50 words.
words < 50;

-- filter: word-length
-- Text without spaces, ciphers, lists of abbreviations. Gopher: a mean word of fewer than 3 or more than 10 letters.
letters / words NOT BETWEEN 3 AND 10;

-- filter: few-letters
-- Tables, price lists, code. In prose about 95 % of the characters other than white space are letters. Gopher has the
-- same rule for words: 80 % of them must contain a letter.
letters < 0.7 * characters;

-- filter: symbols
-- Hashtags, and teasers that end in an ellipsis. Gopher: more than one # or ellipsis in ten words.
(strlen(text) - strlen(replace(text, '#', ''))) + (strlen(text) - strlen(replace(text, '...', ''))) / 3
    + (strlen(text) - strlen(replace(text, '…', ''))) / 3 > 0.1 * words;

-- filter: bullets
-- Lists without prose. Gopher: more than 90 % of the lines begin with a bullet.
len(list_filter(lines, line -> left(ltrim(line), 1) IN ('•', '●', '*', '-', '‣', '▪', '·'))) > 0.9 * len(lines);

-- filter: ellipses
-- Pages of teasers. Gopher: more than 30 % of the lines end with an ellipsis.
len(list_filter(lines, line -> suffix(line, '...') OR suffix(line, '…'))) > 0.3 * len(lines);

-- filter: repeated-lines
-- Boilerplate and machine-made pages. Gopher: more than 20 % of the characters are in lines that occurred before. (Its
-- rule on the number of such lines would drop plays, where the speakers' names are lines of their own.)
list_sum(list_transform(list_distinct(lines), line -> strlen(line)))
    < 0.8 * list_sum(list_transform(lines, line -> strlen(line)));

-- filter: repeated-paragraphs
-- The same with blank lines between. Gopher: more than 20 % of the characters are in repeated paragraphs.
list_sum(list_transform(list_distinct(string_split(text, chr(10) || chr(10))), paragraph -> strlen(paragraph)))
    < 0.8 * list_sum(list_transform(string_split(text, chr(10) || chr(10)), paragraph -> strlen(paragraph)));

-- filter: no-sentences
-- Not English, or not sentences. Gopher: fewer than two of eight words that every English text has.
contains(lowered, ' the ')::INT + contains(lowered, ' be ')::INT + contains(lowered, ' to ')::INT
    + contains(lowered, ' of ')::INT + contains(lowered, ' and ')::INT + contains(lowered, ' that ')::INT
    + contains(lowered, ' have ')::INT + contains(lowered, ' with ')::INT < 2;

-- filter: language
-- The source's own classifier is not confident that it is English. FineWeb: a score below 0.65.
language_score < 0.65;

-- filter: lorem-ipsum
-- Placeholder text. C4 drops every page with the phrase.
contains(lowered, 'lorem ipsum');

-- filter: javascript
-- A page that only asks for JavaScript. C4 drops every line with the word; here an article about it may stay.
words < 500 AND contains(lowered, 'javascript') AND regexp_matches(lowered,
    '(enable|requires?|without|support) javascript|javascript (is|to be|must be|has been|in your) (disabled|enabled|not|required|turned|browser)');

-- filter: code
-- Program text. C4 drops every page with a curly bracket; here more than one in 50 words, to keep formulas.
length(text) - length(replace(text, '{', '')) > 0.02 * words;

-- filter: blob
-- Encoded data: 400 characters of ASCII without a blank.
regexp_matches(text, '[!-~]{400}');
