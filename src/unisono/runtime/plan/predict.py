"""How long a schedule would take on hosts joined by a network, by a simple model.

A step lasts as long as the slower of two things that go on at once. The network: a
start, something for every message that the busiest rank has under way, and the bytes of
the busiest host. The ranks: a start, and the bytes that the busiest one takes in. Then
there are the bytes that the busiest rank adds up. Steps follow each other. Encoding and
decoding is work of the ranks, beside the network.

The numbers are those of ordinary machines on a good network, not of yours: they only
have to put algorithms in the right order. All ranks must come to the same, so whole
chunks are counted, and what is computed from them is computed one operation at a time.
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
class Model:
    """Seconds, and seconds for each byte.

    A rank can listen to so many `ports` at once at no loss. Beyond, senders crowd the
    link, and each further one makes every byte slower by `crowding`. `encoded` and
    `decoded` are seconds for each element.
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


MODEL = Model()


@dataclass(frozen=True)
class Line:
    """The time of one step: the greater of two straight lines over the bytes."""

    across: float
    across_byte: float
    inside: float
    inside_byte: float

    def at(self, nbytes: int) -> float:
        """Seconds, for buffers of so many bytes."""
        return max(
            self.across + self.across_byte * nbytes,
            self.inside + self.inside_byte * nbytes,
        )


def predicted(
    collective: str, algorithm: str, segments: int, hosts: tuple[int, ...], nbytes: int
) -> float:
    """Seconds that a call takes, the schedule split into so many segments."""
    told = lines(collective, algorithm, segments, hosts)
    # Not sum, whose rounding differs between versions of Python.
    return math.fsum(line.at(nbytes) for line in told)


def predicted_coded(
    told: Sequence[Line], nbytes: int, small: int, coding: float, *, inside: bool
) -> float:
    """Seconds of a call whose codes have `small` bytes instead of `nbytes`.

    `coding` are the seconds that the busiest rank encodes and decodes. `inside` tells
    whether ranks of one host read codes of each other as well.
    """
    taken = math.fsum(line.inside_byte for line in told) or 1.0
    within = small if inside else nbytes
    steps = (
        max(
            line.across + line.across_byte * small,
            line.inside
            + line.inside_byte * within
            + coding * (line.inside_byte / taken),
        )
        for line in told
    )
    return math.fsum(steps)


@lru_cache(maxsize=1024)
def lines(
    collective: str,
    algorithm: str | Spec,
    segments: int,
    hosts: tuple[int, ...],
    model: Model = MODEL,
) -> tuple[Line, ...]:
    """The time of every step, for any size."""
    whole = _traffic(collective, algorithm, hosts)
    return _priced(whole.split(segments), model)


@lru_cache(maxsize=256)
def _traffic(collective: str, algorithm: str | Spec, hosts: tuple[int, ...]) -> Traffic:
    return traffic(schedule(collective, algorithm, len(hosts)), hosts)


def _priced(counted: Traffic, model: Model) -> tuple[Line, ...]:
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
        crowd = 1 + model.crowding * max(0, peers - model.ports)
        adding = model.added_byte * (added / counted.unit)
        found.append(
            Line(
                (model.start + model.message * peers) if peers else 0.0,
                model.byte * crowd * (crossing / counted.unit) + adding,
                model.start_inside,
                model.byte_inside * (taken / counted.unit) + adding,
            )
        )
    return tuple(found)
