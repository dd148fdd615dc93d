"""From measurements to a table.

    tuner = Tuner(comm)             on every rank
    tuner.links()                   messages and a few collectives, fitted
    tuner.part("all_reduce")        the candidates near the best, raced
    tuner.world()                   the entry of the table

Rank 0 decides what is measured next and broadcasts it, so all ranks do the same even if
their floating-point results differ. For every size the times of the candidates are
predicted, all that are not far behind are measured briefly, and those within 1.25 of
the best are raced, always together with the default choice. A candidate that would
replace the default has to beat it once more. So an error of the model is found.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isqrt
from pathlib import Path
from statistics import median, stdev
from typing import Any

import msgspec

from unisono.dtypes import DTYPES
from unisono.errors import BadArgument, unknown
from unisono.runtime.communicator import Communicator
from unisono.runtime.plan.select import choose
from unisono.runtime.plan.tuned import (
    TunedCollective,
    TunedLink,
    TunedRow,
    TunedWorld,
    machine,
    placement_of,
)
from unisono.schedule.collective import COLLECTIVES
from unisono.tune.candidates import candidates
from unisono.tune.files import destination, save
from unisono.tune.fit import SURE, Fit, fit
from unisono.tune.measure import (
    Stopwatch,
    calls_of,
    elements,
    itemsize_of,
    whole_bytes,
)
from unisono.tune.price import LinkCosts
from unisono.tune.race import decided, nearest, promising, winner

FURTHER = 2
"""How often candidates are added that are near after predictions are corrected."""
_REDUCED = 1 << 20
"""The size at which the cost of adding up is measured."""


@dataclass(frozen=True)
class Effort:
    """What is measured, and how long."""

    collectives: tuple[str, ...] = tuple(COLLECTIVES)
    sizes: tuple[int, ...] = tuple(8 << (2 * k) for k in range(12))  # to 32 MiB
    messages: tuple[int, ...] = tuple(8 << (2 * k) for k in range(11))  # to 8 MiB
    batch_s: float = 0.02
    rounds: int = 5
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        for name in self.collectives:
            if name not in COLLECTIVES:
                raise unknown("collective", name, COLLECTIVES)
        if self.dtype not in DTYPES:
            raise unknown("element type", self.dtype, DTYPES)
        sizes = self.sizes
        if not sizes or sorted(set(sizes)) != list(sizes) or sizes[0] < 1:
            raise BadArgument(f"sizes {sizes}: expected to ascend, from 1 byte on")


QUICK = Effort(
    ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier"),
    tuple(8 << (4 * k) for k in range(6)),
    tuple(8 << (3 * k) for k in range(7)),
    batch_s=0.004,
    rounds=3,
)
"""What `unisono tune --quick` measures: fewer collectives, sizes and rounds."""


@dataclass
class Tuner:
    """Tunes one communicator; all of its ranks call the same methods."""

    comm: Communicator
    effort: Effort = field(default_factory=Effort)
    found: list[TunedCollective] = field(default_factory=list)
    fits: dict[str, Fit] = field(default_factory=dict)
    costs: LinkCosts = field(init=False, default_factory=lambda: LinkCosts(None, None))
    added_error: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """Nothing to measure between one rank and itself."""
        if self.comm.world_size < 2:
            raise BadArgument("tune: expected 2 ranks or more, got 1")
        self.hosts: tuple[int, ...] = self.comm.hosts
        self.watch = Stopwatch(self.comm, self.effort.batch_s, self.effort.rounds)

    @classmethod
    def from_plain(cls, comm: Communicator, effort: Mapping[str, Any]) -> Tuner:
        """A tuner from settings as plain data, as another process sends them."""
        return cls(comm, msgspec.convert(dict(effort), Effort))

    def do(self, what: str) -> dict[str, Any]:
        """One part of the work, for a driver: "links", "world", or a collective."""
        if what == "links":
            self.links()
            return {"links": self.plain_links()}
        if what == "world":
            return {"world": msgspec.to_builtins(self.world())}
        return {"part": msgspec.to_builtins(self.part(what))}

    def plain_links(self) -> list[Any]:
        """What was fitted, as plain data."""
        return [
            msgspec.to_builtins(link)
            for kind in self.fits
            for link in _links(kind, self.fits[kind])
        ]

    def links(self) -> dict[str, Fit]:
        """Measure messages inside a host and between hosts, and fit them."""
        inside = next((r for r, h in enumerate(self.hosts) if r and h == 0), 0)
        across = next((r for r, h in enumerate(self.hosts) if h), 0)
        if not inside:  # the first host has one rank; another may have two
            for r, h in enumerate(self.hosts):
                if h in self.hosts[:r]:
                    inside = r
        for kind, other in (("inside", inside), ("across", across)):
            if other:
                one = self.hosts.index(self.hosts[other]) if kind == "inside" else 0
                self.fits[kind] = self._fitted(one, other)
        self.costs = LinkCosts(self.fits.get("inside"), self.fits.get("across"))
        self._others()
        return self.fits

    def _fitted(self, one: int, other: int) -> Fit:
        sizes: list[int] = []
        times: list[float] = []
        for nbytes in self.effort.messages:
            seconds = self.watch.between(one, other, nbytes)
            sizes += [nbytes] * len(seconds)
            times += seconds
        return fit(sizes, times)

    def _others(self) -> None:
        """What a peer more costs, and a byte more to add, from three collectives."""
        n, ranks = self.comm.world_size, max(map(self.hosts.count, self.hosts))
        cores = min(os.cpu_count() or 1, ranks)
        peers = max(n - self.hosts.count(h) for h in self.hosts)
        message = 0.0
        if "across" in self.fits and peers > 1:
            barrier = median(self._raced("barrier", 0, ["direct"])["direct"])
            message = max(0.0, barrier - self.fits["across"].at(0)) / (peers - 1)
        moved, added = (
            self._raced(what, _REDUCED, ["direct"])["direct"]
            for what in ("all_gather", "reduce_scatter")
        )
        nbytes = _REDUCED * (n - 1) / n * max(1.0, ranks / cores)
        each = [(b - a) / nbytes for a, b in zip(moved, added, strict=True)]
        if len(each) > 1:
            self.added_error = SURE * stdev(each) / len(each) ** 0.5
        fits = self.fits.get("inside"), self.fits.get("across")
        self.costs = LinkCosts(*fits, message, max(0.0, median(each)), cores)

    def _raced(
        self,
        collective: str,
        nbytes: int,
        names: Sequence[str],
        watch: Stopwatch | None = None,
    ) -> dict[str, list[float]]:
        dtype, n = self.effort.dtype, self.comm.world_size
        count = elements(collective, nbytes, n, DTYPES[dtype].itemsize)
        calls = calls_of(self.comm, collective, count, dtype, names)
        return (watch or self.watch).race(calls)

    def part(self, collective: str) -> TunedCollective:
        """Find the winner of a collective at every size."""
        if "inside" not in self.fits and "across" not in self.fits:
            self.links()
        names = candidates(collective, self.hosts) if self.comm.rank == 0 else []
        dtype, n = self.effort.dtype, self.comm.world_size
        itemsize = DTYPES[dtype].itemsize
        sizes = [
            whole_bytes(collective, elements(collective, s, n, itemsize), n, itemsize)
            for s in self.effort.sizes
        ]
        rows = [self._row(collective, s, names) for s in sorted(set(sizes))]
        made = _upto(rows)
        part = TunedCollective(collective, itemsize_of(collective, dtype), made)
        self.found = [p for p in self.found if p.collective != collective] + [part]
        return part

    def _row(self, collective: str, nbytes: int, names: Sequence[str]) -> TunedRow:
        """Race candidates near the best, until all that are near have been raced."""
        leads, n = self.comm.rank == 0, self.comm.world_size
        usual = choose(
            *(collective, nbytes, n),
            named=None,
            reproducible=False,
            hosts=self.hosts,
            model=self.comm.core.session.links_between(range(n)),
        ).algorithm
        expected = {
            name: self.costs.seconds(collective, name, self.hosts, nbytes)
            for name in dict.fromkeys([*names, usual])
            if leads
        }
        tried = self._tried(collective, nbytes, [*promising(expected), usual])
        times: dict[str, list[float]] = {}
        refused: set[str] = set()
        for turn in range(1 + FURTHER):
            known = {name: median(found) for name, found in times.items()}
            wanted = nearest(tried, known, refused) if leads else []
            if turn == 0 and leads and usual not in wanted:
                wanted.append(usual)
            wanted = self.comm.broadcast_object(wanted)
            if not wanted:
                break
            raced = self._raced(collective, nbytes, wanted)
            times |= raced
            refused |= set(wanted) - set(raced)
        row = self._agreed(winner(nbytes, expected, times, usual) if leads else None)
        if row.algorithm == usual or usual not in times:
            return row
        # The best of many may be the best by chance: it has to beat the default once
        # more.
        watch = replace(self.watch, rounds=2 * self.watch.rounds)
        again = self._raced(collective, nbytes, [usual, row.algorithm], watch)
        return self._agreed(decided(row, usual, expected, again) if leads else None)

    def _tried(
        self, collective: str, nbytes: int, names: Sequence[str]
    ) -> dict[str, float]:
        """A short measurement of every promising candidate."""
        wanted = self.comm.broadcast_object(list(dict.fromkeys(names)))
        watch = replace(self.watch, batch_s=self.watch.batch_s / 10, rounds=2)
        raced = self._raced(collective, nbytes, wanted, watch)
        return {name: min(times) for name, times in raced.items()}

    def _agreed(self, row: TunedRow | None) -> TunedRow:
        """Rank 0's, on all ranks."""
        plain = self.comm.broadcast_object(msgspec.to_builtins(row))
        return msgspec.convert(plain, TunedRow)

    def world(self) -> TunedWorld:
        """All results, as an entry of a table."""
        machines = self.comm.all_gather_objects(machine())
        n = self.comm.world_size
        return TunedWorld(
            n,
            placement_of(n, self.hosts),
            tuple(dict.fromkeys(machines)),
            tuple(self.found),
            tuple(link for kind in self.fits for link in _links(kind, self.fits[kind])),
            self.costs.added_byte,
            self.added_error,
            time.strftime("%Y-%m-%d %H:%M"),
        )


def _upto(rows: Sequence[TunedRow]) -> tuple[TunedRow, ...]:
    """The rows, each for the sizes that are nearest to its own, in powers."""
    ends = [isqrt(a.nbytes * b.nbytes) for a, b in pairwise(rows)]
    return tuple(
        msgspec.structs.replace(row, upto=end)
        for row, end in zip(rows, [*ends, rows[-1].nbytes], strict=True)
    )


def _links(kind: str, found: Fit) -> Iterator[TunedLink]:
    for p in found.pieces:
        errors = p.latency_error, p.byte_error
        yield TunedLink(kind, p.lower, p.upto, p.latency, errors[0], p.byte, errors[1])


def tune(
    comm: Communicator,
    effort: Effort | None = None,
    *,
    save_to: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> TunedWorld:
    """Tune a communicator: called by all its ranks; rank 0 writes the table."""
    chosen = effort or Effort()
    where = (save_to or destination()) if comm.rank == 0 else None
    tuner = Tuner(comm, chosen)
    tell(f"messages between {comm.world_size} ranks")
    tuner.links()
    for name in chosen.collectives:
        tell(name)
        tuner.part(name)
    world = tuner.world()
    if where is not None:
        tell(f"wrote {save(world, where)}")
    return world
