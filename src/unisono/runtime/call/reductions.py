"""The reductions that users can give, brought into one form.

    op="sum"               a name: sum prod min max band bor bxor mean (or avg)
    op=ReduceOp.SUM        the same as a constant
    op=premul_sum(0.5)     a sum of inputs that are first multiplied by a factor
    op=combine             a function of two arrays, applied in the order of ranks

The named ones run in the native core; premul_sum is a multiplication and a sum. A
function runs in Python on whole arrays, and returns one of the same shape and type: it
need not commute, for inputs are folded from the left.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.dtypes import OPS, REDUCTIONS, DType, check_op, dtype_of
from unisono.errors import BadArgument, unknown

Array = NDArray[Any]
Function = Callable[[Array, Array], Any]
Number = int | float | complex


@dataclass(frozen=True)
class Reduction:
    """One reduction: `op` is a name of dtypes.OPS, "premul_sum" or "function"."""

    op: str
    factor: Number | None = None
    function: Function | None = None

    @property
    def name(self) -> str:
        """As text: "sum", "premul_sum(0.5)", "function combine"."""
        if self.function is not None:
            return f"function {_name_of(self.function)}"
        return self.op if self.factor is None else f"{self.op}({self.factor!r})"

    @property
    def in_python(self) -> bool:
        """Whether part of it runs in Python."""
        return self.function is not None or self.factor is not None

    @property
    def native(self) -> tuple[int, bool]:
        """The native core's code, and whether the result is divided by world size."""
        if self.function is not None:
            raise BadArgument(f"{self.name} runs in Python, not in the native core")
        name = "sum" if self.op in ("mean", "premul_sum") else self.op
        return REDUCTIONS[name], self.op == "mean"

    def check(self, dtype: DType) -> None:
        """Raise BadArgument if it is not defined for this element type."""
        if self.factor is not None:
            _check_factor(dtype, self.factor)
        elif self.function is None:
            check_op(dtype, self.op)


def premul_sum(factor: Any) -> Reduction:
    """The sum of inputs that each rank first multiplies by its `factor`.

    A number, or an array or tensor of one element; an integer for integer types.
    """
    if isinstance(factor, str | bytes | bool):
        raise BadArgument(f"premul_sum({factor!r}): expected a number")
    try:
        value = factor if isinstance(factor, int | float | complex) else factor.item()
    except (AttributeError, ValueError, RuntimeError):
        value = None  # not an array, or one of several elements
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise BadArgument(
            f"premul_sum(a {type(factor).__name__}): expected a number, or an array of "
            "one element"
        )
    return Reduction("premul_sum", factor=_plain(value))


class ReduceOp(StrEnum):
    """The named reductions as constants; `op="sum"` and `op=ReduceOp.SUM` are one."""

    SUM = "sum"
    AVG = "mean"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


_NAMED = {name: Reduction(name) for name in OPS} | {"avg": Reduction("mean")}


_ELSEWHERE = {
    **dict.fromkeys(("add", "plus", "+"), "sum"),
    **dict.fromkeys(("average",), "mean"),
    **dict.fromkeys(("mul", "multiply", "product", "*"), "prod"),
    "minimum": "min",
    "maximum": "max",
    "and": "band",
    "or": "bor",
    "xor": "bxor",
    **{name: name for name in OPS},
}
"""Names that other libraries have, and ours; `avg` is one of ours, too."""


def as_reduction(op: Any) -> Reduction:
    """The reduction that `op` stands for."""
    if isinstance(op, Reduction):
        return op
    if isinstance(op, str) and op in _NAMED:
        return _NAMED[op]
    if op is premul_sum or (isinstance(op, str) and op == "premul_sum"):
        raise BadArgument("op = premul_sum: a factor is needed, as in premul_sum(0.5)")
    for name in ("sum", "min", "max"):
        if op is getattr(builtins, name):
            raise BadArgument(f"op = Python's own {name}: expected op={name!r}")
    if isinstance(op, str):
        if op.lower() in _ELSEWHERE:
            raise BadArgument(
                f"unknown reduction {op!r}; op={_ELSEWHERE[op.lower()]!r} is meant"
            )
        raise unknown("reduction", op, [*OPS, "avg"])
    if not callable(op):
        raise BadArgument(
            f"op: got a {type(op).__name__}, expected one of {', '.join(OPS)}, "
            "premul_sum(factor), or a function of two arrays"
        )
    return Reduction("function", function=op)


def fold(function: Function, parts: Sequence[Array]) -> Array:
    """`parts`, in their order, folded from the left by a user's function.

    It gets copies, and only its return value counts, so it may work in place, keep its
    arguments, or return one of them.
    """
    if not parts:
        raise BadArgument("fold: at least one part is needed")
    total = np.array(parts[0], order="C")
    for part in parts[1:]:
        result = function(total, np.array(part, order="C"))
        _refuse_change(function, result, parts[0])
        total = np.array(result, order="C")
    return total


def scaled(x: Array, factor: Number) -> Array:
    """`x * factor` in the type of x, as in premul_sum.

    Floats of 16 and 8 bits are multiplied in float32 and rounded once; integers wrap.
    """
    dtype = dtype_of(x)
    _check_factor(dtype, factor)
    with np.errstate(all="ignore"):
        if dtype.kind in "iu":
            bits = int(factor.real) % (1 << 8 * dtype.itemsize)
            unsigned = np.array(bits, f"u{dtype.itemsize}")
            return np.asarray(np.multiply(x, unsigned.astype(x.dtype)))
        if dtype.kind == "c":
            return _scaled_complex(x, factor)
        wide = np.dtype(np.float32) if dtype.accumulates_in_float32 else x.dtype
        by = np.array(float(factor.real), wide)
        return np.asarray(np.multiply(x.astype(wide, copy=False), by)).astype(
            x.dtype, copy=False
        )


def _scaled_complex(x: Array, factor: Number) -> Array:
    if factor.imag:
        return np.asarray(np.multiply(x, np.array(complex(factor), x.dtype)))
    out = np.empty_like(x)  # part by part: an infinity times 0j would be a NaN
    by = np.array(float(factor.real), out.real.dtype)
    out.real, out.imag = x.real * by, x.imag * by
    return out


def _check_factor(dtype: DType, factor: Number) -> None:
    where = f"premul_sum({factor!r})"
    if dtype.kind == "b":
        raise BadArgument(f"{where}: not defined for {dtype.name}")
    if isinstance(factor, complex) and dtype.kind != "c":
        raise BadArgument(f"{where}: a complex factor needs complex elements")
    if dtype.kind in "iu":
        if isinstance(factor, float) and not factor.is_integer():
            raise BadArgument(f"{where}: {dtype.name} needs an integer")
        return
    try:
        complex(factor)
    except OverflowError:
        raise BadArgument(f"premul_sum: the factor overflows {dtype.name}") from None


def _plain(value: Number) -> Number:
    """A plain Python number: NumPy's float64 is only a subclass of float."""
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    return complex(value)


def _refuse_change(function: Function, result: Any, like: Array) -> None:
    """Refuse a result of another shape or type; a scalar is an array without axes."""
    expected = f"{like.dtype}{list(like.shape)}"
    if not isinstance(result, np.ndarray | np.generic):
        got = "None" if result is None else f"a {type(result).__name__}"
    elif result.dtype != like.dtype or result.shape != like.shape:
        got = f"{result.dtype}{list(result.shape)}"
    else:
        return
    raise BadArgument(
        f"function {_name_of(function)} returned {got}, expected {expected}: a "
        "reduction returns an array of the shape and type it is given"
    )


def _name_of(function: Function) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
