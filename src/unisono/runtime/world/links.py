"""The links between hosts, probed when the ranks of several hosts meet.

Without a tuned table the choice between algorithms depends on latency and rates, in
which networks differ a thousandfold. So the first rank of each host asks that of every
other for a burst of bytes, all at the same time, as in a collective. First the bursts
are short; then as long as the rate that was found allows. The time from the question to
the last byte is at most too long, by whatever else runs there, so the least of some is
taken. Where they differ much from each other, the hosts are busy, and rates that differ
no more than that are taken for equal. Small calls of all ranks tell what a step costs,
and a message: on busy hosts much more than usual, so a rate without them would choose
many steps for small calls. Only where short bursts alone take all the time there are no
small calls: then links are taken for equal, with the fastest rate that was seen. Every
rank gets all numbers, and computes the same model from them.

    UNISONO_PROBE=0     no probe: the constants of an ordinary network
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from statistics import median

import numpy as np
from numpy.typing import NDArray

from unisono.runtime.communicator import Communicator
from unisono.runtime.plan.predict import (
    ALIKE,
    CostModel,
    all_alike,
    fitted,
    small_calls,
)

VARIABLE = "UNISONO_PROBE"
BUDGET_S = 40e-3
"""About how long all takes; where even short bursts take longer, there are no more."""
SHORT = 16 << 10
LONGEST = 1 << 20
REPEATS = 3
EVERY_PAIR_UP_TO = 8
"""Up to so many hosts each asks each; of more, those 1, 2, 4, ... further."""
CALLS = 2
ROUNDS = 12
SMALL_S = 10e-3
"""About how long small calls take in all; with slow ones there are fewer rounds."""
_TAG = -78  # of the messages of this module

Floats = NDArray[np.float64]
Pairs = dict[tuple[int, int], float]


def wanted() -> bool:
    """Whether this rank would probe; if one would not, none does."""
    return os.environ.get(VARIABLE, "1") != "0"


def probed(comm: Communicator, timeout_s: float) -> CostModel:
    """The model of the links between the hosts of all ranks; all ranks call it."""
    begun = time.perf_counter()

    def left() -> float:
        took = np.array([time.perf_counter() - begun])
        return BUDGET_S - float(comm.all_reduce(took, op="max", timeout_s=timeout_s)[0])

    leaders = [comm.hosts.index(host) for host in range(max(comm.hosts) + 1)]
    found, spread = _exchanged(comm, leaders, None, timeout_s)
    if left() < SMALL_S:
        return all_alike(len(leaders), min(found.values()))
    seconds = _small_calls(comm, timeout_s)
    each = left() / (REPEATS * len(_shifts(len(leaders))))
    long = {pair: min(LONGEST, int(each / byte)) for pair, byte in found.items()}
    long = {pair: nbytes for pair, nbytes in long.items() if nbytes > 2 * SHORT}
    if long:
        better, spread = _exchanged(comm, leaders, long, timeout_s)
        found |= better
    return fitted(comm.hosts, found, seconds, alike=max(ALIKE, spread))


def _shifts(num_hosts: int) -> list[int]:
    if num_hosts <= EVERY_PAIR_UP_TO:
        return list(range(1, num_hosts))
    return [1 << k for k in range(num_hosts.bit_length()) if 1 << k < num_hosts]


def _exchanged(
    comm: Communicator,
    leaders: list[int],
    sizes: Mapping[tuple[int, int], int] | None,
    timeout_s: float,
) -> tuple[Pairs, float]:
    """Seconds per byte from host to host, for bursts of these sizes, or short ones.

    And how many times as long as the least one the middle one of a pair takes, of the
    middle pair.
    """
    num = len(leaders)
    mine = np.zeros((2, num))
    if comm.rank in leaders:
        here = leaders.index(comm.rank)
        for shift in _shifts(num):
            to, src = (here + shift) % num, (here - shift) % num
            ends = (here, to), (src, here)
            sent, taken = (SHORT if sizes is None else sizes.get(p, 0) for p in ends)
            buffers = np.zeros(sent, np.uint8), np.empty(taken, np.uint8)
            times = [
                _burst(comm, leaders[to], leaders[src], *buffers, timeout_s)
                for _ in range(REPEATS)
            ]
            mine[:, src] = min(times) / max(1, taken), median(times) / max(1, taken)
    rows: Floats = comm.all_gather(mine[None], timeout_s=timeout_s)
    found = rows[leaders].tolist()
    pairs = {
        (src, dst): row[src]
        for dst, (row, _) in enumerate(found)
        for src in range(num)
        if row[src] > 0
    }
    spread = median(found[dst][1][src] / least for (src, dst), least in pairs.items())
    return pairs, spread


def _burst(
    comm: Communicator,
    dst: int,
    src: int,
    sent: NDArray[np.uint8],
    taken: NDArray[np.uint8],
    timeout_s: float,
) -> float:
    """Ask `src` for bytes, and send some to `dst` when it asks; the seconds taken."""
    begun, works = time.perf_counter(), []
    if taken.size:
        arriving = comm.recv(taken, src, tag=_TAG, async_op=True, timeout_s=timeout_s)
        question = np.zeros(1, np.uint8)
        works = [
            comm.send(question, src, tag=_TAG - 1, async_op=True, timeout_s=timeout_s),
            arriving,
        ]
    if sent.size:
        comm.recv(np.empty(1, np.uint8), dst, tag=_TAG - 1, timeout_s=timeout_s)
        works.insert(
            0, comm.send(sent, dst, tag=_TAG, async_op=True, timeout_s=timeout_s)
        )
    took = 0.0
    if taken.size:
        arriving.wait()
        took = time.perf_counter() - begun
    for work in works:
        work.wait()
    return took


def _small_calls(comm: Communicator, timeout_s: float) -> list[float]:
    """The seconds of all_gathers of 8 bytes, each rank's least, the most of all."""
    x, out = np.zeros(1), np.zeros(comm.world_size)
    names = small_calls(comm.world_size)
    best = np.full(len(names), np.inf)

    def race(rounds: int) -> None:
        for _ in range(rounds):
            for k, name in enumerate(names):
                begun = time.perf_counter()
                for _ in range(CALLS):
                    comm.all_gather(x, out=out, algorithm=name, timeout_s=timeout_s)
                best[k] = min(best[k], (time.perf_counter() - begun) / CALLS)

    race(1)  # opens connections, too
    best[:] = np.inf
    race(1)
    first = float(comm.all_reduce(best.copy(), op="max", timeout_s=timeout_s).sum())
    race(max(1, min(ROUNDS, int(SMALL_S / (CALLS * first)))))
    return [float(t) for t in comm.all_reduce(best, op="max", timeout_s=timeout_s)]
