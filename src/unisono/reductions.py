"""Reductions of arrays: several sources into one result, in one pass, in their order.

Floats of 16 and 8 bits are added up in float32 and rounded once, whatever the number
of sources. A NaN wins in min and max. Integers wrap; their mean is rounded towards
zero. On truth values sum, max and bor are "or", and prod, min and band are "and".

The native core does it with the widest vectors that the machine has. Without it NumPy
does, more slowly, and to the same bits (but for the sign and payload of a NaN).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from functools import reduce as fold
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.dtypes import REDUCTIONS, DType, check_op, dtype_of
from unisono.errors import BadArgument, unknown

try:
    from unisono import _native
except ImportError:  # built without a compiler: NumPy does it
    _native = None  # type: ignore[assignment]

Array = NDArray[Any]


def reduce(
    out: Array,
    sources: Sequence[Array],
    op: str = "sum",
    *,
    divisor: int | None = None,
    by: str = "",
) -> Array:
    """Reduce `sources`, in their order, into `out`, which may be one of them.

    All are contiguous and of one type and shape. `mean` divides by their number, or by
    `divisor` where they are sums themselves. `by` is one of `ways()`, the first if not
    given.
    """
    sources = list(sources)
    _refuse_misfits(out, sources)
    dtype = dtype_of(out)
    check_op(dtype, op)
    if divisor is None or op != "mean":
        divisor = len(sources) if op == "mean" else 1
    name = "sum" if op == "mean" else op
    known = ways()
    if by and by not in known:
        raise unknown("way to reduce", by, known)
    chosen = known.index(by) if by else 0
    if known[chosen] == "numpy":
        with np.errstate(all="ignore"):
            out[...] = _in_numpy(dtype, sources, name, divisor)
        return out
    raw = [_bytes(s) for s in sources]
    what = dtype.itemsize, dtype.code, REDUCTIONS[name]
    _native.reduce(_bytes(out), raw, *what, divisor, instruction_set=chosen)
    return out


@cache
def ways() -> list[str]:
    """How this machine can reduce, the fastest first; NumPy is always the last."""
    return [*(_native.instruction_sets() if _native else []), "numpy"]


def _refuse_misfits(out: Array, sources: Sequence[Array]) -> None:
    if not sources:
        raise BadArgument("reduce: at least one source is needed")
    for array in (out, *sources):
        if not isinstance(array, np.ndarray) or isinstance(array, np.matrix):
            raise BadArgument(f"reduce: expected arrays, got a {type(array).__name__}")
        if array.dtype != out.dtype or array.shape != out.shape:
            raise BadArgument(
                f"reduce: {array.dtype}{list(array.shape)} does not fit "
                f"{out.dtype}{list(out.shape)}: one type and shape is needed"
            )
        if not array.flags.c_contiguous:
            raise BadArgument("reduce: arrays must be contiguous")
    here = out.ctypes.data
    for array in sources:
        if array.ctypes.data != here and np.may_share_memory(out, array):
            raise BadArgument("reduce: the result overlaps a source in part")
    if not out.flags.writeable:
        raise BadArgument("reduce: the result cannot be written to")


def _bytes(array: Array) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _in_numpy(dtype: DType, sources: Sequence[Array], op: str, divisor: int) -> Array:
    """The same in NumPy: the definition that the native kernels are held to."""
    if dtype.accumulates_in_float32:
        sources = [s.astype(np.float32) for s in sources]
    total: Array = fold(_OPERATIONS[op], sources)
    return total if divisor == 1 else _divided(total, divisor)


def _divided(total: Array, divisor: int) -> Array:
    if total.dtype.kind == "c":  # part by part: NumPy would divide by a complex number
        parts = total.view(total.real.dtype)
        return np.asarray(parts / parts.dtype.type(divisor)).view(total.dtype)
    if total.dtype.kind == "f":
        return np.asarray(total / total.dtype.type(divisor))
    wide = total.astype(object)  # exact, and whole numbers of any size
    towards_zero = [abs(x) // divisor * (1 if x > 0 else -1) for x in wide.ravel()]
    return np.array(towards_zero, dtype=total.dtype).reshape(total.shape)


def _product(a: Array, b: Array) -> Array:
    if a.dtype.kind != "c":
        return np.asarray(a * b)
    product = np.empty_like(a)
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


def _lesser(a: Array, b: Array) -> Array:
    # Not np.minimum: of 0 and -0 it takes the second on x86 and -0 on Arm.
    return np.where((a < b) | (a != a), a, b)


def _greater(a: Array, b: Array) -> Array:
    return np.where((a > b) | (a != a), a, b)


_OPERATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "prod": _product,
    "min": _lesser,
    "max": _greater,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
