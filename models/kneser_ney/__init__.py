"""An n-gram model with Kneser-Ney smoothing: a baseline for the neural models that only counts."""
