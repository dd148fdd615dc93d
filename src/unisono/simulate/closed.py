"""Closed form: costs for any number of ranks, derived and not typed.

With nothing shared but what the schedule itself makes shared, the time of a schedule is
the longest of many paths, each of which costs some latencies and some time per byte:

    time(b) = max over paths p of  (latency_p + b * slope_p)

Let A be the largest latency_p and B the largest slope_p. Then time(b) lies between
max(A, B b) and A + B b; wherever one path is the worst in both, as on symmetric
topologies, it *is* A + B b. Both are what the step simulation gives: A for no bytes, B
for bytes on links without latency.

A and B as functions of the topology's size k are found as follows. The step simulation
runs on small members of the same family (dgx-h100:3, :5, :6, ...), and the values are
written as a sum of a few functions of k: 1, k, 1/k, the logarithm's steps. The law is
accepted only if it also holds for members that it was not fitted to, to nine digits.
Where another path is the longest in the smallest members, as in pipelines, the law is
that of the larger ones. Powers of two have a law of their own, as many algorithms treat
them apart; one with a radix of four alternates between odd and even powers. Where no
law is found, none is used: an error says why.

A law is kept, so that all further questions, for any size up to millions of ranks,
cost microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unisono.errors import NotOffered, UsageError
from unisono.schedule.collective import collective as find_collective
from unisono.simulate.bound import least_time
from unisono.simulate.candidates import schedule_for, unfitted
from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.simulate.messages import chunk_bytes
from unisono.simulate.steps import by_steps
from unisono.topology.topology import Topology

POWERS = (2, 4, 8, 16, 32, 64)
OTHERS = (3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 24, 33)
MOST_RANKS = 600
"""Members of a family that are larger are not looked at,"""
ONE_MORE = 128
"""but for this one, where it decides whether there is a law for powers of two."""

HELD_OUT = {True: 2, False: 6}
"""So many of the largest members a law is not fitted to, for powers of two or not."""
CLOSE = 1e-9


_USUAL, _LINEAR, _IN_ROUNDS, _ALTERNATING = (
    (0, 1, 2, 3),
    (0, 1, 2),
    (0, 2, 3),
    (0, 2, 3, 4, 5),
)
_OF_POWERS = _USUAL, _LINEAR, _IN_ROUNDS, _ALTERNATING
_OF_OTHERS = (0, 1, 2, 3, 4, 5), _LINEAR
"""Which of the functions of `_terms` a law may be made of."""


@dataclass(frozen=True)
class Law:
    """A sum of weighted functions of the size."""

    weights: tuple[float, ...]
    power: bool

    def __call__(self, k: int) -> float:
        """The value for size k."""
        terms = _terms(k, power=self.power)
        return max(0.0, sum(w * t for w, t in zip(self.weights, terms, strict=False)))


@dataclass(frozen=True)
class LinearCost:
    """Latency, seconds per byte, and the least that any schedule needs per byte.

    `exact` is whether latency and slope belong to one and the same path.
    """

    latency: float
    slope: float
    least: float
    exact: bool = True

    def time(self, nbytes: int) -> float:
        """The time for so many bytes; at most, if it is not exact."""
        return self.latency + self.slope * nbytes


def _terms(k: int, *, power: bool) -> list[float]:
    if power:
        log = k.bit_length() - 1
        return [1.0, float(k), 1.0 / k, float(log), float(log % 2), log % 2 / k]
    below = 1 << (k.bit_length() - 1)
    rounds = float((k - 1).bit_length())
    return [1.0, float(k), 1.0 / k, rounds, 1.0 / below, below / k]


class ClosedForm:
    """The costs of one algorithm on one family of topologies, for any size."""

    def __init__(
        self,
        collective: str,
        algorithm: str,
        member: Callable[[int], Topology],
        segments: int,
        given: Conditions,
    ) -> None:
        """Nothing is computed before it is used."""
        self.what = collective, algorithm, segments
        self.member = member
        self.given = given
        self._lines: dict[int, LinearCost | None] = {}
        self._laws: dict[bool, tuple[Law, Law, bool]] = {}
        self._least: Law | None = None

    def __call__(self, k: int) -> LinearCost:
        """The costs at size k: simulated if that is small, by law if not."""
        power = k & (k - 1) == 0
        if k <= (POWERS if power else OTHERS)[-1]:
            line = self._line(k)
            if line is not None:
                return line
        if power not in self._laws:
            self._laws[power] = self._find(power=power)
        if self._least is None:
            self._least = self._least_law()
        latency, slope, exact = self._laws[power]
        return LinearCost(latency(k), slope(k), self._least(k), exact)

    def _line(self, k: int) -> LinearCost | None:
        """The costs at a small size, by simulation; None if there is no such member."""
        if k not in self._lines:
            self._lines[k] = self._simulated(k)
        return self._lines[k]

    def _simulated(self, k: int) -> LinearCost | None:
        topology = self.member(k)
        if topology.n > MOST_RANKS and k != ONE_MORE:
            return None
        collective, algorithm, segments = self.what
        schedule = schedule_for(collective, algorithm, topology, segments)
        steps = list(schedule)  # made once, simulated three times
        schedule = schedule.but(make=lambda: iter(steps))
        world = SimulatedWorld.of(topology, self.given)
        sizes = chunk_bytes(schedule, None)
        latency = by_steps(schedule, world, sizes, np.zeros(1)).clock.max()
        bare = replace(
            world,
            latency=np.zeros_like(world.latency),
            topology=topology.but(overhead=0.0),
        )
        slope = by_steps(schedule, bare, sizes).clock.max()
        both = latency / slope if slope else 0.0  # where the two weigh the same
        whole = by_steps(schedule, world, sizes, np.array([both])).clock.max()
        least = least_time(schedule.collective, topology, 1e18) / 1e18
        exact = whole >= (latency + slope * both) * (1 - 1e-6)
        return LinearCost(float(latency), float(slope), least, bool(exact))

    def _find(self, *, power: bool) -> tuple[Law, Law, bool]:
        points = self._points(POWERS if power else OTHERS)
        found = _laws(points, power=power)
        last = points[-1][0] if points else 0
        likely = power and last == ONE_MORE // 2 and found is None
        if likely and _laws(points, power=True, held_out=1) is not None:
            points += self._points((ONE_MORE,))
            found = _laws(points, power=True)
        if found is None:
            raise NotOffered(self._why_not(points))
        return *found, all(at.exact for _, at in points)

    def _points(self, sizes: Sequence[int]) -> list[tuple[int, LinearCost]]:
        """The costs of those members that are small and have such a schedule."""
        points = []
        for k in sizes:
            try:
                at = self._line(k)
            except UsageError:  # not for this number of ranks
                continue
            if at is not None:
                points.append((k, at))
        return points

    def _why_not(self, points: list[tuple[int, LinearCost]]) -> str:
        collective, algorithm, _ = self.what
        small, what = self.member(2), f"{collective} by {algorithm}: "
        if points or small.n <= MOST_RANKS:
            return (
                f"{what}no closed form was found for its costs on {small.name} and "
                "larger ones; use fidelity='steps'"
            )
        return (
            f"{what}no closed form on this family: a law is found from members of at "
            f"most {MOST_RANKS} ranks, and the smallest, {small.name}, has {small.n}; "
            "use fidelity='steps' on fewer ranks"
        )

    def _least_law(self) -> Law:
        """The least time per byte; for small sizes another cut may be what counts."""
        what = find_collective(self.what[0])
        points = [(k, least_time(what, self.member(k), 1e18) / 1e18) for k in OTHERS]
        law = _law(points, (_LINEAR,), HELD_OUT[False], power=False)
        return law or Law((0.0,), power=False)  # nothing is known: true, if useless


def _laws(
    points: list[tuple[int, LinearCost]], *, power: bool, held_out: int = 0
) -> tuple[Law, Law] | None:
    """Those of latency and of slope, if both are found."""
    bases = _OF_POWERS if power else _OF_OTHERS
    held_out = held_out or HELD_OUT[power]
    sides = (
        [(k, at.latency) for k, at in points],
        [(k, at.slope) for k, at in points],
    )
    latency, slope = (_law(side, bases, held_out, power=power) for side in sides)
    return None if latency is None or slope is None else (latency, slope)


def _law(
    points: list[tuple[int, float]],
    bases: Sequence[tuple[int, ...]],
    held_out: int,
    *,
    power: bool,
) -> Law | None:
    """The law that holds for most of the points; in small sizes others may count."""
    for at in range(len(points)):
        for basis in bases:
            law = _fitted(points[at:], basis, held_out, power=power)
            if law is not None:
                return law
    return None


def _fitted(
    points: list[tuple[int, float]],
    basis: tuple[int, ...],
    held_out: int,
    *,
    power: bool,
) -> Law | None:
    """The law that holds for all points, fitted to all but the last few."""
    used = len(points) - held_out
    if used < len(basis):
        return None
    terms = np.array([_terms(k, power=power) for k, _ in points])
    value = np.array([v for _, v in points])
    scale = max(float(np.abs(value).max()), 1e-300)
    weights, some = np.zeros(terms.shape[1]), list(basis)
    known, seen = terms[:used, some], value[:used] / scale
    weights[some] = np.linalg.lstsq(known, seen, rcond=None)[0]
    missed = np.abs(terms @ weights - value / scale).max()
    if missed > CLOSE:
        return None
    return Law(tuple((weights * scale).tolist()), power)


_KNOWN: dict[object, ClosedForm] = {}


def line(
    collective: str,
    algorithm: str,
    topology: Topology,
    segments: int,
    given: Conditions,
) -> LinearCost:
    """The costs of an algorithm on a topology, however large that is."""
    if not given.usual:
        raise NotOffered(
            "closed form: delays, slow and failed links break the symmetry it rests "
            "on; use fidelity='events'"
        )
    if topology.grown is None:
        raise NotOffered(
            f"{topology.name}: no closed form, since it is not one of a family; take "
            "fidelity='steps'"
        )
    algorithm = unfitted(algorithm, topology)
    key = collective, algorithm, topology.family, segments, given.reduce, given.codec
    if key not in _KNOWN:
        _KNOWN[key] = ClosedForm(collective, algorithm, topology.grown, segments, given)
    return _KNOWN[key](topology.scale)
