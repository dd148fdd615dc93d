"""The first communicator of a world, on a transport whose ranks have met."""

from __future__ import annotations

import atexit
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import count

import numpy as np

from unisono import _native
from unisono.runtime.communicator import Communicator
from unisono.runtime.core import Core
from unisono.runtime.observe import monitor, tracing
from unisono.runtime.plan import tuned
from unisono.runtime.plan.plans import SINGLE_COPY
from unisono.runtime.world import clocks, tuned_agreement
from unisono.transports.session import Session

MEETING_S = 60.0
_UNTRIED, _REACHES = 0, 1  # as the native core counts
_EPOCHS: defaultdict[str, Iterator[int]] = defaultdict(count)
# Kept even when nobody has a communicator any more: whoever lets go of one without a
# word leaves when the process ends, and must say goodbye, or would be taken for dead.
_OPEN: set[Session] = set()


def next_epoch(job: str) -> int:
    """The number of a world of this job that this process is about to enter."""
    return next(_EPOCHS[job])


def count_epochs_from(job: str, epoch: int) -> None:
    """A process that leaves this job and meets again does so in a later epoch."""
    _EPOCHS[job] = count(epoch)


def first_communicator(
    transport: Session, *, timeout_s: float, meeting_s: float = MEETING_S
) -> Communicator:
    """The communicator of all ranks; on each host the first makes its memory."""
    ranks = range(len(transport.peers))
    segment = 1
    if transport.rank == transport.owner(ranks):
        segment = transport.memory_for(ranks)
    native = transport.communicator(ranks, segment, agreed=0, timeout_s=meeting_s)
    _OPEN.add(transport)
    transport.farewells.append(lambda: _OPEN.discard(transport))
    comm = Communicator(Core(transport, native, ranks, agreed=0, timeout_s=timeout_s))
    try:
        _agree(comm, native, meeting_s)
        monitor.begin(transport)
        tracing.attend(transport)
    except BaseException:
        comm.close()  # or its port would stay open, and its rank seem to live
        raise
    return comm


def _agree(comm: Communicator, native: _native.Comm, meeting_s: float) -> None:
    """What all must know alike: how they reach each other, and what is quick here."""
    transport = comm.core.transport
    if len(set(transport.hosts)) > 1 and transport.leave is not None:
        ends = time.monotonic() + meeting_s
        transport.reaches, transport.note, traced = _told(comm, native, ends)
        if traced:
            clocks.compare_clocks(comm)
    elif transport.leave is not None:  # they met over TCP, and found themselves on one
        there = np.array([comm.rank == 0 and tuned.is_there()], np.int32)
        transport.note = int(comm.broadcast(there, timeout_s=meeting_s)[0])
    if transport.note:
        transport.tuned = tuned_agreement.agree(comm, meeting_s)


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


def open_transports() -> list[Session]:
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
