"""Ranks as processes of one host: how they meet, and what they then have in common.

They find each other by the name of their job (`rendezvous`). Afterwards every two ranks
have a pair of connected sockets, over which they pass each other the descriptors of
shared memory.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from unisono import _native
from unisono.errors import ConnectFailed
from unisono.transports.base import (
    WINDOW,
    Peer,
    Transport,
    cores_here,
    refuse_too_many,
)
from unisono.transports.limits import (
    are_used_up,
    raise_descriptor_limit,
    too_few_descriptors,
)
from unisono.transports.rendezvous_local import Answer, Hello, Rendezvous
from unisono.transports.unix import pid_namespace


def host_identity() -> str:
    """What two processes have in common if, and only if, they share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return boot


def meet(
    rank: int,
    world_size: int,
    job: str,
    *,
    version: str,
    timeout_s: float = 60.0,
    window: int = WINDOW,
    lost: Callable[[], str] = str,
    note: int = 0,
) -> Transport:
    """Find the other ranks of `job` on this host, or tell who is missing.

    `lost` says why the meeting cannot be, as soon as that is known. Rank 0's `note`
    comes to all of them.
    """
    refuse_too_many(world_size)
    offer = Answer(window=window, note=note)
    sockets, answer = _meet(rank, world_size, job, version, timeout_s, offer, lost)
    peers = [Peer(r, pid, host) for r, (pid, host) in enumerate(answer.peers)]
    ends = [sockets[r].detach() if r in sockets else -1 for r in range(world_size)]
    engine = _native.Engine.between_processes(rank, ends, _known_pids(rank, answer))
    return Transport(
        engine,
        rank,
        peers,
        cores_here(),
        answer.window,
        note=answer.note,
        apart=tuple(answer.apart),
    )


def _known_pids(rank: int, answer: Answer) -> list[int]:
    """The process ids that mean something here; 0 for the others."""
    apart = set(answer.apart)
    pids = [pid for pid, _ in answer.peers]
    if rank in apart:
        return [pid if r == rank else 0 for r, pid in enumerate(pids)]
    return [0 if r in apart else pid for r, pid in enumerate(pids)]


def meet_here(
    rank: int,
    count: int,
    job: str,
    *,
    version: str,
    timeout_s: float,
    lost: Callable[[], str] = str,
) -> tuple[dict[int, socket.socket], list[int]]:
    """For those that have met across hosts: sockets and process ids of those here.

    They are numbered 0 to count - 1.
    """
    offer = Answer(window=WINDOW)
    sockets, answer = _meet(rank, count, job, version, timeout_s, offer, lost)
    return sockets, _known_pids(rank, answer)


def _meet(
    rank: int,
    world_size: int,
    job: str,
    version: str,
    timeout_s: float,
    offer: Answer,
    lost: Callable[[], str],
) -> tuple[dict[int, socket.socket], Answer]:
    hello = Hello(
        version,
        rank,
        world_size,
        socket.gethostname(),
        host_identity(),
        os.getpid(),
        pid_namespace(),
    )
    raise_descriptor_limit()
    meeting = Rendezvous(hello, job, time.monotonic() + timeout_s, timeout_s, lost)
    try:
        return meeting.host(offer) if rank == 0 else meeting.visit()
    except OSError as why:
        if are_used_up(why):
            raise ConnectFailed(too_few_descriptors(rank, world_size)) from why
        raise
