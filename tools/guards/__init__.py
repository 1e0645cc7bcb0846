"""Behaviour that a refactoring must not change: one module per guard observes its values."""
