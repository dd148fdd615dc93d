"""The links between hosts, probed when the ranks of several hosts meet.

Without a tuned table the choice between algorithms depends on latency and rates, in
which networks differ a thousandfold. So the first rank of each host asks that of the
next one for bursts of bytes, all at the same time, as in a collective: first hardly a
byte, which takes as long as a question and its answer, then some, and then as many as
the rate that was found allows. What a burst takes more than the short one is the time
of its bytes. Where rates differ, each asks the others as well; where they do not,
nothing more would be learned. A time is at most too long, by whatever else runs there,
so the least of some is taken. The first one opens connections, and says nothing about
the others. Where those differ much from each other, the hosts are busy, and rates that
differ no more than that are taken for equal.

Before that, small calls of all ranks tell what a step costs, and a message. How fast a
rank copies and adds, each tells of itself, and the middle one counts: where networks
are as fast as memory, that decides. Every rank gets all numbers, and computes the same
model from them.

Nothing is begun that is not expected to end within the budget. Whether it is, all ranks
decide alike, for they ask each other: one small call, which has the most of all ranks'
values, and of their clocks. Once nothing is left, nobody asks again. Where that is so
from the start, the probe is six small calls, one after the other, two bursts of hardly
a byte and one of 16 KiB; the quickest of the calls tells the latency, and none are made
for that alone.

    UNISONO_PROBE=0     no probe: the constants of an ordinary network
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from unisono.errors import CollectiveTimeout, UnisonoError
from unisono.runtime.call.options import Options
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator
from unisono.runtime.plan.predict import (
    ALIKE,
    MODEL,
    SHARED_BY_BBR,
    CostModel,
    fitted,
    small_calls,
)
from unisono.runtime.world.bursts import REPEATS, SHORT, Bursts, Pair, Pairs, grown

VARIABLE = "UNISONO_PROBE"
BUDGET_S = 40e-3
"""What is not expected to end within so long is not begun."""
FIRST_PART = 0.5
"""Of the time for bursts, what the first ones get if the rest suffices for others.

To open connections may take more than that on hosts with more ranks than cores. Then
the first ones get all of it: bursts that are too short tell nothing.
"""
EVERY_PAIR_UP_TO = 8
"""Up to so many hosts each asks each; of more, those 1, 2, 4, ... further."""
COPIED = 1 << 20
"""Bytes that each rank copies and adds, to tell how fast it is."""
CALLS = 2
ROUNDS = 12
MADE = 8
"""How many calls one small call makes at least, with those that tell the others."""
EACH_S = 2e-3
"""About how long the rounds of one small call take; of a slow one there are fewer."""
PLAN_S = 4e-3
"""How long a small call is expected to take at first: it is mostly its plan."""
PLANNED = 56
"""Among more ranks the plan of an all_gather takes longer, as the square of them."""
BURSTS_S = 20e-3
"""What small calls leave for bursts."""
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_TAG = -78  # of the messages of this module
_LOOK_S, _LOOK_PART = 50e-6, 1 / 16
"""After so long, or such a part of the time so far, is looked whether bytes have come.

