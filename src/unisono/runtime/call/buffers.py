"""Arrays as the engine sees them: an address, a shape and an element type.

NumPy arrays, torch tensors and arrays on CUDA devices, without importing torch. A
non-contiguous array is copied into a contiguous one and, if an output, back again.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import _native
from unisono.devices.arrays import (
    DeviceArray,
    DeviceView,
    is_on_device,
    is_tensor,
    new_array,
    view_of,
)
from unisono.dtypes import DTYPES, DType, dtype_of, numpy_dtype
from unisono.errors import BadArgument, unknown, whole_number

HOST = -1
"""The device of arrays in the host's memory."""

IN_PLACE_FROM = 32 << 10
"""Calls on fewer bytes are staged, in whatever memory they are."""


@dataclass(slots=True)
class Buffer:
    """One array: `array` is the user's, or a contiguous copy of it.

    `device` is the ordinal of the CUDA device whose memory it is in, or HOST.
    """

    array: Any
    address: int
    shape: tuple[int, ...]
    dtype: DType
    device: int = HOST

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.count * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """The length of the first axis; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row(self) -> int:
        """The number of elements of one row."""
        return prod(self.shape[1:])


def address_of(x: NDArray[Any]) -> int:
    """The address of an array's elements; the native core finds it fastest."""
    return _native.array_address(x) or x.ctypes.data


def buffer_of(x: Any, where: str) -> Buffer:
    """The buffer of a contiguous array."""
    if is_on_device(x):
        return _viewed(x, view_of(x, where))
    if is_tensor(x):
        return Buffer(x, x.data_ptr(), tuple(x.shape), dtype_of(x))
    return Buffer(x, address_of(x), x.shape, _dtype(x, where))


def _viewed(x: Any, view: DeviceView) -> Buffer:
    """The buffer of an array on a device."""
    address = 0 if 0 in view.shape else view.address
    return Buffer(x, address, view.shape, view.dtype, view.ordinal)


def _on_device(x: Any, where: str, *, written: bool) -> Buffer:
    """The buffer of an array on a device that is no tensor: it is looked at once."""
    view = view_of(x, where)
    if written and view.is_readonly:
        raise BadArgument(f"{where}: the array is read-only, but is written to")
    if not view.is_contiguous:
        raise BadArgument(
            f"{where}: the array on the device is not contiguous; make it so with "
            "its own library"
        )
    return _viewed(x, view)


def readable(x: Any, where: str) -> Buffer:
    """The buffer of an input: a copy if x is not contiguous."""
    _refuse_others(x, where)
    if is_tensor(x):
        plain = x.detach()
        return buffer_of(_resolved(plain).contiguous(), where)
    if not isinstance(x, np.ndarray):
        return _on_device(x, where, written=False)
    if not x.flags.c_contiguous:
        _dtype(x, where)
        x = np.ascontiguousarray(x)
    return buffer_of(x, where)


def writable(x: Any, where: str) -> tuple[Buffer, bool]:
    """The buffer of an output, and whether it is a copy to be copied back."""
    _refuse_others(x, where)
    if isinstance(x, np.ndarray):
        if not x.flags.writeable:
            raise BadArgument(f"{where}: the array is read-only, but is written to")
    elif not is_tensor(x):
        return _on_device(x, where, written=True), False
    if is_contiguous(x):
        return buffer_of(x, where), False
    return readable(x, where), True


def is_contiguous(x: Any) -> bool:
    """Whether its elements are contiguous, in C order."""
    if is_tensor(x):
        return bool(x.is_contiguous()) and _resolved(x) is x
    if is_on_device(x):
        return view_of(x, "").is_contiguous
    return bool(x.flags.c_contiguous)


def copy_back(x: Any, stand_in: Any) -> None:
    """Bring the result from the contiguous stand-in to where it was wanted."""
    if is_tensor(x):
        x.detach().copy_(stand_in)
    elif isinstance(x, DeviceArray):
        raise BadArgument(
            "x and out overlap: give two arrays, or tensors of torch or CuPy"
        )
    else:
        x[...] = stand_in


def new_like(x: Any, shape: tuple[int, ...]) -> Any:
    """An array of the kind and type of x, not yet filled."""
    if is_tensor(x):
        return x.detach().new_empty(shape)
    if is_on_device(x):
        return new_array(x, view_of(x, ""), shape)
    return np.empty(shape, dtype=x.dtype)


def as_numpy(buffer: Buffer) -> NDArray[Any]:
    """A NumPy array over the same memory; small floats need ml_dtypes."""
    if not is_tensor(buffer.array):
        found: NDArray[Any] = buffer.array
        return found
    dtype = numpy_dtype(buffer.dtype.name)
    if buffer.nbytes == 0:
        return np.empty(buffer.shape, dtype)
    raw = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.address)
    flat: NDArray[Any] = np.frombuffer(memoryview(raw), dtype=dtype)
    return flat.reshape(buffer.shape)


def overlap(one: Buffer, other: Buffer) -> int | None:
    """How many bytes `other` begins after `one`, if they share any memory."""
    apart = other.address - one.address
    if one.nbytes and other.nbytes and -other.nbytes < apart < one.nbytes:
        return apart
    return None


def _resolved(tensor: Any) -> Any:
    """The tensor itself, unless its bytes are not yet its values (conjugated views)."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def _dtype(x: NDArray[Any], where: str) -> DType:
    if not x.dtype.isnative:
        raise BadArgument(
            f"{where}: the array has a foreign byte order ({x.dtype.str}); "
            "convert it, as in x.astype(x.dtype.newbyteorder('='))"
        )
    return dtype_of(x)


def _refuse_others(x: Any, where: str) -> None:
    if is_tensor(x):
        if x.device.type not in ("cpu", "cuda"):
            raise BadArgument(
                f"{where}: the tensor is on {x.device}; only CPU and CUDA tensors are "
                "supported"
            )
        if str(x.layout) != "torch.strided":
            raise BadArgument(
                f"{where}: the tensor is {x.layout}, expected a dense one"
            )
    elif isinstance(x, np.ndarray):
        if _is_special_array(x):
            raise _unexpected(x, where)
    elif not is_on_device(x):
        raise _unexpected(x, where)


def _unexpected(x: Any, where: str) -> BadArgument:
    return BadArgument(
        f"{where}: expected a NumPy array, a torch tensor or an array on a CUDA "
        f"device, got a {type(x).__name__}"
    )


def _is_special_array(x: NDArray[Any]) -> bool:
    """Whether it is a masked array or a matrix."""
    if type(x) is np.ndarray:
        return False
    masked = sys.modules.get("numpy.ma")  # not imported here: that is slow
    return isinstance(x, np.matrix) or (
        masked is not None and isinstance(x, masked.MaskedArray)
    )


def shape_and_dtype(shape: int | Sequence[int], dtype: Any) -> tuple[list[int], str]:
    """The axes of an array to be made, and the name of its element type."""
    named = dtype if isinstance(dtype, str) else getattr(dtype, "name", str(dtype))
    name = str(named).removeprefix("torch.")
    if name not in DTYPES:
        name = str(np.dtype(dtype))
    if name not in DTYPES:
        raise unknown("element type", name, DTYPES)
    axes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    sizes = [whole_number("shape", s) for s in axes]
    if min(sizes, default=0) < 0:
        raise BadArgument(f"empty: shape = {shape}: no axis can be negative")
    return sizes, name
