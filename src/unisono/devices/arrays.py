"""Arrays in the memory of a CUDA device, of any library.

torch tensors, and whatever has `__cuda_array_interface__` (CuPy, Numba) or DLPack
(JAX). No library is imported: one that made an array is loaded already.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono import _native
from unisono.dtypes import DTYPES, DType, dtype_of, numpy_dtype
from unisono.errors import BadArgument, unknown

_DLPACK_CUDA = 2
_DLPACK_NAMES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}
"""Element types by DLPack's code and number of bits."""
_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


@dataclass(frozen=True, slots=True)
class DeviceView:
    """An array on a device; `stream` is the one it is ready on, if it says so."""

    address: int
    shape: tuple[int, ...]
    dtype: DType
    ordinal: int
    is_contiguous: bool
    is_readonly: bool = False
    stream: int = 0


class ArrayFacts(NamedTuple):
    """What a call needs to know of a contiguous array whose kind was used before.

    `kind` is its type, shape and device; `held` are bytes that are not freed as long as
    it is kept until calls have ended; `stream` is the current one of its library.
    """

    kind: Hashable
    address: int
    nbytes: int
    held: int
    stream: int | None


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor, without importing torch."""
    return not isinstance(x, np.ndarray | DeviceArray) and hasattr(x, "data_ptr")


def is_on_device(x: Any) -> bool:
    """Whether x is an array in the memory of a CUDA device."""
    if isinstance(x, np.ndarray):
        return False
    if isinstance(x, DeviceArray):
        return True
    if is_tensor(x):
        return bool(x.device.type == "cuda")
    if hasattr(x, "__cuda_array_interface__"):
        return True
    of = getattr(x, "__dlpack_device__", None)
    return of is not None and of()[0] == _DLPACK_CUDA


def view_of(x: Any, where: str) -> DeviceView:
    """What x is; BadArgument, which begins with `where`, if it cannot be used."""
    if isinstance(x, DeviceArray):
        return x.view
    if is_tensor(x):
        contiguous = bool(x.is_contiguous())
        return DeviceView(
            x.data_ptr(), tuple(x.shape), dtype_of(x), x.device.index, contiguous
        )
    if hasattr(x, "__cuda_array_interface__"):
        about = x.__cuda_array_interface__
        ordinal = getattr(getattr(x, "device", None), "id", None)  # CuPy's
        return _by_array_interface(about, ordinal, where)
    return _by_dlpack(x, where)


def facts_of(x: Any) -> ArrayFacts | None:
    """The facts of an array that can be had quickly; None of others."""
    if isinstance(x, DeviceArray):
        return x.facts
    if not is_tensor(x) or not x.is_cuda:
        return None
    torch = sys.modules["torch"]
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if x.layout is not torch.strided or not x.is_contiguous():
        return None
    if x.is_conj() or x.is_neg():
        return None
    device = x.device
    return ArrayFacts(
        (x.dtype, x.shape, device),
        x.data_ptr(),
        x.nbytes,
        0,  # torch frees by stream
        current_torch_stream(device),
    )


def _by_array_interface(
    about: dict[str, Any], ordinal: int | None, where: str
) -> DeviceView:
    shape = tuple(about["shape"])
    name = _name_of(about["typestr"], where)
    dtype = DTYPES[name]
    address, readonly = about["data"]
    if about.get("mask") is not None:
        raise BadArgument(f"{where}: a masked array cannot be used")
    strides = about.get("strides")
    contiguous = strides is None or tuple(strides) == row_strides(shape, dtype.itemsize)
    if ordinal is None:
        ordinal = _native.cuda_locate(address)[0] if address else 0
    return DeviceView(
        address,
        shape,
        dtype,
        ordinal,
        contiguous or 0 in shape,
        bool(readonly),
        about.get("stream") or 0,
    )


def _name_of(typestr: str, where: str) -> str:
    order, kind, size = typestr[0], typestr[1], int(typestr[2:])
    if order == ">" and size > 1:
        raise BadArgument(f"{where}: the array has a foreign byte order ({typestr})")
    name = _KINDS.get(kind, kind)
    name = name if name == "bool" else f"{name}{8 * size}"
    if name not in DTYPES:
        raise unknown("element type", name, DTYPES)
    return name


def _by_dlpack(x: Any, where: str) -> DeviceView:
    address, shape, strides, code, bits, kind, ordinal = _native.dlpack_view(x)
    if kind != _DLPACK_CUDA:
        raise BadArgument(f"{where}: the array is on a device that is not CUDA's")
    name = _DLPACK_NAMES.get((code, bits), f"DLPack's type {code} of {bits} bits")
    if name not in DTYPES:
        raise unknown("element type", name, DTYPES)
    contiguous = tuple(strides) == row_strides(shape, 1) or 0 in shape
    # Arrays that only speak DLPack (JAX's) must not be changed.
    return DeviceView(
        address, tuple(shape), DTYPES[name], ordinal, contiguous, is_readonly=True
    )


def row_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides of a contiguous array in C order; an axis of one element has any."""
    return tuple(prod(shape[i + 1 :]) * itemsize for i in range(len(shape)))