That is while a question is awaited; the time of the bytes is too long by so much.
"""
_LEAST_LIMIT_S = 1e-3

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]


def wanted() -> bool:
    """Whether this rank would probe; if one would not, none does."""
    return os.environ.get(VARIABLE, "1") != "0"


def agreeing(world_size: int) -> str:
    """The algorithm by which ranks agree: none is compared with others for that."""
    return small_calls(world_size)[0][1]


def probed(comm: Communicator, timeout_s: float) -> CostModel:
    """The model of the links between the hosts of all ranks; all ranks call it.

    All of it has so much time, within which ranks that are lost must be noticed.
    """
    try:
        ranks = Ranks(comm, timeout_s)
        model = _with_memory(ranks)
        seconds = _small_calls(ranks)
        rates, spread = _bursts(ranks)
        seconds = seconds or [ranks.quickest()]
    except UnisonoError as error:
        error.add_note(
            "the links between hosts were being probed, as at every start of a world "
            f"on several hosts; {VARIABLE}=0 skips that"
        )
        raise
    return fitted(comm.hosts, rates, seconds, model, max(ALIKE, spread))


class Ranks:
    """All ranks of a probe, and the time that it has taken.

    They agree by one small call: whatever one of them alone has seen, all decide by the
    same numbers. `slow` is how many times as long this rank's work takes because others
    have its core. `left` is what the rank has left that has least; all have the same
    number, of their last call.
    """

    def __init__(self, comm: Communicator, timeout_s: float) -> None:
        """The time of the budget begins when all are here."""
        self.comm = comm
        self.slow = 1.0
        self._ends = time.monotonic() + timeout_s
        self._algorithm = agreeing(comm.world_size)
        self._took: list[float] = []
        self.opened = 0.0  # the seconds in which connections of a shift were opened
        self._begun = time.perf_counter()
        self.meet()
        self._took.clear()  # it has opened connections
        self._begun, self.left = time.perf_counter(), BUDGET_S

    @property
    def limit_s(self) -> float:
        """How long the next call may take, of the time of all of them."""
        return max(_LEAST_LIMIT_S, self._ends - time.monotonic())

    def most(self, values: Floats) -> Floats:
        """Of each value the largest that a rank has; and all learn what is left.

        It is a barrier as well: no rank returns before all have called it.
        """
        begun = time.perf_counter()
        found: Floats = self.comm.all_reduce(
            np.append(values, self._over()),
            op="max",
            algorithm=self._algorithm,
            timeout_s=self.limit_s,
        )
        self._took.append(time.perf_counter() - begun)
        self.left = -float(found[-1])
        return found[:-1]

    def meet(self) -> None:
        """Wait for all ranks; they learn what is left."""
        self.most(np.zeros(0))

    @property
    def once_s(self) -> float:
        """How long the quickest call of `most` took here."""
        return min(self._took, default=0.0)

    def quickest(self) -> float:
        """The seconds of the quickest call of `most` so far.

        Of each call the time of its slowest rank counts; all ranks have made the same
        calls in the same order. Those with many values are not the quickest ones.
        """
        return float(self.most(np.array(self._took)).min())

    def can(self, seconds: float) -> bool:
        """Whether there is time for what takes so long as the slowest rank expects.

        Once nothing is left, ranks know it, and are not asked again.
        """
        if self.left < 0:
            return False
        over = self.most(np.array([self._over() + seconds]))
        return float(over[0]) <= 0

    def _over(self) -> float:
        """By how much the budget is exceeded here; less than 0 before that."""
        return time.perf_counter() - self._begun - BUDGET_S


def _with_memory(ranks: Ranks) -> CostModel:
    """The usual model, with the times in which the middle rank copies and adds.

    And with what streams lose that share a link, if a host uses BBR, and bytes go to
    other hosts by its TCP.
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
    bbr = comm.core.session.tcp and congestion_control().startswith("bbr")
    mine[comm.rank] = *best, bbr
    inside, added, paced = ranks.most(mine.ravel()).reshape(mine.shape).T.tolist()
    return replace(
        MODEL,
        byte_inside=median(inside),
        added_byte=median(added),
        shared=SHARED_BY_BBR if any(paced) else 0.0,
    )


def congestion_control() -> str:
    """What TCP uses on this host, as far as the system says."""
    try:
        return _CONGESTION.read_text().strip()
    except OSError:
        return ""


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
    bursts = Bursts({})
    spread = _grown(ranks, bursts, leaders, [first], others)
    some = _reachable(ranks, others, ranks.left)
    if some and bursts.differ():
        spread = max(spread, _grown(ranks, bursts, leaders, some, []))
    return bursts.told(), spread


def _reachable(ranks: Ranks, others: Sequence[int], seconds: float) -> Sequence[int]:
    """As many shifts as so much time suffices for.

    Each opens connections, and all their bursts take as long as to open two more.
    """
    return others[: max(0, int(seconds / max(ranks.opened, 1e-6)) - 2)]


def _grown(
    ranks: Ranks,
    bursts: Bursts,
    leaders: Sequence[int],
    shifts: Sequence[int],
    others: Sequence[int],
) -> float:
    """Take in ever longer bursts, while there is time; how much the last ones differ.

    Once connections are open, time is kept for other shifts, if it suffices.
    """
    spread = kept = 0.0

    def exchanged(
        sizes: dict[Pair, int] | None, repeats: int, expected: float
    ) -> Pairs:
        nonlocal spread, kept
        found, seen = _exchanged(
            ranks, leaders, shifts, sizes, repeats, expected=expected, kept=kept
        )
        spread = seen or spread
        rest = (1 - FIRST_PART) * ranks.left
        if sizes is None and _reachable(ranks, others, rest):
            kept = rest
        return found

    grown(bursts, len(shifts), lambda: ranks.left - kept, exchanged)
    return spread


