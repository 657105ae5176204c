-- Quality filters: what is not worth training on. A document for which an expression is true is dropped, and the
-- catalogue names the first such filter, and all of them. NULL (an unknown language score) drops nothing.
--
-- This file is read by data/filters.py. Copy it, change the copy, and pass it with --filters; the filters that were used
-- are saved with the corpus. A block is a head line, a comment that explains it, and one expression in DuckDB's SQL:
--
--   "-- filter: NAME"   a boolean expression;
--   "-- measure: NAME"  any expression, which later blocks may use by its name.
--
-- An expression sees one document, after cleaning: text, source, id, title, url, language_score, bytes, and these
-- measures:
--   words       runs of letters and digits
--   letters     characters of the words that are not digits
--   characters  characters that are not white space
--   repeats     the share of its runs of 5 words (--shingle-words) that stand in it before, 0 to 1
--   stops       the share of its words among the 53 commonest of English, 0 to 1
--   bad_words   bad words over words; NULL without --bad-words.  quality  0 to 1; NULL without --quality
--   language, language_share  the likeliest, "en", and its share of the text; NULL without --detect-language
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
-- Menus, captions and stubs. Gopher: fewer than 50 words. Where the text is known to be English, 30: a biography may
-- have no more, once its tables are cut out.
words < if(language = 'en', 30, 50);

-- filter: word-length
-- Text without spaces, ciphers, lists of abbreviations. Gopher: a mean word of fewer than 3 or more than 10 letters.
letters / words NOT BETWEEN if(language = 'en', 2.5, 3) AND 10;

-- filter: few-letters
-- Tables, price lists, code. In prose about 95 % of the characters other than white space are letters. Gopher has the
-- same rule for words: 80 % of them must contain a letter.
letters < if(language = 'en', 0.6, 0.7) * characters;

-- filter: symbols
-- Hashtags, and teasers that end in an ellipsis. Gopher: more than one # or ellipsis in ten words.
if(contains(text, '#'), strlen(text) - strlen(replace(text, '#', '')), 0)
    + if(contains(text, '...'), strlen(text) - strlen(replace(text, '...', '')), 0) / 3
    + if(contains(text, '…'), strlen(text) - strlen(replace(text, '…', '')), 0) / 3 > 0.1 * words;

-- filter: bullets
-- Lists without prose. Gopher: more than 90 % of the lines begin with a bullet. Here of four lines or more, since a
-- review in one line may begin with a dash.
len(lines) > 3 AND len(list_filter(lines, line -> left(ltrim(line), 1) IN ('•', '●', '*', '-', '‣', '▪', '·'))) > 0.9 * len(lines);

-- filter: ellipses
-- Pages of teasers. Gopher: more than 30 % of the lines end with an ellipsis. Here too of four lines or more.
len(lines) > 3 AND len(list_filter(lines, line -> suffix(line, '...') OR suffix(line, '…'))) > 0.3 * len(lines);

-- filter: repeated-lines
-- Boilerplate and machine-made pages. Gopher: more than 20 % of the characters are in lines that occurred before. (Its
-- rule on the number of such lines would drop plays, where the speakers' names are lines of their own.)
list_sum(list_transform(list_distinct(lines), line -> strlen(line)))
    < 0.8 * list_sum(list_transform(lines, line -> strlen(line)));

-- filter: repeated-paragraphs
-- The same with blank lines between. Gopher: more than 20 % of the characters are in repeated paragraphs.
list_sum(list_transform(list_distinct(string_split(text, chr(10) || chr(10))), paragraph -> strlen(paragraph)))
    < 0.8 * list_sum(list_transform(string_split(text, chr(10) || chr(10)), paragraph -> strlen(paragraph)));

-- filter: repeated-phrases
-- The same within lines. Gopher: more than 15 % of the characters are in runs of 5 words that occurred before. Here more
-- than a quarter of the runs, which no book reaches, and of 16,000 Wikipedia articles 3, lists of winners and dates.
repeats > 0.25;

-- filter: no-sentences
-- Not English, or not sentences. Gopher: fewer than two of eight words that every English text has. Where the language
-- is known, one will do: a short biography has few.
contains(lowered, ' the ')::INT + contains(lowered, ' be ')::INT + contains(lowered, ' to ')::INT
    + contains(lowered, ' of ')::INT + contains(lowered, ' and ')::INT + contains(lowered, ' that ')::INT
    + contains(lowered, ' have ')::INT + contains(lowered, ' with ')::INT < if(language = 'en', 1, 2);

-- filter: stop-words
-- Menus, names and lists have almost none of the commonest words, a salad of them nothing else. Prose has four in ten.
stops NOT BETWEEN 0.1 AND 0.7 AND coalesce(language, 'en') = 'en';

-- filter: menus
-- Menus and lists of names with as many stop words as prose. Under one full stop in 100 words; and items of under five
-- words on average, as hardly any verse has, or capitals on seven in ten words that are no stop words. Of 106,000 articles of
-- Wikipedia and Simple Wikipedia it drops 1, a page of relatives, and of books the tables of contents.
len(string_split(text, '.')) - 1 < 0.01 * words
    AND len(regexp_extract_all(text, '[.!?…。！？।۔؟]')) < 0.01 * words
    AND (5 * len(regexp_extract_all(text, '[^\s|»•][^\n|»•]*')) > words
        OR len(regexp_extract_all(text, '\b[A-Z]')) > 0.7 * (1 - stops) * words);

-- filter: scanner
-- Letters that a scanner has taken for digits and signs: within every fifteenth word. Only text with few stop words is
-- searched.
stops < 0.31 AND len(regexp_extract_all(text, '[a-z][0-9|!;:~^.,][a-z]')) > words / 15;

-- filter: language
-- Less than 60 % is English, by --detect-language. Or the source's own classifier is not confident: FineWeb, below 0.65.
language <> 'en' OR language_share < 0.6 OR language_score < 0.65;

-- filter: bad-words
-- More than one word in 200 is in the list of --bad-words. C4 drops a page for a single one, and with it medicine and news.
bad_words > 0.005;

-- filter: quality
-- The classifier of --quality finds it more like the bad sample that it was trained on than like the good one.
quality < 0.5;

-- filter: lorem-ipsum
-- Placeholder text. C4 drops every page with the phrase.
contains(lowered, 'lorem ipsum');

-- filter: javascript
-- A page that only asks for JavaScript. C4 drops every line with the word; here an article about it may stay.
words < 500 AND contains(lowered, 'javascript') AND regexp_matches(lowered,
    '(enable|requires?|without|support) javascript|javascript (is|to be|must be|has been|in your) (disabled|enabled|not|required|turned|browser)');

-- filter: code
-- Program text. C4 drops every page with a curly bracket; here more than one in 50 words, to keep formulas (in 25 of what
-- is known to be English), or lines of which a third begin like those of a program. Or a tag of HTML in ten words.
len(string_split(text, '{')) - 1 > if(language = 'en', 0.04, 0.02) * words
    OR len(string_split(text, '<')) - 1 > 0.1 * words
    OR stops < 0.31 AND len(list_filter(lines, line -> regexp_matches(line,
        '^\s*(def |class |import |from \S+ import |return|self\.|if .*:$|elif |else:|for .*:$|while .*:$|with .*:$|try:|except|raise |@\w|# |//|/\*|""")'
    ))) > 0.3 * len(lines);

-- filter: blob
-- Encoded data: 400 characters of ASCII without a blank.
regexp_matches(text, '[!-~]{400}');
