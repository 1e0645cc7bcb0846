"""Benchmarks: time and memory of rotations and models, gated on correctness."""
