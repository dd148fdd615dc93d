"""Compiled kernels of this process, by device, element type and operation."""

from __future__ import annotations

import threading

from unisono import _native
from unisono.devices import rtc
from unisono.dtypes import DTYPES, OPS, REDUCTIONS, DType

_LOCK = threading.Lock()
_LOADED: dict[tuple[int, int, int], _native.CudaKernel] = {}
_COPIES = DTYPES["uint8"].code, REDUCTIONS["sum"]
"""Programs that only copy run on any kernel: they share this one."""


def is_loaded(ordinal: int, dtype: DType, op: str | None) -> bool:
    """Whether the kernel for such calls is on the device already."""
    return (ordinal, *_wanted(dtype, op)) in _LOADED


def kernel(ordinal: int, dtype: DType, op: str | None) -> _native.CudaKernel:
    """The kernel for a reduction, or for programs that only copy (None)."""
    wanted = _wanted(dtype, op)
    key = (ordinal, *wanted)
    if (loaded := _LOADED.get(key)) is not None:
        # Without the lock: to load another one may wait for a kernel that waits for the
        # rank which asks here.
        return loaded
    with _LOCK:
        found = _LOADED.get(key)
        if found is None:
            found = _LOADED[key] = _native.CudaKernel(ordinal, _image(ordinal, *wanted))
    return found


def _wanted(dtype: DType, op: str | None) -> tuple[int, int]:
    reduction = "sum" if op == "mean" else op
    return _COPIES if reduction is None else (dtype.code, REDUCTIONS[reduction])


def _image(ordinal: int, dtype: int, op: int) -> bytes:
    if _native.cuda_is_emulated():
        return b"unisono-emulated %d %d" % (dtype, op)
    capability = divmod(_native.cuda_device(ordinal).capability, 10)
    return rtc.compile_kernel(capability, list(DTYPES)[dtype], OPS[op])
