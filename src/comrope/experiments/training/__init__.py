"""Training loop, checkpoints, optimizer, evaluation of runs."""
