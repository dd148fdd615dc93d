"""Calls on arrays of a CUDA device: the device half of a communicator."""
