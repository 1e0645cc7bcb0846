"""Studies that reproduce the paper's tables and figures."""
