"""Schedules from schedules.

    then(a, b)        a and afterwards b          reduce_scatter, all_gather: all_reduce
    mirror(a)         a reversed                  all_gather -> reduce_scatter split(a,
    m)       a pipelined over m parts    one chunk -> m, each a step behind relabel(a,
    ranks) ranks renumbered            any root, any order refine(a, k)      every chunk
    cut in k        so that two have the same chunks fold(a, n)        more ranks than a
    has       extra ranks send to others and get back product(...)      levels of a
    hierarchy       in product.py

Most of the others use one mechanism, `embed`: a small schedule runs inside a large
one, given the local chunk of each chunk and the rank for each local rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat, zip_longest

import numpy as np
from numpy.typing import ArrayLike

from unisono.errors import BadArgument, whole_number
from unisono.schedule.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Ints,
    between,
)
from unisono.schedule.oracle import checked_steps
from unisono.schedule.protocol import ReadableSchedule, S
from unisono.schedule.step import (
    Step,
    copy_step,
    reduce_step,
    runs,
    together,
    whole_numbers,
)

Cast = Callable[[Ints, Ints], Ints]


def refuse_temporaries(*parts: ReadableSchedule | Step) -> None:
    """Raise BadArgument if one of these has temporaries: they cannot be combined."""
    for part in parts:
        if part.renames if isinstance(part, Step) else part.num_temporaries:
            raise BadArgument("a schedule with temporaries cannot be part of another")


def embed(steps: Iterable[Step], local_chunk: Ints, cast: Cast) -> Iterator[Step]:
    """Run `steps` on other chunks and ranks.

    `local_chunk[c]` is the chunk of the small schedule that chunk c follows, or -1 for
    none; several may follow one. `cast(chunk, local_rank)` gives the rank that is
    `local_rank` for that chunk; its answer may have leading axes, for several groups
    that act at once.
    """
    order = np.argsort(local_chunk, kind="stable")
    followers = np.bincount(local_chunk[local_chunk >= 0], minlength=1)
    first = np.cumsum(followers) - followers + np.count_nonzero(local_chunk < 0)
    for step in checked_steps(steps) if isinstance(steps, ReadableSchedule) else steps:
        refuse_temporaries(step)
        src, dst, names, mask, _ = step.flat()
        inside = names < followers.size
        times = np.where(inside, followers[np.where(inside, names, 0)], 0)
        each, nth = runs(times)
        chunk = order[first[names[each]] + nth]
        reduces = step.reduces if isinstance(step.reduces, bool) else mask[each]
        yield _moved(
            step.phase, chunk, cast(chunk, src[each]), cast(chunk, dst[each]), reduces
        )


def _moved(
    phase: str,
    chunk: Ints,
    src: Ints,
    dst: Ints,
    reduces: bool | np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
) -> Step:
    chunk, src, dst = np.broadcast_arrays(chunk, src, dst)
    if not isinstance(reduces, bool):
        reduces = np.broadcast_to(reduces, chunk.shape)
    return Step(src, dst, chunk, chunk, reduces, phase)


def at_once(*sides: Iterable[Step]) -> Iterator[Step]:
    """Several runs of steps side by side: their first steps together, and so on."""
    nothing = together(())
    for parts in zip_longest(*sides, fillvalue=nothing):
        yield together(parts)


def phase(name: str, steps: Iterable[Step]) -> Iterator[Step]:
    """The same steps under another name."""
    for step in steps:
        yield step.named(name)


def refine(schedule: S, pieces: int) -> S:
    """The same schedule with every chunk cut into `pieces` that are sent together."""
    if pieces == 1:
        return schedule
    finer = np.arange(schedule.num_chunks * pieces) // pieces
    return schedule.but(
        num_chunks=finer.size, make=lambda: embed(schedule, finer, lambda _, rank: rank)
    )


def then(first: S, second: S) -> S:
    """`first` and afterwards `second`, as one schedule for what both amount to."""
    if first.n != second.n:
        raise BadArgument(f"cannot join schedules of {first.n} and {second.n} ranks")
    if (
        first.collective.after is not second.collective.before
        or second.collective.reduces
    ):
        raise BadArgument(
            f"{second.collective.name} cannot follow {first.collective.name}: it does "
            "not begin where the other ends"
        )
    refuse_temporaries(first, second)
    if (
        first.collective.rooted
        and second.collective.rooted
        and first.root != second.root
    ):
        raise BadArgument(f"roots differ: {first.root} and {second.root}")
    both = math.lcm(first.num_chunks, second.num_chunks)
    a = refine(first, both // first.num_chunks)
    b = refine(second, both // second.num_chunks)

    def make() -> Iterator[Step]:
        yield from a
        yield from b

    whole = between(first.collective.before, second.collective.after)
    root = first.root if first.collective.rooted else second.root
    name = first.name if first.name == second.name else f"{first.name}+{second.name}"
    return first.but(
        collective=whole,
        num_chunks=both,
        make=make,
        name=name,
        root=root if whole.rooted else 0,
        about="",
        paper="",
    )


def mirror(schedule: S) -> S:
    """`schedule` reversed: what was received is sent, what was copied is reduced.

    An all_gather gives a reduce_scatter, a broadcast a reduce, and the other way round;
    a scatter gives a gather, where copies remain copies. For sums this is right only if
    the schedule delivers each chunk to each rank once, as any that wastes nothing does.
    """
    old = schedule.collective
    if schedule.num_temporaries:
        raise BadArgument("a schedule with temporaries has no mirror image")
    if old is ALL_TO_ALL:
        return _transposed(schedule)
    new = between(old.after, old.before)
    swap = old.reduces or new.reduces

    def make() -> Iterator[Step]:
        for step in reversed(list(schedule)):
            yield _rephased(step.backwards(swap_kinds=swap), step.phase)

    return schedule.but(collective=new, make=make)


_OPPOSITE = {
    "all_gather": "reduce_scatter",
    "broadcast": "reduce",
    "scatter": "gather",
    "in": "out",
}
_OPPOSITE |= {new: old for old, new in _OPPOSITE.items()}


def _rephased(step: Step, old_phase: str) -> Step:
    """The step with the name of its phase reversed."""
    words = [_OPPOSITE.get(word, word) for word in old_phase.split(" ")]
    return step.named(" ".join(words))


def _transposed(schedule: S) -> S:
    """An all_to_all backwards, the chunk from i to j renamed to that from j to i."""
    n, pieces = schedule.n, schedule.num_chunks // schedule.n**2
    swapped = (
        np.arange(schedule.num_chunks).reshape(n, n, pieces).swapaxes(0, 1).ravel()
    )

    def make() -> Iterator[Step]:
        back = (s.backwards(swap_kinds=False) for s in reversed(list(schedule)))
        yield from embed(back, swapped, lambda _, rank: rank)

    return schedule.but(make=make)


def split(schedule: S, segments: int) -> S:
    """The data cut into `segments`, each following the schedule a step behind the last.

    An algorithm of A steps then takes A + segments - 1, each moving 1/segments as much.
    """
    segments = whole_number("segments", segments)
    if segments < 1:
        raise BadArgument(f"segments = {segments}: at least 1")
    if schedule.num_temporaries:
        raise BadArgument("a schedule with temporaries cannot be split")
    if segments == 1:
        return schedule

    def segment(step: Step, i: int) -> Step:
        chunk = step.chunk * segments + i
        return Step(step.src, step.dst, chunk, chunk, step.reduces, step.phase)

    def make() -> Iterator[Step]:
        nothing = together(())
        window: deque[Step] = deque(maxlen=segments)
        for step in chain(checked_steps(schedule), repeat(nothing, segments - 1)):
            window.appendleft(step)
            yield together(segment(w, i) for i, w in enumerate(window) if len(w))

    return schedule.but(num_chunks=schedule.num_chunks * segments, make=make)


def relabel(schedule: S, ranks: ArrayLike) -> S:
    """The same schedule with rank r replaced by `ranks[r]`.

    Where chunks belong to ranks their owners change too, so that the contract holds.
    """
    new = whole_numbers(ranks)
    n = schedule.n
    if not np.array_equal(np.sort(new), np.arange(n)):
        raise BadArgument(f"relabel: expected each of 0..{n - 1} once")
    refuse_temporaries(schedule)
    old = np.argsort(new)
    chunks = np.arange(schedule.num_chunks)
    if schedule.collective is ALL_TO_ALL:
        chunks = chunks.reshape(n, n, -1)[old][:, old].ravel()
    elif schedule.collective.owned:
        chunks = chunks.reshape(n, -1)[old].ravel()
    return schedule.but(
        root=int(new[schedule.root]),
        make=lambda: embed(schedule, chunks, lambda _, rank: new[rank]),
    )


def fold_pairs(m: int, n: int) -> tuple[Ints, Ints, Ints]:
    """How n ranks fold onto m: of each pair, who stays and who folds; and all who stay.

    The pairs are (0, 1), (2, 3), ... as many as there are ranks too many.
    """
    surplus = n - m
    if not 0 <= surplus <= m:
        raise BadArgument(f"fold: {m} ranks can stand for {m} to {2 * m}, not {n}")
    stays = np.concatenate([2 * np.arange(surplus), np.arange(2 * surplus, n)])
    return stays[:surplus], stays[:surplus] + 1, stays


def fold(inner: S, n: int) -> S:
    """`inner`, made for fewer ranks, extended to n: the surplus folds onto others.

    Of each of the first pairs (0, 1), (2, 3), ... the even rank stays in, and the odd
    one hands its data in before and gets the result after. All ranks that stay act out
    `inner`, so n may be up to twice its number.
    """
    n = whole_number("n", n)
    m, surplus = inner.n, n - inner.n
    core, extra, stays = fold_pairs(m, n)
    if surplus == 0:
        return inner
    whole = inner.collective
    if whole is REDUCE_SCATTER:
        return mirror(fold(mirror(inner), n))
    if whole not in (ALL_REDUCE, ALL_GATHER):
        raise BadArgument(f"fold: not known for {whole.name}")
    pieces = inner.num_chunks // m if whole is ALL_GATHER else 1
    num_chunks = n * pieces if whole is ALL_GATHER else inner.num_chunks
    chunk = np.arange(num_chunks)
    plays = np.repeat(np.arange(m), np.where(np.arange(m) < surplus, 2, 1))
    local = (
        plays[chunk // pieces] * pieces + chunk % pieces
        if whole is ALL_GATHER
        else chunk
    )

    def make() -> Iterator[Step]:
        if whole is ALL_REDUCE:
            yield reduce_step(chunk[:, None], src=extra, dst=core).named("fold in")
        else:
            own = extra * pieces + np.arange(pieces)[:, None]
            yield copy_step(own, src=extra, dst=core).named("fold in")
        yield from embed(inner, local, lambda _, rank: stays[rank])
        back = copy_step(chunk[:, None], src=core, dst=extra).named("fold out")
        if whole is ALL_GATHER:
            back = back.where(back.dst != back.chunk // pieces)
        yield back

    return inner.but(n=n, num_chunks=num_chunks, make=make)
