"""A live view of training: curves of all runs, samples, memory, the ledger. See docs/board.md."""
