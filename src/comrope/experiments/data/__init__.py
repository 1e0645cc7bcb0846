"""Data sets, transforms and batches. Classes here take plain arguments, never a configuration."""
