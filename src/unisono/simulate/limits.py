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

from unisono.errors import NotOffered, UsageError
from unisono.schedule.collective import Ints
from unisono.schedule.step import Step
from unisono.simulate.candidates import schedule_for
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

_LOOKED_AT = 1 << 12  # steps and worlds below this are never the trouble


def fits(collective: str, algorithm: str, topology: Topology, segments: int) -> None:
    """Refuse a schedule whose steps are too large, before the first one is made."""
    grown, scale = topology.grown, topology.scale
    if grown is None or scale <= 64 or topology.n < _LOOKED_AT:
        return
    try:
        small, larger = (
            len(next(iter(schedule_for(collective, algorithm, grown(k), segments))))
            for k in (16, 32)
        )
    except (UsageError, StopIteration):  # there is none so small: seen as steps come
        return
    transfers = larger * (scale / 32) ** max(0.0, log2(larger / small))
    enough(f"{algorithm} on {topology.name}", transfers * BYTES_A_TRANSFER, "closed")


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
            self.messages += pair.size
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
