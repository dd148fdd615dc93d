"""What the tests of closed forms share: how a law is written, and how it is checked.

A law gives, for p ranks, the three terms of a schedule's cost: messages one after the
other, fractions of the buffer through the busiest rank, and fractions added by it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from unisono import Schedule, schedule

Number = int | Fraction
Terms = tuple[Number, Number, Number]
Formula = Callable[[int], Terms]
Count = Callable[[int], int]

EVERY = [*range(2, 41), 64]
POWERS = [2, 4, 8, 16, 32, 64]
OTHERS = [p for p in EVERY if p not in POWERS]


@dataclass(frozen=True)
class Law:
    """In all these worlds, this algorithm costs what `terms` says."""

    what: str
    name: str
    worlds: list[int]
    terms: Formula

    def __str__(self) -> str:
        return f"{self.what} by {self.name}"


def check(law: Law) -> None:
    for p in law.worlds:
        assert counted(schedule(law.what, law.name, p)) == (p, *exact(law.terms(p)))


def counted(made: Schedule) -> tuple[int, int, float, float]:
    """The number of ranks, and the terms counted from the steps."""
    cost = made.cost()
    return made.n, cost.rounds, cost.span, cost.work


def exact(terms: Iterable[Number]) -> tuple[float, ...]:
    """The nearest floating-point numbers: a fraction counted right gives these bits."""
    return tuple(float(term) for term in terms)


def floor_log2(p: int) -> int:
    return p.bit_length() - 1


def ceil_log2(p: int) -> int:
    return (p - 1).bit_length()


def power_below(p: int) -> int:
    """The largest power of two not above p."""
    return 1 << floor_log2(p)


def ones(p: int) -> int:
    """How many ones p has in binary."""
    return f"{p:b}".count("1")


def share(p: int) -> Fraction:
    """All but one rank's part of the buffer."""
    return Fraction(p - 1, p)


def through_levels(sizes: list[int]) -> Fraction:
    """One way through levels of these sizes, from the inside out."""
    return sum(
        (Fraction(size - 1, prod(sizes[: i + 1])) for i, size in enumerate(sizes)),
        Fraction(0),
    )
