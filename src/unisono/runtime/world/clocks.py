"""Clock offsets between hosts, for traces of several hosts."""

from __future__ import annotations

import time

import numpy as np

from unisono.runtime.communicator import Communicator

_PINGS = 32
_TAG = -77  # of the messages of this module


def compare_clocks(comm: Communicator) -> None:
    """Measure the offset of this host's clock from rank 0's; all ranks call it.

    Rank 0 exchanges messages with the first rank of each other host; the fastest round
    trip counts. On one host all ranks read the same clock.
    """
    hosts = list(dict.fromkeys(comm.hosts))
    found = np.zeros((len(hosts), 2), np.int64)
    for number, host in enumerate(hosts[1:], 1):
        first = comm.hosts.index(host)
        if comm.rank == 0:
            found[number] = _measure_offset(comm, first)
        elif comm.rank == first:
            _answer_pings(comm)
    comm.broadcast(found)
    offset, uncertainty = found[hosts.index(comm.hosts[comm.rank])].tolist()
    comm.core.session.logbook.clock = offset, uncertainty


def _measure_offset(comm: Communicator, rank: int) -> tuple[int, int]:
    theirs, tries = np.zeros(1, np.int64), []
    for _ in range(_PINGS):
        sent = time.monotonic_ns()
        comm.send(theirs, rank, tag=_TAG)
        comm.recv(theirs, rank, tag=_TAG)
        received = time.monotonic_ns()
        tries.append((received - sent, (sent + received) // 2 - int(theirs[0])))
    quickest, offset = min(tries)
    return offset, (quickest + 1) // 2


def _answer_pings(comm: Communicator) -> None:
    now = np.zeros(1, np.int64)
    for _ in range(_PINGS):
        comm.recv(now, 0, tag=_TAG)
        now[0] = time.monotonic_ns()
        comm.send(now, 0, tag=_TAG)
