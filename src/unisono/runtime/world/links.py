"""The links between hosts, probed when the ranks of several hosts meet.

Without a tuned table the choice between algorithms depends on latency and rates, in
which networks differ a thousandfold. So the first rank of each host asks that of the
next one for bursts of bytes, all at the same time, as in a collective: first hardly a
byte, which takes as long as a question and its answer, then some, and then as many as
the rate that was found allows. What a burst takes more than the short one is the time
of its bytes. Where rates differ, each asks the others as well; where they do not,
nothing more would be learned. A time is at most too long, by whatever else runs there,
so the least of some is taken. The first of each size opens connections and windows, and
says nothing about the others. Where those differ much from each other, the hosts are
busy, and rates that differ no more than that are taken for equal.

Small calls of all ranks tell what a step costs, and a message. How fast a rank copies
and adds, each tells of itself, and the middle one counts: where networks are as fast as
memory, that decides. Every rank gets all numbers, and computes the same model from
them.

Nothing is begun that is not expected to end within the budget. Whether it is, all ranks
decide alike, for they ask each other: one small call, which has the most of all ranks'
values. It is the first of the small calls, so latencies are known in any case. What is
always made is that, a burst of hardly a byte and one of 16 KiB.

    UNISONO_PROBE=0     no probe: the constants of an ordinary network
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from unisono.runtime.communicator import Communicator
from unisono.runtime.plan.predict import (
    ALIKE,
    MODEL,
    SHARED_BY_BBR,
    CostModel,
    fitted,
    small_calls,
)

VARIABLE = "UNISONO_PROBE"
BUDGET_S = 40e-3
"""What is not expected to end within so long is not begun."""
SHORT = 64
FIRST = 16 << 10
LONGEST = 4 << 20
LONGER = 4
"""How often bursts are made longer: to `FIRST`, then by what was found before."""
MUCH_LONGER = 8
"""So many times the time of an answer without bytes is worth more than one burst."""
LEAST_BYTES = 0.2
"""Of the time of a burst, its bytes take at least so much, unless it is a long time."""
FIRST_PART = 0.5
"""Of the time for bursts, what the first ones get; the rest is for other pairs."""
REPEATS = 3
EVERY_PAIR_UP_TO = 8
"""Up to so many hosts each asks each; of more, those 1, 2, 4, ... further."""
COPIED = 1 << 20
"""Bytes that each rank copies and adds, to tell how fast it is."""
CALLS = 2
ROUNDS = 12
EACH_S = 2e-3
"""About how long the rounds of one small call take; of a slow one there are fewer."""
PLAN_S = 4e-3
"""How long a small call is expected to take at first: it is mostly its plan."""
SMALL_S = 12e-3
"""What bursts leave for small calls."""
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_TAG = -78  # of the messages of this module

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Pair = tuple[int, int]
Pairs = dict[Pair, float]


def wanted() -> bool:
    """Whether this rank would probe; if one would not, none does."""
    return os.environ.get(VARIABLE, "1") != "0"


def agreeing(world_size: int) -> str:
    """The algorithm by which ranks agree: none is compared with others for that."""
    return small_calls(world_size)[0][1]


def probed(comm: Communicator, timeout_s: float) -> CostModel:
    """The model of the links between the hosts of all ranks; all ranks call it."""
    ranks = Ranks(comm, timeout_s)
    model = _with_memory(ranks)
    rates, spread = _bursts(ranks)
    seconds = _small_calls(ranks)
    return fitted(comm.hosts, rates, seconds, model, max(ALIKE, spread))


class Ranks:
    """All ranks of a probe, and the time that it has taken.

    They agree by one small call: whatever one of them alone has seen, all decide by the
    same numbers. `slow` is how many times as long this rank's work takes because others
    have its core.
    """

    def __init__(self, comm: Communicator, timeout_s: float) -> None:
        """The time begins when all are here."""
        self.comm, self.timeout_s = comm, timeout_s
        self._algorithm = agreeing(comm.world_size)
        self.most(np.zeros(1))
        self.begun = time.perf_counter()
        self.slow = 1.0

    def most(self, values: Floats) -> Floats:
        """Of each value the largest that a rank has."""
        found: Floats = self.comm.all_reduce(
            values, op="max", algorithm=self._algorithm, timeout_s=self.timeout_s
        )
        return found

    def left(self, seconds: float = 0.0) -> float:
        """What is left of the budget after what takes so long, for who has least.

        And no rank is late now.
        """
        over = time.perf_counter() - self.begun + seconds - BUDGET_S
        return -float(self.most(np.array([over]))[0])

    def can(self, seconds: float) -> bool:
        """Whether there is time for what takes so long as the slowest rank expects."""
        return self.left(seconds) >= 0


def _with_memory(ranks: Ranks) -> CostModel:
    """The usual model, with the times in which the middle rank copies and adds.

    And with what streams lose that share a link, if the TCP of a host uses BBR.
    """
    comm = ranks.comm
    x, y = np.ones((2, COPIED // 4), np.float32)
    best = np.full(2, np.inf)
    since = time.perf_counter(), time.thread_time()
    for _ in range(REPEATS):
        begun = time.perf_counter()
        np.copyto(y, x)
        copied = time.perf_counter()
        np.add(y, x, out=y)
        times = copied - begun, time.perf_counter() - copied
        best = np.minimum(best, np.array(times) / COPIED)
    took, worked = time.perf_counter() - since[0], time.thread_time() - since[1]
    ranks.slow = max(1.0, took / max(worked, 1e-6))
    mine = np.zeros((comm.world_size, 3))
    mine[comm.rank] = *best, congestion_control().startswith("bbr")
    inside, added, bbr = ranks.most(mine.ravel()).reshape(mine.shape).T.tolist()
    return replace(
        MODEL,
        byte_inside=median(inside),
        added_byte=median(added),
        shared=SHARED_BY_BBR if any(bbr) else 0.0,
    )


def congestion_control() -> str:
    """What TCP uses on this host, as far as the system says."""
    try:
        return _CONGESTION.read_text().strip()
    except OSError:
        return ""


class Bursts:
    """Bursts from host to host: seconds per byte, and how long the next may be.

    Short ones have hardly a byte, so what longer ones take more is for their bytes. The
    next are as long as their time allows if bytes take as much, or a part of the last
    one's time at least: that is the pace.
    """

    def __init__(self, short: Pairs) -> None:
        """Begin with the seconds of short bursts."""
        self.short: Pairs = {}
        self.sizes: dict[Pair, int] = {}
        self.paces: Pairs = {}
        self.rates: Pairs = {}
        self.begin(short)

    def begin(self, short: Pairs) -> None:
        """Take in short bursts of further pairs."""
        self.short |= short
        self.sizes |= dict.fromkeys(short, SHORT)

    def longer(self, each: float, pairs: Iterable[Pair]) -> tuple[dict[Pair, int], int]:
        """Bytes of these pairs that take `each` seconds, and how often they are sent.

        That is once, if it would be little more than latency otherwise. There are none
        of pairs where they are not twice as many as before.
        """
        idle = max(self.short.values())
        repeats = REPEATS if each >= REPEATS * MUCH_LONGER * idle else 1
        left = each / repeats - idle
        found = {
            pair: min(LONGEST, int(left / self.paces[pair]))
            if pair in self.paces
            else FIRST
            for pair in pairs
        }
        sizes = {p: size for p, size in found.items() if size > 2 * self.sizes[p]}
        return sizes, repeats

    def add(self, sizes: Mapping[Pair, int], took: Pairs) -> None:
        """Take in longer bursts.

        What they take more than short ones may be mostly chance. So their bytes take at
        least a part of their time. On busy hosts that may be far too much: then it is
        what is half way (in powers) to the rate of an ordinary network.
        """
        for pair, seconds in took.items():
            size, more = sizes[pair], seconds - self.short[pair]
            least = LEAST_BYTES * seconds
            usual = size * math.sqrt(seconds / size * MODEL.byte)
            self.rates[pair] = max(more, min(least, usual)) / (size - SHORT)
            self.sizes[pair], self.paces[pair] = size, max(more, least) / size

    def differ(self) -> bool:
        """Whether some links seem to be faster than others."""
        rates = self.rates.values()
        return max(rates, default=0.0) > ALIKE * min(rates, default=0.0)


def _shifts(num_hosts: int) -> list[int]:
    """How many hosts further a host asks, the next one first."""
    if num_hosts <= EVERY_PAIR_UP_TO:
        return list(range(1, num_hosts))
    return [1 << k for k in range(num_hosts.bit_length()) if 1 << k < num_hosts]


def _bursts(ranks: Ranks) -> tuple[Pairs, float]:
    """Seconds per byte of pairs, and how much bursts of one differ from each other."""
    hosts = ranks.comm.hosts
    leaders = [hosts.index(host) for host in range(max(hosts) + 1)]
    first, *others = _shifts(len(leaders))
    bursts, kept = Bursts({}), SMALL_S
    if others:
        kept += (1 - FIRST_PART) * (ranks.left() - SMALL_S)
    spread = _grown(ranks, bursts, leaders, [first], kept)
    if others and bursts.differ() and ranks.can(SMALL_S):
        spread = max(spread, _grown(ranks, bursts, leaders, others, SMALL_S))
    return bursts.rates, spread


def _grown(
    ranks: Ranks,
    bursts: Bursts,
    leaders: Sequence[int],
    shifts: Sequence[int],
    kept: float,
) -> float:
    """Take in ever longer bursts, and keep some time; how much the last ones differ."""
    took, spread = _exchanged(ranks, leaders, shifts, None)
    bursts.begin(took)
    for more in range(LONGER, 0, -1):
        left = ranks.left() - kept
        if left <= 0 and more < LONGER:
            break  # on a slow network each such question takes long itself
        sizes, repeats = bursts.longer(left / (more * len(shifts)), took)
        if sizes:
            found, seen = _exchanged(ranks, leaders, shifts, sizes, repeats)
            bursts.add(sizes, found)
            spread = seen or spread
    return spread


def _exchanged(
    ranks: Ranks,
    leaders: Sequence[int],
    shifts: Sequence[int],
    sizes: Mapping[Pair, int] | None,
    repeats: int = REPEATS,
) -> tuple[Pairs, float]:
    """Seconds from host to host, for bursts of these sizes, or short ones.

    And how many times as long as the quickest one of a pair the last ones took, of the
    middle pair; 0 if there was one alone. The first one is made even without time.
    """
    comm, num = ranks.comm, len(leaders)
    mine = np.zeros((2, num, len(shifts)))
    made = 0
    for column, shift in enumerate(shifts):
        times: list[float] = []
        burst = _burst_of(ranks, leaders, shift, sizes)
        for _ in range(repeats):
            if not ranks.can(max(times, default=0.0)) and made:
                break
            made += 1
            times.append(burst())
        if max(times, default=0.0) > 0:
            here = leaders.index(comm.rank)
            mine[:, here, column] = min(times), median(times[1:] or [0.0])
    best, usual = ranks.most(mine.ravel()).reshape(mine.shape).tolist()
    rows = [
        ((dst - shift) % num, dst, best[dst][column], usual[dst][column])
        for dst in range(num)
        for column, shift in enumerate(shifts)
        if best[dst][column] > 0
    ]
    spread = median([late / took for *_, took, late in rows] or [0.0])
    return {(src, dst): took for src, dst, took, _ in rows}, spread


def _burst_of(
    ranks: Ranks,
    leaders: Sequence[int],
    shift: int,
    sizes: Mapping[Pair, int] | None,
) -> Callable[[], float]:
    """What bursts once; the seconds taken, 0 for who asks nobody."""
    comm, num = ranks.comm, len(leaders)
    if comm.rank not in leaders:
        return float
    here = leaders.index(comm.rank)
    dst, src = (here + shift) % num, (here - shift) % num
    sent, taken = (
        np.zeros(SHORT if sizes is None else sizes.get(pair, 0), np.uint8)
        for pair in ((here, dst), (src, here))
    )
    sent += 1  # or its pages would be made when it is sent
    given = comm, leaders[dst], leaders[src], sent, taken, ranks.timeout_s
    return lambda: _burst(*given)


def _burst(
    comm: Communicator,
    dst: int,
    src: int,
    sent: Bytes,
    taken: Bytes,
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


def _small_calls(ranks: Ranks) -> list[float]:
    """The seconds of the first of `small_calls`, and of others if there is time."""
    found: list[float] = []
    expected = PLAN_S * ranks.slow
    for collective, algorithm in small_calls(ranks.comm.world_size):
        if found and not ranks.can(expected):
            break
        begun = time.perf_counter()
        found.append(_seconds(ranks, collective, algorithm))
        expected = max(expected, time.perf_counter() - begun)
    return found


def _seconds(ranks: Ranks, collective: str, algorithm: str) -> float:
    """The seconds of a call of 8 bytes: each rank's least, the most of all."""
    turn = _turn(ranks, collective, algorithm)
    turn()  # makes its plan, and opens connections
    first = float(ranks.most(np.array([turn()]))[0])
    rounds = max(1, min(ROUNDS, int(EACH_S / (CALLS * first))))
    return float(ranks.most(np.array([min(turn() for _ in range(rounds))]))[0])


def _turn(ranks: Ranks, collective: str, algorithm: str) -> Callable[[], float]:
    """What makes a few calls, and returns the seconds of one."""
    comm, x = ranks.comm, np.zeros(1)
    out = np.zeros(comm.world_size)

    def call() -> None:
        if collective == "all_reduce":
            ranks.most(x)
        else:
            limit = ranks.timeout_s
            comm.all_gather(x, out=out, algorithm=algorithm, timeout_s=limit)

    def turn() -> float:
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - begun) / CALLS

    return turn