def _exchanged(
    ranks: Ranks,
    leaders: Sequence[int],
    shifts: Sequence[int],
    sizes: Mapping[Pair, int] | None,
    repeats: int,
    *,
    expected: float,
    kept: float,
) -> tuple[Pairs, float]:
    """Seconds from host to host, for bursts of these sizes, or short ones.

    And how many times as long as the quickest one of a pair the last ones took, of the
    middle pair; 0 if there was one alone. All have just agreed on what is left. The
    first one is made even without time. Of the others one is made if it leaves what is
    kept: it is expected to take as long as those before it, and the first of a shift so
    many seconds. Before the first short one of a shift comes one that opens
    connections; they are made both, or none.
    """
    comm, num = ranks.comm, len(leaders)
    mine = np.zeros((2, num, len(shifts)))
    made, opened = 0, 0.0  # opened: what opening took, of the last shift
    for column, shift in enumerate(shifts):
        times: list[float] = []
        burst = _burst_of(ranks, leaders, shift, sizes)
        if sizes is None:
            if made and not ranks.can(opened + kept):
                break
            made, opened = made + 1, burst()
            ranks.meet()  # they opened connections in turns
            times.append(burst())
        while len(times) < repeats:
            if made and not ranks.can(max(times, default=expected) + kept):
                break
            made += 1
            times.append(burst())
        if max(times, default=0.0) > 0:
            here = leaders.index(comm.rank)
            mine[:, here, column] = min(times), median(times[1:] or [0.0])
    *told, slowest = ranks.most(np.append(mine, opened)).tolist()
    ranks.opened = slowest or ranks.opened
    best, usual = np.reshape(told, mine.shape).tolist()
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
        # Not zeros: their pages would be made when they are sent, or received.
        np.ones(SHORT if sizes is None else sizes.get(pair, 0), np.uint8)
        for pair in ((here, dst), (src, here))
    )
    given = comm, leaders[dst], leaders[src], sent, taken
    return lambda: _burst(*given, ranks.limit_s)


def _burst(
    comm: Communicator,
    dst: int,
    src: int,
    sent: Bytes,
    taken: Bytes,
    timeout_s: float,
) -> float:
    """Ask `src` for bytes, and send some to `dst` when it asks; the seconds taken.

    The bytes may come before `dst` has asked, if it is late or far.
    """
    question = np.zeros(1, np.uint8)
    works: list[Work] = []

    def begun(work: Work) -> Work:
        work.allow_drop()  # an error of one says enough
        works.append(work)
        return work

    limit: Options = {"async_op": True, "timeout_s": timeout_s}
    since, took = time.perf_counter(), 0.0
    arriving = asked = None
    if taken.size:
        arriving = begun(comm.recv(taken, src, tag=_TAG, **limit))
        begun(comm.send(question, src, tag=_TAG - 1, **limit))
    if sent.size:
        asked = begun(comm.recv(np.empty(1, np.uint8), dst, tag=_TAG - 1, **limit))
        while arriving is not None and not took and not asked.done():
            with suppress(CollectiveTimeout):
                asked.wait(max(_LOOK_S, _LOOK_PART * (time.perf_counter() - since)))
            if arriving.done():
                took = time.perf_counter() - since
        asked.wait()
        begun(comm.send(sent, dst, tag=_TAG, **limit))
    if arriving is not None:
        arriving.wait()
        took = took or time.perf_counter() - since
    for work in works:
        work.wait()
    return took


def planning(n: int) -> float:
    """The seconds in which a small call of n ranks gets its plan.

    Measured: 2 to 6 ms up to 64 ranks, 19 ms for 128, 85 ms for 256, 1.6 s for 1,000.
    """
    return PLAN_S * max(1.0, (n / PLANNED) ** 2)


def _small_calls(ranks: Ranks) -> list[float]:
    """The seconds of the first of `small_calls`, and of others if there is time.

    Without time there are none: the first one is that by which ranks agree, and has its
    plan.
    """
    found: list[float] = []
    n = ranks.comm.world_size
    expected = MADE * ranks.once_s
    for collective, algorithm in small_calls(n):
        if not ranks.can(expected + BURSTS_S):
            break
        begun = time.perf_counter()
        found.append(_seconds(ranks, collective, algorithm))
        took = time.perf_counter() - begun
        expected = max(expected, took, planning(n) * ranks.slow)
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
            limit = ranks.limit_s
            comm.all_gather(x, out=out, algorithm=algorithm, timeout_s=limit)

    def turn() -> float:
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - begun) / CALLS

    return turn
