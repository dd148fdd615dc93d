"""`unisono.init`: find the world, meet the others, and make the first communicator."""

from __future__ import annotations

import atexit
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from itertools import count

import numpy as np

from unisono import _native
from unisono.errors import BadArgument
from unisono.runtime import tracing, tuned, watch
from unisono.runtime.base import default_timeout_s, nanoseconds
from unisono.runtime.communicator import Communicator
from unisono.runtime.environment import World, find_world
from unisono.runtime.membership import Membership
from unisono.runtime.place import ADDRESS, meeting_place, no_secret
from unisono.runtime.plans import SINGLE_COPY
from unisono.transports.addresses import Address, is_loopback
from unisono.transports.base import Transport
from unisono.transports.secret import find_secret
from unisono.transports.tls import TLS, wanted

MEETING_S = 60.0
_UNTRIED, _REACHES = 0, 1  # as the native core counts
_EPOCHS: defaultdict[str, Iterator[int]] = defaultdict(count)
JOIN = "UNISONO_JOIN"
# Kept even when nobody has a communicator any more: whoever lets go of one without a
# word leaves when the process ends, and must say goodbye, or would be taken for dead.
_OPEN: set[Transport] = set()


def init(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    job: str | None = None,
    timeout_s: float | None = None,
    meeting_s: float = MEETING_S,
    insecure: bool = False,
    tls: str | None = None,
    join: bool | None = None,
) -> Communicator:
    """The communicator of all ranks of this job.

    Rank and world size come from the arguments, or from whoever started this process:
    unisono run, torchrun, mpirun, srun; alone it is a world of one. `timeout_s` is the
    deadline of every call, `meeting_s` how long to wait for the others to appear.
    Across hosts a job has a secret, or does without by `insecure`; with tls="mutual",
    or UNISONO_TLS, the same for all ranks, everything between hosts is encrypted.

    With `join`, or UNISONO_JOIN=1, this process comes to a job that runs, whose ranks
    call `comm.grow`: rank and world size are then the job's to give.
    """
    encrypted = wanted(tls) or wanted(os.environ.get(TLS), TLS)
    if join or (join is None and os.environ.get(JOIN, "0") != "0"):
        return _joined(
            *(rank, world_size, job, timeout_s, meeting_s, insecure, encrypted)
        )
    world = find_world(os.environ, rank=rank, world_size=world_size, job=job)
    limit = default_timeout_s() if timeout_s is None else float(timeout_s)
    nanoseconds(limit)  # refused before anybody is met
    _arm_failpoints()
    member = membership(world, insecure, encrypted)
    place = member.address if member.across else ""
    transport = member.meet(world.rank, world.world_size, place, timeout_s=meeting_s)
    comm = first_communicator(transport, timeout_s=limit, meeting_s=meeting_s)
    comm._member = member
    return comm


def _joined(
    rank: int | None,
    world_size: int | None,
    job: str | None,
    timeout_s: float | None,
    meeting_s: float,
    insecure: bool,
    tls: bool,
) -> Communicator:
    if rank is not None or world_size is not None:
        raise BadArgument(
            f"rank = {rank}, world_size = {world_size}: who joins is given both by the "
            "job; leave them out"
        )
    limit = default_timeout_s() if timeout_s is None else float(timeout_s)
    nanoseconds(limit)
    found: Communicator = import_module("unisono.runtime.growing").join(
        job or os.environ.get("UNISONO_JOB", ""),
        os.environ.get(ADDRESS, ""),
        timeout_s=limit,
        meeting_s=meeting_s,
        insecure=insecure,
        tls=tls,
    )
    return found


def membership(world: World, insecure: bool = False, tls: bool = False) -> Membership:
    """How this process belongs to a job, as a process that begins with it."""
    # A process may leave and meet again: each time at a place of its own.
    epoch = next(_EPOCHS[world.job]) if world.world_size > 1 else 0
    if world.hosts_several or os.environ.get(ADDRESS):
        place = meeting_place(world).address
        secret = find_secret(os.environ)
        if secret is None and not insecure and not _only_here(place):
            raise no_secret(world)
        interface = os.environ.get("UNISONO_INTERFACE")
        return Membership(
            *(world.job, epoch, True, place, secret, interface, insecure, tls)
        )
    return Membership(world.job, epoch)


