"""Compiled kernels of this process, by device, element type and operation."""

from __future__ import annotations

from unisono import _native
from unisono.devices import rtc
from unisono.devices.once import OncePerKey
from unisono.dtypes import DTYPES, OPS, REDUCTIONS, DType

_LOADED: OncePerKey[_native.CudaKernel] = OncePerKey()
"""To load one waits for the calls in flight, which may need another one."""
_COPIES = DTYPES["uint8"].code, REDUCTIONS["sum"]
"""Programs that only copy run on any kernel: they share this one."""


def kernel(
    ordinal: int, dtype: DType, op: str | None, *, one_device: bool
) -> _native.CudaKernel:
    """The kernel for a reduction, or for programs that only copy (None).

    `one_device` is whether all ranks share it.
    """
    reduction = "sum" if op == "mean" else op
    wanted = _COPIES if reduction is None else (dtype.code, REDUCTIONS[reduction])
    key = (ordinal, *wanted, one_device)
    return _LOADED.get(key, lambda: _native.CudaKernel(ordinal, _image(*key)))


def _image(ordinal: int, dtype: int, op: int, one_device: bool) -> bytes:
    if _native.cuda_is_emulated():
        return b"unisono-emulated %d %d" % (dtype, op)
    capability = divmod(_native.cuda_device(ordinal).capability, 10)
    what = list(DTYPES)[dtype], OPS[op]
    return rtc.compile_kernel(capability, *what, one_device=one_device)
