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
    streams each transfer that copies is a message, and those that add are one.
    """

    largest: float
    transfers: float
    messages: float

    @classmethod
    def of(cls, schedule: Schedule, *, streams: bool = False) -> Extent:
        """Count a small one, step by step."""
        largest = transfers = messages = 0
        for step in schedule:
            largest = max(largest, len(step))
            transfers += len(step)
            _, times = messages_by_pair(step, schedule.n, streams=streams)
            messages += int(times.sum())
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


def messages_by_pair(step: Step, n: int, *, streams: bool) -> tuple[Ints, Ints]:
    """The pairs of a step as src * n + dst, and how many messages each of them has."""
    pair = (step.src * n + step.dst).ravel()
    found, times = np.unique(pair, return_counts=True)
    if not streams or step.reduces is True:
        return found, np.ones_like(found)
    if step.reduces is not False:
        joined, sums = np.unique(pair[step.mask.ravel()], return_counts=True)
        times[np.searchsorted(found, joined)] -= sums - 1
    return found, times


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
    enough(f"{what}, events", extent.messages * BYTES_A_MESSAGE, "steps")
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
            Extent.of(
                _smaller(collective, algorithm, topology, segments, k),
                streams=topology.streams,
            )
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
        """Every slot of every rank remembers who wrote and who read it.

        With streams it remembers in which step it was made, too.
        """
        each = 16.0 + 4.0 * self.world.topology.streams
        enough(self.what, each * slots * self.world.n, "steps")

    def add(self, step: Step) -> None:
        """Count a step's messages; refuse if all together are too many."""
        n = self.world.n
        if len(step) < _LOOKED_AT:
            self.messages += len(step)
        else:
            streams = self.world.topology.streams
            pair, times = messages_by_pair(step, n, streams=streams)
            self.messages += int(times.sum())
            apart = pair // n != pair % n
            self.changes += self._changes(pair[apart], times[apart])
        enough(self.what, float(self.messages) * BYTES_A_MESSAGE, "steps")
        if self.changes > MOST_CHANGES:
            raise NotOffered(
                f"{self.what}: {self.changes / 1e6:,.0f} million changes of rates, "
                "since every message shares links with all others; that takes minutes "
                "by events: use fidelity='steps'"
            )

    def _changes(self, pair: Ints, times: Ints) -> int:
        """How often rates change: each start, and each end, of a rank's messages.

        The messages of a pair follow each other, so each changes the rates of as many
        others as there are pairs.
        """
        if pair.size < _LOOKED_AT:
            return 0
        n = self.world.n
        links = self.world.route(pair // n, pair % n)
        used = np.bincount(links[links >= 0])
        shared = int(times[(used[links] > 1).any(axis=1)].sum())
        return 2 * shared * int(np.bincount(pair // n).max())
