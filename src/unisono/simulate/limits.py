"""Simulations that would exceed memory or take too long are refused before they run.

A step in which all ranks send to all has n² transfers; at 16,384 ranks that is more
memory than most machines have, and the kernel kills a process that allocates it. And
where all those share links, each message that starts or ends changes the rates of all
others, which the event simulation follows one by one. Both can be predicted, from small
worlds with the same algorithm and from the steps as they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np

from unisono.algorithms import schedule as make
from unisono.errors import NotOffered, UsageError
from unisono.schedule.collective import Ints
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step
from unisono.simulate.candidates import schedule_for, unfitted
from unisono.simulate.conditions import SimulatedWorld
from unisono.topology.topology import Topology
from unisono.transports.session import memory_free
from unisono.units import format_bytes

BYTES_A_TRANSFER = 200
"""What one costs while its step is simulated: its arrays, sorted and by link."""
BYTES_A_MESSAGE = 320
"""What one costs the event simulation to the end: itself, its flow, its edges."""
MOST_CHANGES = 1_000_000_000
"""Of rates, in one simulation by events: about a minute on one core."""
MOST_TRANSFERS = 50_000_000
"""In one simulation by events: minutes, where messages have many of them."""
MOST_STEPPED = 5_000_000_000
"""Transfers of one simulation by steps: some ten minutes on one core."""

_LOOKED_AT = 1 << 12  # steps and worlds below this are never the trouble


@dataclass(frozen=True)
class Extent:
    """How large a schedule is: transfers of its largest step, and of all steps.

    `messages` are all data from one rank to another in one step, of all steps; with
    streams there are more, at most one for each transfer.
    """

    largest: float
    transfers: float
    messages: float

    @classmethod
    def of(cls, schedule: Schedule) -> Extent:
        """Count a small one, step by step."""
        largest = transfers = messages = 0
        for step in schedule:
            largest = max(largest, len(step))
            transfers += len(step)
            messages += np.unique(step.src * schedule.n + step.dst).size
        return cls(largest, transfers, messages)

    def grown(self, larger: Extent, times: float) -> Extent:
        """As large as a law says that meets this one, and `larger` at twice its size.

        `times` is how much larger than `larger` it is.
        """
        return Extent(
            _law(self.largest, larger.largest, times),
            _law(self.transfers, larger.transfers, times),
            _law(self.messages, larger.messages, times),
        )


def _law(small: float, larger: float, times: float) -> float:
    return larger * times ** max(0.0, log2(larger / small)) if small else larger


def fits(
    collective: str,
    algorithm: str,
    topology: Topology,
    segments: int,
    *,
    events: bool = False,
) -> None:
    """Refuse a schedule that is too large, before the first step is made.

    That is one whose largest step, or with `events` all of whose messages, would need
    more memory than there is.
    """
    extent = _extent(collective, algorithm, topology, segments)
    if extent is None:
        return
    what = f"{algorithm} on {topology.name}"
    enough(what, extent.largest * BYTES_A_TRANSFER, "closed")
    if not events:
        _refuse_long(what, extent)
        return
    messages = extent.transfers if topology.streams else extent.messages
    enough(f"{what}, events", messages * BYTES_A_MESSAGE, "steps")
    if extent.transfers > MOST_TRANSFERS:
        raise NotOffered(
            f"{what}: about {extent.transfers / 1e6:,.0f} million transfers; that "
            "takes minutes by events: use fidelity='steps', or fewer ranks"
        )


def _refuse_long(what: str, extent: Extent) -> None:
    """Refuse a simulation by steps that takes longer than anybody waits."""
    if extent.transfers > MOST_STEPPED:
        raise NotOffered(
            f"{what}: about {extent.transfers / 1e9:,.0f} billion transfers; that "
            "takes more than ten minutes by steps: use fidelity='closed', or fewer "
            "ranks"
        )


def _extent(
    collective: str, algorithm: str, topology: Topology, segments: int
) -> Extent | None:
    """What small worlds of the same shape say; None if there are none, or no need."""
    scale = topology.scale if topology.grown else topology.n
    if topology.n < _LOOKED_AT or scale <= 64:
        return None
    try:
        small, larger = (
            Extent.of(_smaller(collective, algorithm, topology, segments, k))
            for k in (16, 32)
        )
    except UsageError:  # there is none so small: seen as steps come
        return None
    return small.grown(larger, scale / 32)


def _smaller(
    collective: str, algorithm: str, topology: Topology, segments: int, k: int
) -> Schedule:
    """The same on a smaller member of the family, or on fewer ranks if it has none."""
    if topology.grown is not None:
        name = unfitted(algorithm, topology)
        return schedule_for(collective, name, topology.grown(k), segments)
    schedule = make(collective, algorithm, k)
    return schedule.split(segments) if segments > 1 else schedule


def enough(what: str, nbytes: float, instead: str) -> None:
    """Refuse what needs more bytes than this machine has to give."""
    free = memory_free()
    if nbytes > free:
        raise NotOffered(
            f"{what}: needs about {format_bytes(nbytes)} of memory, and "
            f"{format_bytes(free)} are free; use fidelity={instead!r}, or fewer ranks"
        )


@dataclass
class Load:
    """What the event simulation has been given so far, and what that will cost."""

    what: str
    world: SimulatedWorld
    messages: int = 0
    changes: int = 0

    def begins(self, slots: int) -> None:
        """Every slot of every rank remembers who wrote and who read it."""
        enough(self.what, 16.0 * slots * self.world.n, "steps")

    def add(self, step: Step) -> None:
        """Count a step's messages; refuse if all together are too many."""
        n = self.world.n
        if len(step) < _LOOKED_AT:
            self.messages += len(step)
        else:
            src, dst = step.src, step.dst
            pair = np.unique((src * n + dst).ravel())
            self.messages += len(step) if self.world.topology.streams else pair.size
            self.changes += self._changes(pair[pair // n != pair % n])
        enough(self.what, float(self.messages) * BYTES_A_MESSAGE, "steps")
        if self.changes > MOST_CHANGES:
            raise NotOffered(
                f"{self.what}: {self.changes / 1e6:,.0f} million changes of rates, "
                "since every message shares links with all others; that takes minutes "
                "by events: use fidelity='steps'"
            )

    def _changes(self, pair: Ints) -> int:
        """How often rates change: each start, and each end, of a rank's messages."""
        if pair.size < _LOOKED_AT:
            return 0
        n = self.world.n
        links = self.world.route(pair // n, pair % n)
        used = np.bincount(links[links >= 0])
        shared = int(np.count_nonzero((used[links] > 1).any(axis=1)))
        return 2 * shared * int(np.bincount(pair // n).max())
