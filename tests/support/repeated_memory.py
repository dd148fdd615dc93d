"""Gigabytes of addresses for the price of one memory of 64 MiB, which repeats."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

PERIOD = 64 << 20
_AHEAD = 2 << 30
_FIXED, _NONE = 0x10, 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@contextmanager
def repeated_memory(size: int) -> Iterator[np.ndarray]:
    """So many bytes, of which those a period apart are the same; 0 at first.

    Whoever accesses what is up to 2 GiB ahead of them, or right behind, is killed.
    """
    periods = -(-size // PERIOD)
    whole = _AHEAD + (periods + 1) * PERIOD
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = _mapped(None, whole, _NONE, flags, -1)
    memory = os.memfd_create("repeated")
    try:
        os.ftruncate(memory, PERIOD)
        for k in range(periods):
            at = base + _AHEAD + k * PERIOD
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            _mapped(at, PERIOD, protection, mmap.MAP_SHARED | _FIXED, memory)
        bytes_of = (ctypes.c_uint8 * size).from_address(base + _AHEAD)
        yield np.frombuffer(bytes_of, np.uint8)
    finally:
        os.close(memory)
        _libc.munmap(base, whole)


def _mapped(at: int | None, size: int, protection: int, flags: int, file: int) -> int:
    found = _libc.mmap(at, size, protection, flags, file, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return found
