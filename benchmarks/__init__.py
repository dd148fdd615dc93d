"""Measurements: each file prints one, and says how it is run."""
