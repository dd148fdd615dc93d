"""Ranks as processes of one host: how they connect, and what they then share.

They find each other by the name of their job (`rendezvous_local`). Afterwards every two
ranks have a pair of connected Unix sockets, over which they pass each other the
descriptors of shared memory; all data moves through that memory.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from unisono import _native
from unisono.errors import ConnectFailed
from unisono.transports.interface import Capabilities, ConnectOptions, Transport
from unisono.transports.limits import (
    are_used_up,
    raise_descriptor_limit,
    too_few_descriptors,
)
from unisono.transports.rendezvous_local import Answer, Hello, LocalRendezvous
from unisono.transports.session import (
    WINDOW,
    Peer,
    Session,
    cores_here,
    refuse_too_many,
)
from unisono.transports.unix import pid_namespace


class SharedMemory(Transport):
    """Processes of one host."""

    name = "shm"
    capabilities = Capabilities(zero_copy=True)

    def connect(self, options: ConnectOptions) -> Session:
        """Find the other ranks of the job on this host, or say who is missing."""
        refuse_too_many(options.world_size)
        options.announce(options.address)
        job = f"{options.job}/{options.epoch}"
        if options.address:  # a word by which the ranks of a later world are found
            job = f"{job}/{options.address}"
        sockets, answer = _rendezvous(
            options.rank,
            options.world_size,
            job,
            options.version,
            options.timeout_s,
            Answer(window=WINDOW, note=int(options.rank == 0 and options.tuned)),
            options.lost,
        )
        return _session(options.rank, sockets, answer)


def _session(rank: int, sockets: dict[int, socket.socket], answer: Answer) -> Session:
    peers = [Peer(r, pid, host) for r, (pid, host) in enumerate(answer.peers)]
    ends = [sockets[r].detach() if r in sockets else -1 for r in range(len(peers))]
    engine = _native.Engine.between_processes(rank, ends, _known_pids(rank, answer))
    return Session(
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


def connect_local(
    rank: int,
    count: int,
    job: str,
    *,
    version: str,
    timeout_s: float,
    lost: Callable[[], str] = str,
) -> tuple[dict[int, socket.socket], list[int]]:
    """For ranks that are connected across hosts: sockets and process ids of those here.

    They are numbered 0 to count - 1.
    """
    offer = Answer(window=WINDOW)
    sockets, answer = _rendezvous(rank, count, job, version, timeout_s, offer, lost)
    return sockets, _known_pids(rank, answer)


def host_identity() -> str:
    """What two processes have in common if, and only if, they share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return boot


def _rendezvous(
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
    until = time.monotonic() + timeout_s
    rendezvous = LocalRendezvous(hello, job, until, timeout_s, lost)
    try:
        return rendezvous.serve(offer) if rank == 0 else rendezvous.join()
    except OSError as why:
        if are_used_up(why):
            raise ConnectFailed(too_few_descriptors(rank, world_size)) from why
        raise
