"""How far the clocks of hosts are apart, for traces of several hosts."""

from __future__ import annotations

import time

import numpy as np

from unisono.runtime.communicator import Communicator

_PINGS = 32
_TAG = -77  # of the messages that compare clocks


def compare_clocks(comm: Communicator) -> None:
    """Find how far this host's clock is from rank 0's; all ranks of the world call it.

    A message goes to the first rank of each other host and back, some times; the
    quickest is believed. On one host all read the same clock.
    """
    hosts = list(dict.fromkeys(comm.hosts))
    found = np.zeros((len(hosts), 2), np.int64)
    for number, host in enumerate(hosts[1:], 1):
        first = comm.hosts.index(host)
        if comm.rank == 0:
            found[number] = _ask_time(comm, first)
        elif comm.rank == first:
            _tell_time(comm)
    comm.broadcast(found)
    offset, doubt = found[hosts.index(comm.hosts[comm.rank])].tolist()
    comm.core.transport.logbook.clock = offset, doubt


def _ask_time(comm: Communicator, rank: int) -> tuple[int, int]:
    theirs, tries = np.zeros(1, np.int64), []
    for _ in range(_PINGS):
        asked = time.monotonic_ns()
        comm.send(theirs, rank, tag=_TAG)
        comm.recv(theirs, rank, tag=_TAG)
        heard = time.monotonic_ns()
        tries.append((heard - asked, (asked + heard) // 2 - int(theirs[0])))
    quickest, offset = min(tries)
    return offset, (quickest + 1) // 2


def _tell_time(comm: Communicator) -> None:
    now = np.zeros(1, np.int64)
    for _ in range(_PINGS):
        comm.recv(now, 0, tag=_TAG)
        now[0] = time.monotonic_ns()
        comm.send(now, 0, tag=_TAG)
