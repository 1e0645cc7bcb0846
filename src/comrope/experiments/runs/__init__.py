"""Files of runs: folders and the results store."""
