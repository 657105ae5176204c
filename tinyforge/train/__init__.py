"""What every recipe shares: batches, the sharded step, the loop, checkpoints, metrics, flags."""
