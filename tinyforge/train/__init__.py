"""Shared by all recipes: batches, the sharded step, the loop, checkpoints, metrics, flags."""
