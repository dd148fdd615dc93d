"""Which algorithm is fastest at each size, and where that changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.errors import BadArgument, NotOffered, UnsupportedWorld
from unisono.simulate.api import simulate, sweep
from unisono.simulate.result import Result
from unisono.topology.topology import Topology


@dataclass(frozen=True)
class Crossover:
    """From about `nbytes` on `winner` is faster than `loser`, which was before."""

    nbytes: float
    loser: str
    winner: str


@dataclass(frozen=True, eq=False)
class Comparison:
    """Results by algorithm, in the order of the sizes; and those without any."""

    topology: Topology
    sizes: Sequence[int]
    results: dict[str, list[Result]]
    left_out: dict[str, str]

    def ranking(self, at: int) -> list[Result]:
        """The results for the size at this place, fastest first."""
        return sorted((r[at] for r in self.results.values()), key=lambda r: r.time)

    def crossovers(self) -> list[Crossover]:
        """Where the winner changes, by straight lines between the sizes tried."""
        crossovers = []
        for at in range(1, len(self.sizes)):
            old, new = self.ranking(at - 1)[0], self.ranking(at)[0]
            if old.algorithm == new.algorithm:
                continue
            before, after = self._gap(old, new, at - 1), self._gap(old, new, at)
            part = before / (before + after) if before + after > 0 else 1.0
            low, high = self.sizes[at - 1], self.sizes[at]
            where = low + part * (high - low)
            crossovers.append(Crossover(where, old.algorithm, new.algorithm))
        return crossovers

    def _gap(self, old: Result, new: Result, at: int) -> float:
        """How much slower one of the two is than the other, at a size."""
        times = [
            next(r[at].time for r in self.results.values() if r[at].algorithm == name)
            for name in (old.algorithm, new.algorithm)
        ]
        return abs(times[0] - times[1])


def compare(
    collective: str,
    algorithms: Sequence[str],
    topology: Topology,
    sizes: Sequence[int],
    *,
    segments: int = 1,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Comparison:
    """Simulate all algorithms for all sizes; options are those of `simulate`.

    Without options one pass serves all sizes of an algorithm.
    """
    found: dict[str, list[Result] | str] = {}
    for name in algorithms:
        progress(name)
        found[name] = tried(
            collective, name, topology, sizes, segments=segments, **options
        )
    return comparison(collective, topology, sizes, found)


def tried(
    collective: str,
    name: str,
    topology: Topology,
    sizes: Sequence[int],
    **options: Any,
) -> list[Result] | str:
    """One algorithm for all sizes, or why it is left out."""
    segments = options.pop("segments", 1)
    common: dict[str, Any] = {"collective": collective, "segments": segments}
    try:
        if options:
            options |= common
            return [simulate(name, topology, size, **options) for size in sizes]
        return sweep(name, topology, sizes, **common)
    except (NotOffered, UnsupportedWorld) as why:
        return str(why)


def comparison(
    collective: str,
    topology: Topology,
    sizes: Sequence[int],
    found: dict[str, list[Result] | str],
) -> Comparison:
    """The comparison of what was found; BadArgument if no algorithm could be tried."""
    left_out = {name: why for name, why in found.items() if isinstance(why, str)}
    results = {name: r for name, r in found.items() if not isinstance(r, str)}
    if not results:
        first = next(iter(left_out.values()), "no algorithm was named")
        raise BadArgument(f"{collective} on {topology.name}: {first}")
    return Comparison(topology, sizes, results, left_out)
