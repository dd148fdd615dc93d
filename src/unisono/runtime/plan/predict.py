"""The predicted time of a schedule between hosts, by a simple cost model.

A step takes as long as the slower of two concurrent parts. The network: a start-up
time, a time for every message that the busiest rank has in flight, and the bytes of the
busiest host. The ranks: a start-up time, and the bytes that the busiest rank reads. To
both are added the bytes that the busiest rank reduces. Steps follow each other.
Encoding and decoding is work of the ranks, concurrent with the network.

The parameters are those of ordinary machines on a good network, not measured: they only
have to rank algorithms. All ranks must get the same result, so whole chunks are
counted, and the order of floating-point operations is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unisono.algorithms import Spec, schedule
from unisono.schedule.traffic import Traffic, traffic


@dataclass(frozen=True)
class CostModel:
    """Times in seconds, and seconds per byte.

    A rank can receive from `ports` others at once without loss. Each further sender
    makes every byte slower by `crowding`. `encoded` and `decoded` are seconds per
    element.
    """

    start: float = 25e-6
    message: float = 15e-6
    byte: float = 1e-9
    ports: int = 8
    crowding: float = 0.02
    start_inside: float = 2e-6
    byte_inside: float = 1e-10
    added_byte: float = 1e-10
    encoded: float = 6e-10
    decoded: float = 3e-10


MODEL = CostModel()


@dataclass(frozen=True)
class StepCost:
    """The time of one step: the larger of two linear functions of the bytes."""

    across: float
    across_byte: float
    inside: float
    inside_byte: float

    def at(self, nbytes: int) -> float:
        """Seconds for buffers of `nbytes`."""
        return max(
            self.across + self.across_byte * nbytes,
            self.inside + self.inside_byte * nbytes,
        )


def predicted(
    collective: str, algorithm: str, segments: int, hosts: tuple[int, ...], nbytes: int
) -> float:
    """The predicted seconds of a call whose schedule is split into segments."""
    costs = step_costs(collective, algorithm, segments, hosts)
    # Not sum, whose rounding differs between versions of Python.
    return math.fsum(cost.at(nbytes) for cost in costs)


def predicted_coded(
    costs: Sequence[StepCost], nbytes: int, small: int, coding: float, *, inside: bool
) -> float:
    """The predicted seconds of a call whose codes have `small` bytes, not `nbytes`.

    `coding` are the seconds that the busiest rank encodes and decodes. `inside`: ranks
    of one host exchange codes, too.
    """
    taken = math.fsum(cost.inside_byte for cost in costs) or 1.0
    within = small if inside else nbytes
    steps = (
        max(
            cost.across + cost.across_byte * small,
            cost.inside
            + cost.inside_byte * within
            + coding * (cost.inside_byte / taken),
        )
        for cost in costs
    )
    return math.fsum(steps)


@lru_cache(maxsize=1024)
def step_costs(
    collective: str,
    algorithm: str | Spec,
    segments: int,
    hosts: tuple[int, ...],
    model: CostModel = MODEL,
) -> tuple[StepCost, ...]:
    """The cost of every step, for any size."""
    whole = _traffic(collective, algorithm, hosts)
    return _costs(whole.split(segments), model)


@lru_cache(maxsize=256)
def _traffic(collective: str, algorithm: str | Spec, hosts: tuple[int, ...]) -> Traffic:
    return traffic(schedule(collective, algorithm, len(hosts)), hosts)


def _costs(counted: Traffic, model: CostModel) -> tuple[StepCost, ...]:
    busiest = (
        rows.max(axis=1).tolist()
        for rows in (
            np.maximum(counted.leaves, counted.enters),
            counted.taken,
            counted.added,
            counted.peers,
        )
    )
    found = []
    for crossing, taken, added, peers in zip(*busiest, strict=True):
        slowdown = 1 + model.crowding * max(0, peers - model.ports)
        adding = model.added_byte * (added / counted.unit)
        found.append(
            StepCost(
                (model.start + model.message * peers) if peers else 0.0,
                model.byte * slowdown * (crossing / counted.unit) + adding,
                model.start_inside,
                model.byte_inside * (taken / counted.unit) + adding,
            )
        )
    return tuple(found)
