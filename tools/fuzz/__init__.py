"""Fuzzing of the readers of files: targets, mutations, and checks of their answers."""
