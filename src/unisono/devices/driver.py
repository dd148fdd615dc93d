"""Functions of CUDA's driver that Python needs itself, for libraries it calls.

Such a library works on the current device of the calling thread, and must not be given
a stream without knowing whether that is being captured. The native core calls the rest.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_void_p

from unisono import _native
from unisono.errors import DeviceError

_DRIVER = "libcuda.so.1"
_CHOSEN = "UNISONO_CUDA_DRIVER"
_RELAXED = 2


@functools.cache
def _function(name: str) -> Callable[..., int]:
    """A function of the driver that the native core uses."""
    if not _native.cuda_is_emulated():
        library = ctypes.CDLL(os.environ.get(_CHOSEN) or _DRIVER)
        return getattr(library, name)  # type: ignore[no-any-return]
    emulated = getattr(_native, "emulated_functions", None)
    if emulated is None:
        raise DeviceError(
            "this build of unisono cannot run other libraries on the emulated driver: "
            "an editable install can (pip install -e .)"
        )
    return ctypes.CFUNCTYPE(c_int)(emulated()[name])


def _call(name: str, *arguments: object) -> None:
    code = _function(name)(*arguments)
    if code:
        raise DeviceError(f"{name} of CUDA's driver failed ({code})")


@functools.cache
def _context(ordinal: int) -> c_void_p:
    """The primary context of a device, which is used as long as the process lives."""
    _call("cuInit", c_int(0))
    device, context = c_int(), c_void_p()
    _call("cuDeviceGet", byref(device), c_int(ordinal))
    _call("cuDevicePrimaryCtxRetain", byref(context), device)
    return context


@contextmanager
def current_device(ordinal: int) -> Iterator[None]:
    """Make a device the current one of this thread."""
    _call("cuCtxPushCurrent_v2", _context(ordinal))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", byref(c_void_p()))


def relax_captures() -> None:
    """What this thread asks of the driver is no part of a capture, of any mode."""
    _call("cuThreadExchangeStreamCaptureMode", byref(c_int(_RELAXED)))


def is_capturing(ordinal: int, stream: int) -> bool:
    """Whether what is put into a stream becomes part of a graph."""
    status = c_int()
    with current_device(ordinal):
        _call("cuStreamIsCapturing", c_void_p(stream), byref(status))
    return status.value != 0
