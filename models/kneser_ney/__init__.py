"""An n-gram model with Kneser-Ney smoothing: what counting alone can predict, a baseline for the neural models."""