def stream_handle(stream: Any) -> int:
    """CUDA's handle of a stream of any library, or the handle itself."""
    if isinstance(stream, int):
        return stream
    if isinstance(stream, _native.CudaStream):
        return stream.handle
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, others
        if isinstance(found := getattr(stream, name, None), int):
            return found
    raise BadArgument(
        f"stream: got a {type(stream).__name__}, expected a stream of torch or CuPy, "
        "or CUDA's handle of one"
    )


def current_stream(x: Any, where: str) -> int | None:
    """The stream that the library of x would launch on now, as CUDA's handle.

    None if it has no such thing: then the default stream, or the one that is given.
    """
    if isinstance(x, DeviceArray):
        return None
    if is_tensor(x):
        return current_torch_stream(x.device)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return int(cupy.cuda.get_current_stream().ptr)
    return view_of(x, where).stream or None


def current_torch_stream(device: Any) -> int:
    """The current stream of torch on a device, as CUDA's handle."""
    torch = sys.modules["torch"]
    handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # makes no object
    if handle is not None:
        return int(handle(device.index))
    return int(torch.cuda.current_stream(device).cuda_stream)


class DeviceArray:
    """Memory on a device as an array, which other libraries can use without a copy.

    As in torch.as_tensor(x, device="cuda") or cupy.asarray(x).
    """

    def __init__(self, shape: Sequence[int], dtype: str, ordinal: int) -> None:
        """Its elements are zero."""
        self.shape = tuple(shape)
        self.dtype = dtype
        self.ordinal = ordinal
        self.nbytes = prod(self.shape) * DTYPES[dtype].itemsize
        self._memory = _native.CudaMemory(ordinal, max(1, self.nbytes))
        self._offset = 0
        self._describe()

    def __len__(self) -> int:
        """How many rows it has."""
        return self.shape[0]

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Some of its rows, in the same memory."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise BadArgument(f"a DeviceArray has parts such as x[2:5], not x[{rows}]")
        start, stop, _ = rows.indices(len(self))
        row = self.nbytes // max(1, len(self))
        part = copy(self)
        part.shape = (max(0, stop - start), *self.shape[1:])
        part.nbytes = len(part) * row
        part._offset = self._offset + start * row
        part._describe()
        return part

    def copy_from(self, x: NDArray[Any]) -> None:
        """Copy a NumPy array of the same shape and type to the device."""
        if x.shape != self.shape or x.dtype.name != self.dtype:
            raise BadArgument(
                f"copy_from: got {x.dtype.name}{list(x.shape)}, expected "
                f"{self.dtype}{list(self.shape)}"
            )
        whole = np.ascontiguousarray(x)
        self._memory.write(whole.ctypes.data, whole.nbytes, self._offset)

    def numpy(self) -> NDArray[Any]:
        """A copy on the host; the caller waits for calls that write to it first."""
        made = np.empty(self.shape, numpy_dtype(self.dtype))
        self._memory.read(made.ctypes.data, made.nbytes, self._offset)
        return made

    def _describe(self) -> None:
        """Its memory, type and shape do not change."""
        self.address = self._memory.address + self._offset
        self.view = DeviceView(
            self.address,
            self.shape,
            DTYPES[self.dtype],
            self.ordinal,
            is_contiguous=True,
        )
        kind = self.dtype, self.shape, self.ordinal
        self.facts = ArrayFacts(
            kind, self.address, self.nbytes, self._memory.bytes, None
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA's array interface, version 3."""
        return {
            "shape": self.shape,
            "typestr": _typestr(DTYPES[self.dtype]),
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def __repr__(self) -> str:
        """One line."""
        return f"<DeviceArray {self.dtype}{list(self.shape)} on cuda:{self.ordinal}>"


def _typestr(dtype: DType) -> str:
    kind = dtype.kind if dtype.kind in "biufc" else "V"
    return f"{'|' if dtype.itemsize == 1 else '<'}{kind}{dtype.itemsize}"


def ordinal_of(device: str) -> int:
    """The number of a device, as in "cuda:1"; "cuda" is the first."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number.isdigit() or device == "cuda"):
        raise BadArgument(f"device = {device!r}: expected 'cpu', 'cuda' or 'cuda:0'")
    return int(number or 0)


def new_array(like: Any, view: DeviceView, shape: tuple[int, ...]) -> Any:
    """An array of the kind and type of `like`, not yet filled."""
    if is_tensor(like):
        return like.detach().new_empty(shape)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(like, cupy.ndarray):
        with cupy.cuda.Device(view.ordinal):
            return cupy.empty(shape, dtype=like.dtype)
    return DeviceArray(shape, view.dtype.name, view.ordinal)
