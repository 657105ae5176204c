"""A character-level MLP: the smallest useful model, as an example of reusing the ops."""
