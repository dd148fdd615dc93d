"""Ranks as threads of one process: for notebooks and tests, on the same engine.

All buffers can be read in place, since all ranks have the same memory. On emulated
hosts they send over wires instead, by default over pairs of sockets.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from unisono import _native, cuda_queues
from unisono.errors import ConnectFailed
from unisono.transports.interface import Capabilities, ConnectOptions, Transport
from unisono.transports.lanes import choose_lanes
from unisono.transports.session import (
    WINDOW,
    Peer,
    Session,
    cores_here,
    refuse_too_many,
)
from unisono.transports.streams import (
    StreamEnd,
    StreamPair,
    Streams,
    encrypted_pair,
    socket_pair,
    streams_between_threads,
)

_BEAT_NS = 60 * 10**9
_SILENCE_NS = 3600 * 10**9
"""A thread that is silent is not dead: they all stop and go on together."""

MakeSessions = Callable[[int], Sequence[Session]]
"""Makes the sessions of so many ranks of one process."""


class Threads(Transport):
    """Threads of one process."""

    name = "threads"
    capabilities = Capabilities(between_processes=False, zero_copy=True)

    def connect(self, options: ConnectOptions) -> Session:
        """Wait for the other threads that connect for the same job and epoch."""
        options.announce(options.address)
        if options.world_size == 1:
            return alone()
        return connect_threads(options, sessions)


def sessions(
    n: int,
    *,
    window: int = WINDOW,
    hosts: Sequence[int] = (),
    encrypted: bool = False,
    pair: StreamPair | None = None,
) -> list[Session]:
    """The sessions of n ranks, one for each thread.

    Ranks with different numbers in `hosts` talk over streams, as ranks of different
    hosts do; `pair` makes the two ends of one.
    """
    refuse_too_many(n)
    if n > 1:
        cuda_queues.request_all()
    hub = _native.PeerTable(n)
    peers = [Peer(r, os.getpid(), socket.gethostname()) for r in range(n)]
    # Python runs one thread at a time, so a rank that spins keeps the others waiting.
    cores = 1
    apart = len(set(hosts)) > 1
    local_pair = encrypted_pair if encrypted else socket_pair
    streams: list[Streams | None] = [None] * n
    if apart:
        lanes = choose_lanes(1, n)  # of the environment alone
        made = streams_between_threads(n, pair or local_pair, lanes=lanes.lanes)
        streams = [*made]
    engines = [_native.Engine.between_threads(hub, r) for r in range(n)]
    if apart:
        for engine in engines:
            engine.use_io_threads(lanes.io_threads, lanes.least_bytes, lanes.adders)
        _start_lifelines(engines, local_pair)
    return [
        Session(
            engines[r],
            r,
            peers,
            cores,
            window,
            hosts=hosts,
            streams=streams[r],
            reaches=apart,
            lanes=lanes.__str__ if apart else str,
        )
        for r in range(n)
    ]


def _start_lifelines(engines: Sequence[_native.Engine], pair: StreamPair) -> None:
    """Let ranks that have no memory in common learn of each other's failures.

    By lifelines, as ranks of several hosts do: else one that waits for a rank which has
    failed before it opened a stream would wait until its own time is up.
    """
    n = len(engines)
    ends: list[list[StreamEnd | None]] = [[None] * n for _ in engines]
    for leaf in range(1, n):
        ends[0][leaf], ends[leaf][0] = pair()
    for engine, row in zip(engines, ends, strict=True):
        keys = [b"" if end is None else end.key for end in row]
        engine.connect_lifeline(
            [None if end is None else end.wire for end in row],
            keys,
            keys,
            0,
            _BEAT_NS,
            _SILENCE_NS,
        )


def alone() -> Session:
    """The session of a world of one."""
    me = Peer(0, os.getpid(), socket.gethostname())
    engine = _native.Engine.between_threads(_native.PeerTable(1), 0)
    return Session(engine, 0, [me], cores_here())


# --- how threads find each other


class _Waiting:
    """The threads of one world that have connected, until all have or one fails."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ranks: set[int] = set()
        self.sessions: Sequence[Session] = ()
        self.error: Exception | None = None


_WORLDS: dict[tuple[str, int], _Waiting] = {}
_CHANGED = threading.Condition()


def connect_threads(options: ConnectOptions, make: MakeSessions) -> Session:
    """Wait until all ranks of a world are here; the last makes the sessions of all."""
    until = time.monotonic() + options.timeout_s
    key = options.job, options.epoch
    with _CHANGED:
        world = _WORLDS.setdefault(key, _Waiting(options.world_size))
        _refuse_wrong(world, options)
        world.ranks.add(options.rank)
        if len(world.ranks) == world.world_size:
            _settle(key, lambda: make(world.world_size))
        while not world.sessions and world.error is None:
            left = until - time.monotonic()
            if left <= 0 or options.lost():
                _settle(key, lambda: _give_up(world, options))
            else:
                _CHANGED.wait(left if options.lost is str else min(left, 0.05))
        if world.error is not None:
            raise world.error
        return world.sessions[options.rank]


def _refuse_wrong(world: _Waiting, options: ConnectOptions) -> None:
    if world.world_size != options.world_size:
        raise ConnectFailed(
            f"rank {options.rank} has a world of {options.world_size} ranks, others "
            f"have one of {world.world_size}: start all with one world size"
        )
    if options.rank in world.ranks or not 0 <= options.rank < world.world_size:
        raise ConnectFailed(f"two threads say that they are rank {options.rank}")


def _settle(key: tuple[str, int], make: Callable[[], Sequence[Session]]) -> None:
    """What becomes of a world, for all threads that wait for it."""
    world = _WORLDS.pop(key)
    try:
        world.sessions = make()
    except Exception as why:
        world.error = why
    _CHANGED.notify_all()


def _give_up(world: _Waiting, options: ConnectOptions) -> NoReturn:
    missing = sorted(set(range(world.world_size)) - world.ranks)
    raise ConnectFailed(
        options.lost()
        or f"ranks {missing} did not connect within {options.timeout_s:g} s: has every "
        "thread been started, with the same job?",
        missing=missing,
    )
