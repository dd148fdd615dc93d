"""A rank whose calls on device arrays may fail."""

import numpy as np

import unisono
from device_cases import to_device
from unisono import _native

COUNT = 1000


class DeviceRank:
    """A rank with a stream of its own."""

    def __init__(self, comm):
        self.comm = comm
        self.stream = _native.CudaStream(0)

    def call(self, name="all_reduce", **how):
        """Begin a collective of COUNT ones: the array."""
        x = to_device(np.ones(COUNT, np.float32))
        getattr(self.comm, name)(x, stream=self.stream, **how)
        return x

    def first_call(self, **how):
        """Make a call that all ranks end before any goes on."""
        self.call(**how)
        self.comm.synchronize(30)
        self.comm.barrier()

    def outcome(self, call):
        """What a call, or the wait for it, raises; and its array."""
        x = None
        try:
            x = call()
            self.comm.synchronize(30)
        except unisono.UnisonoError as error:
            return error, x
        return None, x
