"""The first communicator of a world, on a session whose ranks are connected."""

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
from unisono.runtime.plan.plans import SINGLE_COPY
from unisono.runtime.world import clocks, links, tuned_agreement
from unisono.transports.session import Session

RENDEZVOUS_TIMEOUT_S = 60.0
_UNTRIED, _REACHES = 0, 1  # as the native core counts
_EPOCHS: defaultdict[str, Iterator[int]] = defaultdict(count)
# Kept even without a communicator: a process that never closed its last one leaves the
# world at exit, and must say so, or the others would take it for dead.
_OPEN: set[Session] = set()


def next_epoch(job: str) -> int:
    """The epoch of the next world of this job that this process joins."""
    return next(_EPOCHS[job])


def count_epochs_from(job: str, epoch: int) -> None:
    """Set the epoch in which this process would join this job again."""
    _EPOCHS[job] = count(epoch)


def first_communicator(
    session: Session,
    *,
    timeout_s: float,
    rendezvous_timeout_s: float = RENDEZVOUS_TIMEOUT_S,
) -> Communicator:
    """The communicator of all ranks; on each host one rank makes its shared memory."""
    ranks = range(len(session.peers))
    segment = 1
    if session.rank == session.owner(ranks):
        segment = session.memory_for(ranks)
    native = session.communicator(
        ranks, segment, agreed=0, timeout_s=rendezvous_timeout_s
    )
    _OPEN.add(session)
    session.after_close.append(lambda: _OPEN.discard(session))
    comm = Communicator(Core(session, native, ranks, agreed=0, timeout_s=timeout_s))
    try:
        _agree(comm, native, rendezvous_timeout_s)
        monitor.begin(session)
        tracing.attend(session)
    except BaseException:
        comm.close()  # or its port stays open, and the rank seems to be alive
        raise
    return comm


def _agree(
    comm: Communicator, native: _native.Comm, rendezvous_timeout_s: float
) -> None:
    """Agree on what must be equal on all ranks: memory access, table, and links."""
    session = comm.core.session
    probes = False
    ends = time.monotonic() + rendezvous_timeout_s
    if len(set(session.hosts)) > 1 and session.leave is not None:
        agreed = _agree_on_options(comm, native, ends)
        session.reaches, session.note, traced, probes = agreed
        if traced:
            clocks.compare_clocks(comm)
    elif session.leave is not None:  # rendezvous was over TCP, but on one host
        there = np.array([session.note], np.int32)
        session.note = int(comm.broadcast(there, timeout_s=rendezvous_timeout_s)[0])
    if session.note:
        session.tuned = tuned_agreement.agree(comm, rendezvous_timeout_s)
    if probes:
        session.links = links.probed(comm, max(1.0, ends - time.monotonic()))


def _agree_on_options(
    comm: Communicator, native: _native.Comm, deadline: float
) -> tuple[bool, int, bool, bool]:
    """Whether on every host the ranks can read each other's memory, by all_reduce.

    By the same call, whether rank 0 has a tuned table, whether all ranks record a
    trace, for which they compare their clocks, and whether they probe the links.
    """
    found = _UNTRIED
    while found == _UNTRIED and time.monotonic() < deadline:
        found = native.test_cross_memory_access()
        time.sleep(0.0 if found != _UNTRIED else 0.001)
    reaches = found == _REACHES and os.environ.get(SINGLE_COPY, "1") != "0"
    none = not comm.core.session.note
    left = max(1.0, deadline - time.monotonic())
    traces = bool(os.environ.get(tracing.TRACE))
    votes = np.array([reaches, none, traces, links.wanted()], np.int32)
    how = links.agreeing(comm.world_size)
    agreed = comm.all_reduce(votes, op="min", algorithm=how, timeout_s=left)
    return bool(agreed[0]), int(not agreed[1]), bool(agreed[2]), bool(agreed[3])


def open_sessions() -> list[Session]:
    """The sessions of the worlds that this process is in."""
    return [session for session in list(_OPEN) if not session.closed]


@atexit.register
def _leave() -> None:
    """At exit, tell the others that this rank leaves."""
    mine = [session for session in list(_OPEN) if not session.engine.forked()]
    for session in mine:  # before their threads may be held until the end
        session.await_closing()
        session.end_dropped()
    _native.process_exiting()
    for session in mine:
        for comm in list(session.users):
            comm.close()
        session.close()
