"""Ranks as threads of one process: for notebooks and tests, on the same engine.

All buffers can be read in place, for all ranks have the same memory; unless they are
told to behave as if they were on several hosts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from unisono import _native
from unisono.transports.base import (
    WINDOW,
    Peer,
    Transport,
    cores_here,
    refuse_too_many,
)
from unisono.transports.streams import Streams, between_threads


def threads(
    n: int,
    *,
    window: int = WINDOW,
    hosts: Sequence[int] = (),
    encrypted: bool = False,
) -> list[Transport]:
    """The transports of n ranks, one for each thread."""
    refuse_too_many(n)
    hub = _native.Hub(n)
    peers = [Peer(r, os.getpid(), socket.gethostname()) for r in range(n)]
    # Python runs one thread at a time, so a rank that spins keeps the others waiting.
    cores = 1
    apart = len(set(hosts)) > 1
    streams: list[Streams | None] = [None] * n
    if apart:
        streams = [*between_threads(range(n), encrypted=encrypted)]
    return [
        Transport(
            _native.Engine.between_threads(hub, r),
            r,
            peers,
            cores,
            window,
            hosts=hosts,
            streams=streams[r],
            reaches=apart,
        )
        for r in range(n)
    ]


def alone() -> Transport:
    """The transport of a world of one."""
    me = Peer(0, os.getpid(), socket.gethostname())
    engine = _native.Engine.between_threads(_native.Hub(1), 0)
    return Transport(engine, 0, [me], cores_here())
