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
from unisono.transports.streams import End, Streams, between_threads, pair

_BEAT_NS = 60 * 10**9
_SILENCE_NS = 3600 * 10**9
"""A thread that is silent is not dead: they all stop and go on together."""


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
    engines = [_native.Engine.between_threads(hub, r) for r in range(n)]
    if apart:
        _live(engines, encrypted)
    return [
        Transport(
            engines[r],
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


def _live(engines: Sequence[_native.Engine], encrypted: bool) -> None:
    """Let ranks that have no memory in common hear of each other's verdicts.

    By lifelines, as ranks of several hosts do: else one that waits for a rank which has
    failed before it opened a stream would wait until its own time is up.
    """
    n = len(engines)
    ends: list[list[End | None]] = [[None] * n for _ in engines]
    for leaf in range(1, n):
        ends[0][leaf], ends[leaf][0] = pair(encrypted)
    for engine, row in zip(engines, ends, strict=True):
        keys = [b"" if end is None else end.key for end in row]
        engine.live(
            [None if end is None else end.wire for end in row],
            keys,
            keys,
            0,
            _BEAT_NS,
            _SILENCE_NS,
        )


def alone() -> Transport:
    """The transport of a world of one."""
    me = Peer(0, os.getpid(), socket.gethostname())
    engine = _native.Engine.between_threads(_native.Hub(1), 0)
    return Transport(engine, 0, [me], cores_here())
