"""The simulated time of a schedule between hosts, with the constants of the cost model.

The model of `predict.py` takes steps one after the other. So it counts what a rank adds
up as if nothing were sent meanwhile, and cannot tell in which order messages wait for
each other. Here the same constants are given to the event simulator of the native core:
a message waits for its data and for those before it to the same rank, and shares links
with others. The links are those of each host, in both directions, and the memory of
each rank. Where ranks send to each other in the same step, or to several, the model
makes bytes slower, as was measured between hosts; so links of such schedules are slower
here.

In the simulator a message costs its sender time; between hosts it costs its receiver as
much. So a schedule is simulated backwards as well, where receivers send, and the longer
time counts. What is added up takes time forwards only.

It takes about a hundred times as long as the model, so only a few candidates are
simulated, of worlds with few ranks. The native core is compiled without contraction of
floating-point operations, so all ranks get the same times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms import schedule
from unisono.algorithms.choices import spelled
from unisono.runtime.plan.predict import CostModel, step_costs
from unisono.schedule.collective import BARRIER, Ints
from unisono.schedule.counts import distinct
from unisono.schedule.message_order import MessageOrder
from unisono.schedule.schedule import Schedule
from unisono.schedule.traffic import Floats

try:
    from unisono import _native
except ImportError:  # a source tree without its native core
    _native = None  # type: ignore[assignment]

MOST_RANKS = 32
"""Of more ranks nothing is simulated: it would take longer than most calls."""
READERS = 4
"""So many ranks read the memory of another at once without slowing each other."""

Transfers = tuple[NDArray[Any], ...]


def can_simulate(n: int) -> bool:
    """Whether so many ranks choose by simulation; all of them get the same answer."""
    return _native is not None and n <= MOST_RANKS


def simulated(
    collective: str,
    algorithm: str,
    segments: int,
    hosts: tuple[int, ...],
    nbytes: int,
    model: CostModel,
) -> float:
    """The simulated seconds of a call whose schedule is split into segments."""
    name = spelled(algorithm, segments)
    there = _network(
        hosts,
        model,
        _slower(collective, algorithm, segments, hosts, model),
        _message(collective, name, hosts, model),
    )
    made, steps = _steps(collective, name, len(hosts))
    sizes = _slot_bytes(made, nbytes)
    return max(there.seconds(steps, sizes), there.seconds_backwards(steps, sizes))


@lru_cache(maxsize=1024)
def _slower(
    collective: str,
    algorithm: str,
    segments: int,
    hosts: tuple[int, ...],
    model: CostModel,
) -> float:
    """How much slower links are, since ranks send to each other, or to several."""
    alone, all_ = (
        step_costs(
            *(collective, algorithm, segments, hosts),
            replace(model, added_byte=0.0, mutual=mutual, shared=shared),
        )
        for mutual, shared in ((0.0, 0.0), (model.mutual, model.shared))
    )
    least = math.fsum(cost.across_byte for cost in alone)
    return math.fsum(cost.across_byte for cost in all_) / least if least else 1.0


@lru_cache(maxsize=1024)
def _message(
    collective: str, name: str, hosts: tuple[int, ...], model: CostModel
) -> float:
    """The seconds of a message, between hosts or inside one: their mean.

    The simulator has but one time for all messages.
    """
    n, host, across, inside = len(hosts), np.array(hosts), 0, 0
    for src, dst, *_ in _steps(collective, name, n)[1]:
        src, dst = np.divmod(distinct(src * n + dst), n)
        away = int(np.count_nonzero(host[src] != host[dst]))
        across += away
        inside += int(np.count_nonzero(src != dst)) - away
    least = min(model.message, model.start_inside)
    total = across * model.message + inside * least
    return total / max(1, across + inside)


@lru_cache(maxsize=256)
def _steps(
    collective: str, algorithm: str, n: int
) -> tuple[Schedule, tuple[Transfers, ...]]:
    """A schedule, and the arrays src, dst, chunk, into and reduces of its steps.

    What a rank sends to another is in the order in which it leaves.
    """
    made = schedule(collective, algorithm, n)
    order = MessageOrder(n, made.num_slots)
    found = []
    for step in made:
        src, dst, chunk, mask, into = order.sent(step)
        arrays = src, dst, chunk, into, mask
        found.append(tuple(np.ascontiguousarray(array) for array in arrays))
    return made, tuple(found)


def _slot_bytes(made: Schedule, nbytes: int) -> Floats:
    """The bytes of every slot; a temporary is as large as the chunk it replaces."""
    silent = made.collective is BARRIER
    sizes = made.contract.chunk_sizes(0 if silent else nbytes).astype(np.float64)
    return np.ascontiguousarray(np.resize(sizes, made.num_slots))


@lru_cache(maxsize=64)
def _network(
    hosts: tuple[int, ...], model: CostModel, slower: float, message: float
) -> _Network:
    """The links there are: out of each host, into each, into each rank, out of each."""
    num, n, host = max(hosts) + 1, len(hosts), np.array(hosts)
    leaving, entering = (
        np.array(rates) if rates else np.full(num, model.byte)
        for rates in (model.leaving, model.entering)
    )
    links = slower * leaving, slower * entering
    memory = np.full(n, model.byte_inside)
    rates = 1 / np.concatenate([*links, memory, memory / READERS])
    src, dst = np.divmod(np.arange(n * n), n)
    away, apart = host[src] != host[dst], src != dst
    ends = 2 * num + dst, 2 * num + n + src
    paths = np.stack([host[src], num + host[dst], *ends], axis=1)
    paths[~away, :2] = -1
    paths[~apart] = -1
    latency = np.where(away, model.start, np.where(apart, model.start_inside, 0.0))
    return _Network(
        n, message, model.added_byte, rates, paths.astype(np.int64), latency
    )


@dataclass(frozen=True, eq=False)
class _Network:
    """The rates of links, and of each pair of ranks its links and their latency.

    Rows of `paths` have -1 where a path has fewer links.
    """

    n: int
    message: float
    added_byte: float
    rates: Floats
    paths: Ints
    latency: Floats

    def seconds(self, steps: tuple[Transfers, ...], sizes: Floats) -> float:
        """From the first message to the last."""
        simulator = self._simulator(sizes, self.added_byte)
        for step in steps:
            simulator.add(*step)
        return self._run(simulator, simulator.unknown())

    def seconds_backwards(self, steps: tuple[Transfers, ...], sizes: Floats) -> float:
        """The same from the last message to the first, with nothing added up."""
        simulator = self._simulator(sizes, 0.0)
        for step in reversed(steps):
            src, dst, chunk, into, mask = (
                np.ascontiguousarray(array[::-1]) for array in step
            )
            simulator.add(dst, src, into, chunk, mask)
        src, dst = np.divmod(simulator.unknown(), self.n)
        return self._run(simulator, dst * self.n + src)

    def _simulator(self, sizes: Floats, adding: float) -> _native.Simulator:
        return _native.Simulator(
            *(self.n, sizes, self.rates),
            twins=np.empty(0, dtype=np.int64),
            overhead=self.message,
            encode=0.0,
            decode=0.0,
            reduce=adding,
            ratio=1.0,
            duplex=1.0,
            streams=True,
        )

    def _run(self, simulator: _native.Simulator, pairs: Ints) -> float:
        table = self.paths[pairs]
        there = table >= 0
        first = np.concatenate([[0], np.cumsum(there.sum(axis=1))])
        simulator.know(first, table[there], self.latency[pairs])
        simulator.run(np.zeros(self.n), self.n)
        return float(simulator.finished().max())
