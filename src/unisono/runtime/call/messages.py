"""The arrays of messages. One on a device travels through the host's memory.

The sender waits for what the current stream has queued, copies it and sends the copy;
the receiver copies what has arrived, which the current stream orders.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.devices.arrays import DeviceArray, is_on_device, is_tensor
from unisono.dtypes import numpy_dtype
from unisono.errors import BadArgument
from unisono.runtime.call.arguments import target_of
from unisono.runtime.call.buffers import Buffer, buffer_of, copy_back, readable


def outgoing(x: Any, settle: Callable[[], None]) -> Buffer:
    """What is sent. `settle` waits for the calls that may still write to x."""
    if not is_on_device(x):
        return readable(x, "send")
    if is_tensor(x):
        return readable(x.detach().cpu(), "send")
    _refuse_other_libraries(x, "send")
    settle()
    return readable(x.numpy(), "send")


def incoming(
    out: Any, settle: Callable[[], None]
) -> tuple[Buffer, Callable[[Any], Any] | None]:
    """The buffer that a message is received in, and how it gets to `out`."""
    if not is_on_device(out):
        return target_of(out, "recv")
    if is_tensor(out):
        room = sys.modules["torch"].empty(out.shape, dtype=out.dtype)
    else:
        _refuse_other_libraries(out, "recv")
        room = np.empty(out.shape, numpy_dtype(out.dtype))

    def finish(result: Any) -> Any:
        if isinstance(out, DeviceArray):
            settle()
            out.copy_from(room)
        else:
            copy_back(out, room)
        return result

    return buffer_of(room, "recv"), finish


def _refuse_other_libraries(x: Any, name: str) -> None:
    if not isinstance(x, DeviceArray):
        raise BadArgument(
            f"{name}: a {type(x).__name__} on a device; give a tensor of torch, an "
            'array of comm.empty(device="cuda"), or a copy on the host'
        )