def count_epochs_from(job: str, epoch: int) -> None:
    """A process that leaves this job and meets again does so in a later epoch."""
    _EPOCHS[job] = count(epoch)


def _only_here(address: str) -> bool:
    """Whether nobody on another host can connect there."""
    found = Address.parse(address).resolve()
    return all(is_loopback(str(where[0])) for _, where in found)


def first_communicator(
    transport: Transport, *, timeout_s: float, meeting_s: float = MEETING_S
) -> Communicator:
    """The communicator of all ranks; on each host the first makes its memory."""
    ranks = range(len(transport.peers))
    segment = 1
    if transport.rank == transport.owner(ranks):
        segment = transport.memory_for(ranks)
    native = transport.communicator(ranks, segment, agreed=0, timeout_s=meeting_s)
    _OPEN.add(transport)
    transport.farewells.append(lambda: _OPEN.discard(transport))
    comm = Communicator(transport, native, ranks, agreed=0, timeout_s=timeout_s)
    try:
        _agree(comm, native, meeting_s)
        watch.begin(transport)
        tracing.attend(transport)
    except BaseException:
        comm.close()  # or its port would stay open, and its rank seem to live
        raise
    return comm


def _agree(comm: Communicator, native: _native.Comm, meeting_s: float) -> None:
    """What all must know alike: how they reach each other, and what is quick here."""
    transport = comm._transport
    if len(set(transport.hosts)) > 1 and transport.leave is not None:
        ends = time.monotonic() + meeting_s
        transport.reaches, transport.note, traced = _told(comm, native, ends)
        if traced:
            tracing.compare_clocks(comm)
    elif transport.leave is not None:  # they met over TCP, and found themselves on one
        there = np.array([comm.rank == 0 and tuned.is_there()], np.int32)
        transport.note = int(comm.broadcast(there, timeout_s=meeting_s)[0])
    if transport.note:
        transport.tuned = tuned.agree(comm, meeting_s)


def _told(
    comm: Communicator, native: _native.Comm, deadline: float
) -> tuple[bool, int, bool]:
    """Whether on every host the ranks can read each other's memory, asked of all.

    And, by the same call, whether rank 0 has a table of what is quick here, and whether
    all ranks record a trace, for which they compare their clocks.
    """
    found = _UNTRIED
    while found == _UNTRIED and time.monotonic() < deadline:
        found = native.try_reach()
        time.sleep(0.0 if found != _UNTRIED else 0.001)
    mine = found == _REACHES and os.environ.get(SINGLE_COPY, "1") != "0"
    none = not (comm.rank == 0 and tuned.is_there())
    left = max(1.0, deadline - time.monotonic())
    traces = bool(os.environ.get(tracing.TRACE))
    asked = np.array([mine, none, traces], np.int32)
    told = comm.all_reduce(asked, op="min", timeout_s=left)
    return bool(told[0]), int(not told[1]), bool(told[2])


def _arm_failpoints() -> None:
    spec = os.environ.get("UNISONO_FAILPOINTS", "")
    if spec and not _native.TEST_HOOKS:
        raise BadArgument(
            "UNISONO_FAILPOINTS is set, but this build of unisono has no failpoints: "
            "they are in editable installs (pip install -e .)"
        )
    if spec:
        _native.arm_failpoints(spec)


def open_transports() -> list[Transport]:
    """The worlds that this process is in."""
    return [transport for transport in list(_OPEN) if not transport.closed]


@atexit.register
def _leave() -> None:
    """At the end of the process, tell the others that this rank is gone."""
    _native.process_ends()
    for transport in list(_OPEN):
        if not transport.engine.forked():
            for comm in list(transport.users):
                comm.close()
            transport.close()
