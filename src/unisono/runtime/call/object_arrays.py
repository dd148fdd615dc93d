"""Arrays as element type name, shape and raw bytes, to be sent.

Names are the same on every machine: NumPy's with the byte order in front ("<f4"), those
of ml_dtypes ("bfloat16"), and torch's ("float32"). Types without such a name cannot be
sent: objects, records, and long double, which differs between machines. Two types with
one name become one: NumPy's longlong arrives as int64.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.errors import MissingExtra

Shape = tuple[int, ...]
Bytes = NDArray[np.uint8]

ARRAY, SCALAR, TENSOR = b"a", b"g", b"t"

_NUMPY_NAME = re.compile(
    r"\|b1|[<>|]([iu]1|[iu][248]|f[248]|c8|c16|[US][1-9][0-9]{0,8}|[mM]8(\[\w+\])?)"
)
_SMALL_NAME = re.compile(r"b?(float|complex)[0-9]+(_\w+)?|u?int[0-9]+", re.ASCII)
_TORCH_NAME = re.compile(
    r"bool|u?int(8|16|32|64)|b?float16|float(32|64)|complex(32|64|128)|float8_\w+"
)


class ArrayParts(NamedTuple):
    """Type name, shape and bytes of an array, a NumPy scalar or a tensor (`kind`)."""

    kind: bytes
    name: str
    shape: Shape
    raw: Bytes


def parts_of(obj: Any) -> ArrayParts | None:
    """The parts of an array, a NumPy scalar or a tensor; None for anything else."""
    if type(obj) is np.ndarray:
        return _numpy_parts(ARRAY, obj)
    if isinstance(obj, np.generic):
        exact = type(obj) is obj.dtype.type
        return _numpy_parts(SCALAR, np.asarray(obj)) if exact else None
    torch = sys.modules.get("torch")  # imported if obj is a tensor
    if torch is not None and type(obj) is torch.Tensor:
        return _torch_parts(torch, obj)
    return None


def described(obj: Any) -> str:
    """A short description of an object's type."""
    what = f"a {type(obj).__name__}"
    torch = sys.modules.get("torch")
    if isinstance(obj, np.ndarray | np.generic):
        return f"{what} of {obj.dtype}"
    if torch is not None and isinstance(obj, torch.Tensor):
        return f"{what} of {obj.dtype} on {obj.device} ({obj.layout})"
    return what


def find_dtype(kind: bytes, name: str) -> Any:
    """NumPy's or torch's element type of this name; ValueError if there is none."""
    if kind == TENSOR:
        return _foreign(_TORCH_NAME, name, "torch", "torch")
    if _NUMPY_NAME.fullmatch(name):
        return np.dtype(name)
    return np.dtype(_foreign(_SMALL_NAME, name, "ml_dtypes", "lowp"))


def restored(parts: ArrayParts) -> Any:
    """The inverse of `parts_of`; the result owns the raw bytes."""
    dtype = find_dtype(parts.kind, parts.name)
    if parts.kind == TENSOR:
        if parts.name == "bool":
            _refuse_invalid("b", parts.raw)
        torch = sys.modules["torch"]
        flat = _flat(torch.from_numpy(parts.raw)).view(dtype)
        return flat.reshape(parts.shape)
    _refuse_invalid(dtype.kind, parts.raw, dtype.str[0])
    array = parts.raw.view(dtype).reshape(parts.shape)
    if parts.kind == SCALAR:
        if parts.shape:
            raise ValueError("a scalar with axes")
        return array[()]
    return array


def _numpy_parts(kind: bytes, array: NDArray[Any]) -> ArrayParts | None:
    dtype = array.dtype
    name = dtype.str
    if dtype.type.__module__ == "ml_dtypes" and dtype == np.dtype(dtype.type):
        name = dtype.name
    if not (_NUMPY_NAME.fullmatch(name) or _SMALL_NAME.fullmatch(name)):
        return None
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return ArrayParts(kind, name, array.shape, raw)


def _torch_parts(torch: Any, tensor: Any) -> ArrayParts | None:
    name = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not (plain and _TORCH_NAME.fullmatch(name)):
        return None
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    raw = _flat(tensor).view(torch.uint8).numpy()
    return ArrayParts(TENSOR, name, tuple(tensor.shape), raw)


def _flat(tensor: Any) -> Any:
    """A contiguous tensor with one axis and stride 1, also if it is (almost) empty.

    Torch keeps any stride of an axis of length 0 or 1, and then refuses the view.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def _foreign(names: re.Pattern[str], name: str, module: str, extra: str) -> Any:
    """An element type of another module, which is imported here."""
    if not names.fullmatch(name):
        raise ValueError(f"no element type is called {name!r}")
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as missing:
        raise MissingExtra(extra, f"an array of {name}") from missing
    if found is None:
        raise ValueError(f"this {module} has no {name}")
    return found


def _refuse_invalid(kind: str, raw: Bytes, order: str = "=") -> None:
    """Refuse bytes that are not valid booleans or characters."""
    if kind == "b" and raw.size and raw.max() > 1:
        raise ValueError("a boolean that is neither 0 nor 1")
    if kind == "U" and raw.size and raw.view(f"{order}u4").max() > sys.maxunicode:
        raise ValueError("a character that Unicode does not have")
