-- Filters for single sentences (data/sentences.py): those of data/filters.sql drop texts of fewer than 50 words.

-- filter: none
-- Nothing is dropped: the sentences come from documents that were filtered.
false;
