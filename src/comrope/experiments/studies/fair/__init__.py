"""The fair comparison: rows, tuning, comparison of methods."""
