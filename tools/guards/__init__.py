"""What must not change while code moves: one function a guard returns the observed values."""
