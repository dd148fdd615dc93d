"""`unisono.init`: find the world, meet the others, and make the first communicator."""

from __future__ import annotations

import atexit
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator
from itertools import count

import unisono
from unisono import _native
from unisono.errors import UnsupportedWorld
from unisono.runtime.base import default_timeout_s, nanoseconds
from unisono.runtime.communicator import Communicator
from unisono.runtime.environment import World, find_world
from unisono.transports import memory, shm
from unisono.transports.base import Transport

MEETING_S = 60.0
_EPOCHS: defaultdict[str, Iterator[int]] = defaultdict(count)
_OPEN: weakref.WeakSet[Transport] = weakref.WeakSet()


def init(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    job: str | None = None,
    timeout_s: float | None = None,
    meeting_s: float = MEETING_S,
) -> Communicator:
    """The communicator of all ranks of this job.

    Rank and world size come from the arguments, or from whoever started this process:
    unisono run, torchrun, mpirun, srun; alone it is a world of one. `timeout_s` is the
    deadline of every call, `meeting_s` how long to wait for the others to appear.
    """
    world = find_world(os.environ, rank=rank, world_size=world_size, job=job)
    limit = default_timeout_s() if timeout_s is None else float(timeout_s)
    nanoseconds(limit)  # refused before anybody is met
    if world.hosts_several:
        raise UnsupportedWorld(
            f"{world.why}: the job runs on several hosts, which is not supported yet",
            n=world.world_size,
        )
    _arm_failpoints()
    transport = _transport(world, meeting_s)
    return first_communicator(transport, timeout_s=limit, meeting_s=meeting_s)


def _transport(world: World, meeting_s: float) -> Transport:
    if world.world_size == 1:
        return memory.alone()
    # A process may leave and meet again: each time at a place of its own.
    job = f"{world.job}/{next(_EPOCHS[world.job])}"
    return shm.meet(
        world.rank,
        world.world_size,
        job,
        version=unisono.__version__,
        timeout_s=meeting_s,
    )


def first_communicator(
    transport: Transport, *, timeout_s: float, meeting_s: float = MEETING_S
) -> Communicator:
    """The communicator of all ranks; on each host the first makes its memory."""
    ranks = range(len(transport.peers))
    segment = 1
    if transport.rank == transport.owner(ranks):
        segment = transport.memory_for(len(ranks))
    native = transport.communicator(ranks, segment, agreed=0, timeout_s=meeting_s)
    _OPEN.add(transport)
    return Communicator(transport, native, ranks, agreed=0, timeout_s=timeout_s)


def _arm_failpoints() -> None:
    spec = os.environ.get("UNISONO_FAILPOINTS", "")
    if spec:
        _native.arm_failpoints(spec)


@atexit.register
def _leave() -> None:
    """At the end of the process, tell the others that this rank is gone."""
    for transport in list(_OPEN):
        if not transport.engine.forked():
            for comm in list(transport.users):
                comm.close()
