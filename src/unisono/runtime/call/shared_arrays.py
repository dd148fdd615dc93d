"""Arrays in memory that all ranks can use."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from unisono.devices.arrays import DeviceArray, ordinal_of
from unisono.dtypes import DTYPES, numpy_dtype
from unisono.runtime.call.buffers import shape_and_dtype
from unisono.transports.session import Session


def shared_array(
    session: Session, shape: int | Sequence[int], dtype: Any, device: str
) -> Any:
    """A NumPy array in shared memory of this host, or an array on a device."""
    sizes, name = shape_and_dtype(shape, dtype)
    if device != "cpu":
        return DeviceArray(sizes, name, ordinal_of(device))
    raw = session.buffer(prod(sizes) * DTYPES[name].itemsize)
    return raw.view(numpy_dtype(name)).reshape(sizes)
