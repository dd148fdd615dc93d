"""Steps that all ranks make together when they connect their devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from unisono.errors import DeviceError
from unisono.runtime.call.arguments import all_gather
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import as_reduction
from unisono.runtime.device.stream_calls import HostHalf

_TEXT = 240  # bytes of an error that all ranks raise
T = TypeVar("T")


def together(host: HostHalf, step: Callable[[], T]) -> T:
    """A step of all ranks; if it fails on one, all raise the same DeviceError."""
    made: list[T] = []
    why = ""
    try:
        made.append(step())
    except (RuntimeError, OSError, MemoryError) as error:
        why = str(error) or type(error).__name__
    for rank, words in enumerate(texts(host, why)):
        if words:
            raise DeviceError(
                f"the ranks' devices could not be connected; rank {rank}: {words}"
            )
    return made[0]


def texts(host: HostHalf, mine: str) -> list[str]:
    """What each rank says."""
    rows = gathered(host, mine.encode()[:_TEXT].ljust(_TEXT, b"\0"))
    return [row.rstrip(b"\0").decode(errors="replace") for row in rows]


def gathered(host: HostHalf, mine: bytes) -> list[bytes]:
    """The same number of bytes of each rank, by the communicator's host half."""
    call = all_gather(host.position, np.frombuffer(mine, np.uint8), None, None)
    how = CallOptions(label="device communicator")
    found = host.run(call, as_reduction("sum"), how)
    return [row.tobytes() for row in found.reshape(host.world_size, -1)]
