"""Arrays in memory of cuMemCreate, as allocators with expandable segments make them."""

from ctypes import c_size_t
from ctypes import c_uint64 as c_address

import numpy as np

import emulated as cuda

GRAIN = cuda.GRAIN


class Range:
    """Reserved addresses, at which memory is mapped in pieces of one size."""

    def __init__(self, pieces, *, size=GRAIN, exportable=True):
        cuda.initialize()
        self.pieces, self.size, self.exportable = pieces, size, exportable
        self.at = cuda.reserve(pieces * size)
        self.mapped = set()

    def map(self, *numbers):
        """Map new memory at some of the pieces; all by default."""
        for i in numbers or range(self.pieces):
            memory = cuda.create(self.size, exportable=self.exportable)
            cuda.map_at(self.at + i * self.size, self.size, memory)
            cuda.set_access(self.at + i * self.size, self.size, 3)
            cuda.call("cuMemRelease", c_address(memory))
            self.mapped.add(i)
        return self

    def unmap(self, *numbers):
        """Unmap some of the pieces; all by default."""
        for i in numbers or tuple(self.mapped):
            cuda.unmap(self.at + i * self.size, self.size)
            self.mapped.discard(i)

    def free(self):
        self.unmap()
        cuda.call(
            "cuMemAddressFree", c_address(self.at), c_size_t(self.pieces * self.size)
        )

    def array(self, first, values):
        """An array that begins at byte `first`."""
        made = Array(self.at + first, values.shape, values.dtype)
        cuda.write(made.address, values.tobytes())
        return made


class Allocation:
    """An allocation of its own for an array, which is not kept when it is freed."""

    def __init__(self, values):
        cuda.initialize()
        self.at = cuda.allocate(values.nbytes)
        cuda.write(self.at, values.tobytes())
        self.array = Array(self.at, values.shape, values.dtype)

    def free(self):
        cuda.free(self.at)


class Array:
    """What a library without an allocator of its own would hand over."""

    def __init__(self, address, shape, dtype):
        self.address, self.shape, self.dtype = address, shape, np.dtype(dtype)
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": self.dtype.str,
            "data": (address, False),
            "version": 3,
        }

    def numpy(self):
        raw = cuda.read(self.address, int(np.prod(self.shape)) * self.dtype.itemsize)
        return np.frombuffer(raw, self.dtype).reshape(self.shape)
