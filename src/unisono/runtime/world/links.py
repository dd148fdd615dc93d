"""The links between hosts, probed when the ranks of several hosts meet.

Without a tuned table the choice between algorithms depends on latency and rates, in
which networks differ a thousandfold. So the first rank of each host asks that of every
other for a burst of bytes, all at the same time, as in a collective. First the bursts
are short; then, twice, as long as the rate that was found allows, without the latency
that small calls tell. Where that is little more than the latency each is sent once and
not thrice, but longer. The time from the question to the last byte has the latency in
it, so the rate is what the longer burst took more than the short one. A time is at most
too long, by whatever else runs there, so the least of some is taken. Where they differ
much from each other, the hosts are busy, and rates that differ no more than that are
taken for equal. Small calls of all ranks tell what a step costs, and a message: on busy
hosts much more than usual, so a rate without them would choose many steps for small
calls. Only where short bursts alone take all the time there are no small calls. If
bursts agree, links are slow and have the rates that were found; if not, hosts are busy,
and links are taken for equal, with the fastest rate that was seen. How fast a rank
copies and adds, each tells of itself, and the middle one counts: where networks are as
fast as memory, that decides. Every rank gets all numbers, and computes the same model
from them.

    UNISONO_PROBE=0     no probe: the constants of an ordinary network
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from unisono.runtime.communicator import Communicator
from unisono.runtime.plan.predict import (
    ALIKE,
    MODEL,
    CostModel,
    all_alike,
    fitted,
    per_step,
    small_calls,
)

VARIABLE = "UNISONO_PROBE"
BUDGET_S = 40e-3
"""About how long all takes; where even short bursts take longer, there are no more."""
SHORT = 16 << 10
LONGEST = 4 << 20
LONGER = 2
"""How often bursts are made longer, by what was found before."""
MUCH_LONGER = 8
"""Bursts so many times as long as short ones tell the rate apart from the latency."""
LEAST_BYTES = 0.2
"""Of the time of such a burst, its bytes take at least so much."""
REPEATS = 3
EVERY_PAIR_UP_TO = 8
"""Up to so many hosts each asks each; of more, those 1, 2, 4, ... further."""
COPIED = 1 << 20
"""Bytes that each rank copies and adds, to tell how fast it is."""
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
    num = len(leaders)
    model = _with_memory(comm, timeout_s)
    short, spread = _exchanged(comm, leaders, None, timeout_s)
    bursts = Bursts(short)
    if left() < SMALL_S:
        if spread > ALIKE:
            return all_alike(num, min(bursts.rates.values()), model)
        return fitted(comm.hosts, bursts.rates, (), model)
    seconds = _small_calls(comm, timeout_s)
    bursts.idle = 2 * math.fsum(per_step(comm.hosts, seconds, model))
    for more in range(LONGER, 0, -1):
        sizes, repeats = bursts.longer(left() / (more * len(_shifts(num))))
        if sizes:
            took, found = _exchanged(comm, leaders, sizes, timeout_s, repeats)
            bursts.add(sizes, took)
            spread = found if repeats > 1 else spread
    alike = max(ALIKE, spread)
    return fitted(comm.hosts, bursts.rates, seconds, model, alike)


def _with_memory(comm: Communicator, timeout_s: float) -> CostModel:
    """The usual model, with the times in which the middle rank copies and adds."""
    x, y = np.ones((2, COPIED // 4), np.float32)
    best = np.full(2, np.inf)
    for _ in range(REPEATS):
        begun = time.perf_counter()
        np.copyto(y, x)
        copied = time.perf_counter()
        np.add(y, x, out=y)
        took = copied - begun, time.perf_counter() - copied
        best = np.minimum(best, np.array(took) / COPIED)
    every = _gathered(comm, best, timeout_s)
    inside, added = (median(column) for column in every.T.tolist())
    return replace(MODEL, byte_inside=inside, added_byte=added)


def _gathered(comm: Communicator, mine: Floats, timeout_s: float) -> Floats:
    """What all ranks have, by rank; as the first of the small calls, by name.

    To choose an algorithm takes longer than such a call, and its connections are opened
    for the small calls anyway.
    """
    first = small_calls(comm.world_size)[0]
    rows: Floats = comm.all_gather(mine[None], algorithm=first, timeout_s=timeout_s)
    return rows


class Bursts:
    """Bursts from host to host: seconds per byte, and how long the next may be.

    `idle` are the seconds of a question and its answer, as small calls have them.
    """

    def __init__(self, short: Pairs) -> None:
        """Begin with the seconds of short bursts."""
        self.short = short
        self.sizes = dict.fromkeys(short, SHORT)
        self.took = dict(short)
        self.rates = {pair: took / SHORT for pair, took in short.items()}
        self.idle = 0.0

    def longer(self, each: float) -> tuple[dict[tuple[int, int], int], int]:
        """Bytes that take `each` seconds in all, and how often they are sent in them.

        That is once, if it would be little more than latency otherwise. There are none
        of pairs where they are not twice as many as before.
        """
        repeats = REPEATS if each >= REPEATS * MUCH_LONGER * self.idle else 1
        left = each / repeats - self.idle
        found = {
            pair: min(LONGEST, int(left / self._byte(pair))) for pair in self.rates
        }
        sizes = {p: size for p, size in found.items() if size > 2 * self.sizes[p]}
        return sizes, repeats

    def _byte(self, pair: tuple[int, int]) -> float:
        """The seconds of a byte, without latency, as the last burst had them."""
        took = self.took[pair]
        return max(took - self.idle, LEAST_BYTES * took) / self.sizes[pair]

    def add(self, sizes: Mapping[tuple[int, int], int], took: Pairs) -> None:
        """Take in longer bursts; what they took more than short ones are their bytes.

        Of bursts that are not much longer that is mostly chance: then bytes took it
        all. They took at least a part of it.
        """
        self.sizes |= sizes
        self.took |= took
        for pair, seconds in took.items():
            size, more = sizes[pair], seconds - self.short[pair]
            if size < MUCH_LONGER * SHORT:
                self.rates[pair] = seconds / size
            else:
                least = LEAST_BYTES * seconds / size
                self.rates[pair] = max(more / (size - SHORT), least)


def _shifts(num_hosts: int) -> list[int]:
    if num_hosts <= EVERY_PAIR_UP_TO:
        return list(range(1, num_hosts))
    return [1 << k for k in range(num_hosts.bit_length()) if 1 << k < num_hosts]


def _exchanged(
    comm: Communicator,
    leaders: list[int],
    sizes: Mapping[tuple[int, int], int] | None,
    timeout_s: float,
    repeats: int = REPEATS,
) -> tuple[Pairs, float]:
    """Seconds from host to host, for bursts of these sizes, or short ones.

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
                for _ in range(repeats)
            ]
            mine[:, src] = (min(times), median(times)) if taken else (0.0, 0.0)
    found = _gathered(comm, mine, timeout_s)[leaders].tolist()
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
