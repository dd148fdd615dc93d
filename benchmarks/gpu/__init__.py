"""Measurements on a machine with a GPU; docs/gpu.md has what they said."""
