"""Element types and reductions: one table for NumPy, torch and the native core.

The order of both tables is that of the enumerations in native/kernels/reduce.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from unisono.errors import BadArgument, MissingExtra, unknown


@dataclass(frozen=True)
class DType:
    """One element type; `kind` is NumPy's letter, and v for those of ml_dtypes."""

    name: str
    itemsize: int
    kind: str
    code: int

    @property
    def accumulates_in_float32(self) -> bool:
        """Whether sums are made in float32 and rounded once."""
        return self.kind in "fv" and self.itemsize <= 2


_TABLE = (
    [("bool", 1, "b")]
    + [(f"int{8 * size}", size, "i") for size in (1, 2, 4, 8)]
    + [(f"uint{8 * size}", size, "u") for size in (1, 2, 4, 8)]
    + [
        ("float16", 2, "f"),
        ("bfloat16", 2, "v"),
        ("float32", 4, "f"),
        ("float64", 8, "f"),
    ]
    + [("complex64", 8, "c"), ("complex128", 16, "c")]
    + [("float8_e4m3fn", 1, "v"), ("float8_e5m2", 1, "v")]
)

DTYPES: dict[str, DType] = {
    name: DType(name, size, kind, code)
    for code, (name, size, kind) in enumerate(_TABLE)
}

REDUCTIONS: dict[str, int] = {
    name: code
    for code, name in enumerate(("sum", "prod", "min", "max", "band", "bor", "bxor"))
}
"""The operations of the native core; `mean` is a sum, divided in the end."""

OPS = (*REDUCTIONS, "mean")


_SEEN: dict[Any, DType] = {}  # their own types of element types, once seen


def dtype_of(array: Any) -> DType:
    """The element type of a NumPy array or a torch tensor, without importing torch."""
    found = _SEEN.get(array.dtype)
    if found is None:
        name = str(array.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise unknown("element type", name, DTYPES)
        found = _SEEN[array.dtype] = DTYPES[name]
    return found


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name; the small floats come from ml_dtypes."""
    if name not in DTYPES:
        raise unknown("element type", name, DTYPES)
    if DTYPES[name].kind != "v":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ModuleNotFoundError as missing:
        raise MissingExtra("lowp", f"{name} in NumPy") from missing
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def check_op(dtype: DType, op: str) -> None:
    """Raise BadArgument if `op` is unknown, or has no meaning for the type."""
    if op not in OPS:
        raise unknown("reduction", op, OPS)
    bitwise, ordered = op in ("band", "bor", "bxor"), op in ("min", "max")
    if (
        (bitwise and dtype.kind not in "biu")
        or (ordered and dtype.kind == "c")
        or (op == "mean" and dtype.kind == "b")
    ):
        raise BadArgument(f"{op} has no meaning for {dtype.name}")
