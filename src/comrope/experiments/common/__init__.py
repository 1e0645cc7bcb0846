"""What all experiments share: errors, console, randomness, processes."""
