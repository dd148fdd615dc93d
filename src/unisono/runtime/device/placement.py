"""Where the words and windows of all ranks are: in device memory, or in host memory.

In device memory, if every rank's device can access the memory of all others. All ranks
decide it together, and UNISONO_CUDA_WINDOWS of any rank can say it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from unisono.devices.found import WINDOWS as VARIABLE
from unisono.errors import BadArgument, DeviceError

HOST, DEVICE = "host", "device"
_LENGTH = 16


def wanted() -> bytes:
    """What this rank's environment says, for the other ranks; empty is no wish."""
    return os.environ.get(VARIABLE, "").encode()[:_LENGTH].ljust(_LENGTH, b"\0")


def why_on_host(ranks: Sequence[bytes]) -> str:
    """Why the windows must be in host memory by the ranks' environments, or ""."""
    said = [_said(row) for row in ranks]
    for rank, value in enumerate(said):
        if value not in ("", HOST, DEVICE):
            raise BadArgument(
                f"{VARIABLE}={value} (rank {rank}): expected {HOST!r} or {DEVICE!r}"
            )
    if HOST not in said:
        return ""
    if DEVICE in said:
        raise BadArgument(
            f"{VARIABLE} is {HOST!r} on rank {said.index(HOST)} and {DEVICE!r} on rank "
            f"{said.index(DEVICE)}: all ranks must agree"
        )
    return f"{VARIABLE}={HOST} on rank {said.index(HOST)}"


def refuse_host(ranks: Sequence[bytes], why: str) -> None:
    """Raise DeviceError if a rank wants the windows in device memory."""
    if DEVICE in [_said(row) for row in ranks]:
        raise DeviceError(
            f"{VARIABLE}={DEVICE}, but the windows cannot be in device memory: {why}"
        )


def _said(row: bytes) -> str:
    return row.rstrip(b"\0").decode(errors="replace")
