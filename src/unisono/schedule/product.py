"""Hierarchies: one schedule inside every group, another across the groups.

Ranks are numbered group by group. Across the groups a chunk is carried by one rank of
each group, its *carrier* there, so that all ranks of a group share the work: with equal
groups these are the ranks with the same position; with unequal ones the positions are
scaled, and if some groups are twice as large as others shares are cut finer, so that
many ranks of a large group divide the shares of few.

    all_gather      across the groups, each carrier for its chunks; then inside
    reduce_scatter  the mirror of that
    all_reduce      reduce_scatter inside, all_reduce across, all_gather inside
    all_to_all      inside, to the carrier of the target; then across
    broadcast, scatter   across, between the groups' first ranks; then inside
    reduce, gather       the mirrors of those

The schedule across may itself be a product, so two levels make any number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.errors import BadArgument
from unisono.schedule.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Ints,
)
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step
from unisono.schedule.transform import (
    Cast,
    at_once,
    embed,
    mirror,
    phase,
    refine,
    refuse_temporaries,
)

FINEST = 8
"""Into how many pieces a share is cut at most, for unequal groups."""

PlaceIn = Callable[[Ints], Ints]
"""For every chunk, the place in a group that carries it there."""


@dataclass(frozen=True)
class RankGroups:
    """Consecutive ranks in groups of the given sizes."""

    sizes: Ints

    @property
    def first(self) -> Ints:
        """The first rank of each group."""
        return np.cumsum(self.sizes) - self.sizes

    @property
    def of_rank(self) -> Ints:
        """The group that each rank belongs to."""
        return np.repeat(np.arange(self.sizes.size), self.sizes)

    def carrier(
        self, rank: Ints, group: Ints, part: Ints | int = 0, pieces: int = 1
    ) -> Ints:
        """The place in `group` that corresponds to `rank`'s place in its own.

        If what is carried is cut into `pieces`, it is `part`'s place among the pieces
        of all ranks there.
        """
        own = self.of_rank[rank]
        place = (rank - self.first[own]) * pieces + part
        return place * self.sizes[group] // (self.sizes[own] * pieces)

    @property
    def times_larger(self) -> int:
        """How many whole times the smallest group fits into the largest."""
        return int(self.sizes.max()) // int(self.sizes.min())


def product(
    inside: Sequence[Schedule], across: Schedule, back: Sequence[Schedule] = ()
) -> Schedule:
    """One schedule for all ranks of all groups.

    `inside[g]` is the schedule of group g, and `across` that of one rank per group, all
    of one collective. Only all_reduce differs: there `inside` are reduce_scatters and
    `back` all_gathers, or `inside` are reduces, to the groups' first ranks, and `back`
    broadcasts.
    """
    _refuse_misfits(inside, across, back)
    groups = RankGroups(np.array([s.n for s in inside], dtype=np.int64))
    whole = across.collective
    if whole is ALL_REDUCE and inside[0].collective is REDUCE:
        return _all_reduce_by_first_ranks(groups, inside, across, back)
    if whole is ALL_REDUCE:
        return _all_reduce(groups, inside, across, back)
    if whole in (ALL_GATHER, BARRIER):
        return _all_gather(groups, inside, across)
    if whole is ALL_TO_ALL:
        return _all_to_all(groups, inside, across)
    if whole is BROADCAST:
        return _broadcast(groups, inside, across)
    if whole is SCATTER:
        return _scatter(groups, inside, across)
    mirrored = {id(s): mirror(s) for s in inside}
    return mirror(product([mirrored[id(s)] for s in inside], mirror(across)))


def _refuse_misfits(
    inside: Sequence[Schedule], across: Schedule, back: Sequence[Schedule]
) -> None:
    if len(inside) != across.n:
        raise BadArgument(f"{len(inside)} groups, but {across.n} ranks across them")
    refuse_temporaries(*inside, across, *back)
    if any(s.root for s in (*inside, across, *back)):
        raise BadArgument("the parts of a product have rank 0 as their root")
    kinds = {s.collective for s in inside}
    if across.collective is not ALL_REDUCE:
        if kinds != {across.collective} or back:
            raise BadArgument(f"the groups must do {across.collective.name} too")
        return
    ways = [{REDUCE_SCATTER}, {ALL_GATHER}], [{REDUCE}, {BROADCAST}]
    fits = [s.n for s in inside] == [s.n for s in back]
    if [kinds, {s.collective for s in back}] not in ways or not fits:
        raise BadArgument(
            "an all_reduce across groups needs a reduce_scatter and an all_gather, or "
            "a reduce and a broadcast, inside each"
        )


def _whole(
    across: Schedule,
    groups: RankGroups,
    chunks: int,
    make: Callable[[], Iterator[Step]],
) -> Schedule:
    """The schedule of all ranks, for the collective that is done across the groups."""
    n = int(groups.sizes.sum())
    return Schedule(across.collective, n, chunks, make, name=across.name)


def _alike(schedules: Sequence[Schedule]) -> Iterator[tuple[Schedule, Ints]]:
    """Each distinct schedule, with the groups that share it and so act at once."""
    by_identity: dict[int, list[int]] = {}
    for group, schedule in enumerate(schedules):
        by_identity.setdefault(id(schedule), []).append(group)
    for alike in by_identity.values():
        yield schedules[alike[0]], np.array(alike)


def _cast_all(first: Ints) -> Cast:
    """All groups that begin at `first` act at once, on the same chunks."""
    return lambda _, place: first[:, None] + place


def _inside_all(
    schedules: Sequence[Schedule], first: Ints, place_in: PlaceIn, pieces: int
) -> Iterator[Step]:
    """Every group runs its own schedule on all chunks.

    A group's local chunk is the place in it that carries the chunk; `pieces` is how
    many of our chunks make up one share.
    """
    runs = []
    for schedule, alike in _alike(schedules):
        finer = schedule.num_chunks // schedule.n
        place = place_in(alike[:1])
        local = place * finer + np.arange(place.size) % pieces * finer // pieces
        runs.append(embed(schedule, local, _cast_all(first[alike])))
    yield from at_once(*runs)


def _pieces(inside: Sequence[Schedule], across: Schedule) -> int:
    """Into how many chunks a share must be cut for every part to have whole chunks."""
    parts = [
        s.num_chunks // s.collective.chunk_multiple(s.n) for s in (*inside, across)
    ]
    return math.lcm(*parts)


def _all_gather(
    groups: RankGroups, inside: Sequence[Schedule], across: Schedule
) -> Schedule:
    pieces = _pieces(inside, across)
    if across.collective is not BARRIER:
        pieces *= min(groups.times_larger, FINEST)
    n, hosts = int(groups.sizes.sum()), groups.sizes.size
    chunk = np.arange(n * pieces)
    home, part = chunk // pieces, chunk % pieces
    finer = across.num_chunks // hosts
    local = groups.of_rank[home] * finer + part * finer // pieces

    def place_in(group: Ints) -> Ints:
        return groups.carrier(home, group, part, pieces)

    def carriers(chunk: Ints, group: Ints) -> Ints:
        place = groups.carrier(home[chunk], group, part[chunk], pieces)
        return groups.first[group] + place

    def make() -> Iterator[Step]:
        word = across.collective.name
        yield from phase(f"{word} across", embed(across, local, carriers))
        steps = _inside_all(inside, groups.first, place_in, pieces)
        yield from phase(f"{word} inside", steps)

    return _whole(across, groups, chunk.size, make)


def _all_reduce(
    groups: RankGroups,
    inside: Sequence[Schedule],
    across: Schedule,
    back: Sequence[Schedule],
) -> Schedule:
    """Shares of which every rank of every group carries as many as the next.

    That takes as many as the least common multiple of the sizes. Where this is too
    many, there are four for each rank of the largest group, and some carry one more.
    """
    largest = int(groups.sizes.max())
    shares = math.lcm(*groups.sizes.tolist())
    shares = shares if shares <= 8 * largest else 4 * largest
    pieces = _pieces((*inside, *back), across)
    chunk = np.arange(shares * pieces)
    local = chunk % pieces * across.num_chunks // pieces

    def place_in(group: Ints) -> Ints:
        return chunk // pieces * groups.sizes[group] // shares

    def carriers(chunk: Ints, group: Ints) -> Ints:
        return groups.first[group] + chunk // pieces * groups.sizes[group] // shares

    def make() -> Iterator[Step]:
        steps = _inside_all(inside, groups.first, place_in, pieces)
        yield from phase("reduce_scatter inside", steps)
        yield from phase("all_reduce across", embed(across, local, carriers))
        steps = _inside_all(back, groups.first, place_in, pieces)
        yield from phase("all_gather inside", steps)

    return _whole(across, groups, chunk.size, make)


def _all_reduce_by_first_ranks(
    groups: RankGroups,
    inside: Sequence[Schedule],
    across: Schedule,
    back: Sequence[Schedule],
) -> Schedule:
    chunks = math.lcm(*(s.num_chunks for s in (*inside, across, *back)))

    def make() -> Iterator[Step]:
        yield from phase("reduce inside", _each(groups, inside, chunks))
        yield from phase("all_reduce across", _first_ranks(groups, across, chunks))
        yield from phase("broadcast inside", _each(groups, back, chunks))

    return _whole(across, groups, chunks, make)


def _first_ranks(groups: RankGroups, across: Schedule, chunks: int) -> Iterator[Step]:
    """The groups' first ranks run `across`, with all chunks."""
    whole = refine(across, chunks // across.num_chunks)
    return embed(whole, np.arange(chunks), lambda _, group: groups.first[group])


def _each(
    groups: RankGroups, schedules: Sequence[Schedule], chunks: int
) -> Iterator[Step]:
    """Every group runs its own schedule, with all chunks."""
    runs = []
    for schedule, alike in _alike(schedules):
        whole = refine(schedule, chunks // schedule.num_chunks)
        runs.append(embed(whole, np.arange(chunks), _cast_all(groups.first[alike])))
    yield from at_once(*runs)


def _all_to_all(
    groups: RankGroups, inside: Sequence[Schedule], across: Schedule
) -> Schedule:
    pieces = _pieces(inside, across) * min(groups.times_larger, FINEST)
    n, hosts = int(groups.sizes.sum()), groups.sizes.size
    chunk = np.arange(n * n * pieces)
    source, target = chunk // pieces // n, chunk // pieces % n
    here, there = groups.of_rank[source], groups.of_rank[target]
    part = chunk % pieces

    def local(place: Ints, to: Ints, size: Ints | int, schedule: Schedule) -> Ints:
        finer = schedule.num_chunks // schedule.n**2
        return (place * size + to) * finer + part * finer // pieces

    def carriers(chunk: Ints, group: Ints) -> Ints:
        place = groups.carrier(target[chunk], group, part[chunk], pieces)
        return groups.first[group] + place

    def make() -> Iterator[Step]:
        runs = []
        for schedule, alike in _alike(inside):
            size = schedule.n
            to = groups.carrier(target, here, part, pieces)
            chosen = local(source - groups.first[here], to, size, schedule)
            chosen = np.where(np.isin(here, alike), chosen, -1)
            runs.append(embed(schedule, chosen, lambda c, p: groups.first[here[c]] + p))
        yield from phase("all_to_all inside", at_once(*runs))
        outer = local(here, there, hosts, across)
        yield from phase("all_to_all across", embed(across, outer, carriers))

    return _whole(across, groups, chunk.size, make)


def _broadcast(
    groups: RankGroups, inside: Sequence[Schedule], across: Schedule
) -> Schedule:
    chunks = math.lcm(across.num_chunks, *(s.num_chunks for s in inside))

    def make() -> Iterator[Step]:
        yield from phase("broadcast across", _first_ranks(groups, across, chunks))
        yield from phase("broadcast inside", _each(groups, inside, chunks))

    return _whole(across, groups, chunks, make)


def _scatter(
    groups: RankGroups, inside: Sequence[Schedule], across: Schedule
) -> Schedule:
    pieces = _pieces(inside, across)
    n, hosts = int(groups.sizes.sum()), groups.sizes.size
    chunk = np.arange(n * pieces)
    home, part = chunk // pieces, chunk % pieces
    there = groups.of_rank[home]

    def local(place: Ints, schedule: Schedule, ranks: int) -> Ints:
        finer = schedule.num_chunks // ranks
        return place * finer + part * finer // pieces

    def make() -> Iterator[Step]:
        outer = local(there, across, hosts)
        steps = embed(across, outer, lambda _, group: groups.first[group])
        yield from phase("scatter across", steps)
        runs = []
        for schedule, alike in _alike(inside):
            chosen = local(home - groups.first[there], schedule, schedule.n)
            chosen = np.where(np.isin(there, alike), chosen, -1)
            runs.append(
                embed(schedule, chosen, lambda c, p: groups.first[there[c]] + p)
            )
        yield from phase("scatter inside", at_once(*runs))

    return _whole(across, groups, chunk.size, make)
