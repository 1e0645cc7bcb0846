"""Data sets, transforms and batches. Arguments are plain values, never a configuration."""
