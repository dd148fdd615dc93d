"""Transfers that happen together.

A transfer is one chunk going from rank src to rank dst, where it is copied or reduced
(added to what is there). A step is any number of them at once, held as NumPy arrays
that are broadcast against each other, so that one line of arithmetic describes all
ranks:

    c = np.arange(n)
    yield reduce(c, src=(c + hop) % n, dst=(c + hop + 1) % n)

The rules of a step:

- it is simultaneous: everything is read before anything is written;
- a slot (one chunk on one rank) takes at most one copy, and any number of reductions;
- the operands of one slot (its own value, or the copy that replaces it, and all
  arriving reductions) are summed in the order of the ranks they come from. So a rank
  that receives from several at once adds as the others do, and has the same bits.

A chunk keeps its name on the way, except that `into` may name another: a temporary, or
a chunk filled from one. Temporaries are numbered after the chunks and begin empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.errors import BadArgument
from unisono.schedule.collective import Ints

Bools = NDArray[np.bool_]


class Transfer(NamedTuple):
    """One record of a step, for people and for files."""

    src: int
    dst: int
    chunk: int
    reduces: bool
    into: int

    @property
    def kind(self) -> str:
        """The word for it: "reduce" or "copy"."""
        return "reduce" if self.reduces else "copy"

    def __str__(self) -> str:
        """As in "chunk 3: 0 → 1 (reduce)"."""
        name = f"chunk {self.chunk}"
        if self.into != self.chunk:
            name += f" as {self.into}"
        return f"{name}: {self.src} → {self.dst} ({self.kind})"


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Simultaneous transfers: four arrays of one shape, and whether each reduces."""

    src: Ints
    dst: Ints
    chunk: Ints
    into: Ints
    reduces: bool | Bools
    phase: str = ""

    def __post_init__(self) -> None:
        """Refuse arrays that are not whole numbers of one shape."""
        for array in (self.src, self.dst, self.chunk, self.into):
            if (
                not isinstance(array, np.ndarray)
                or array.dtype != np.int64
                or not array.flags.aligned
            ):
                raise BadArgument("a step: src, dst, chunk, into: expected int64")
            if array.shape != self.chunk.shape:
                raise BadArgument(
                    f"a step: shapes differ, {array.shape} and {self.chunk.shape}"
                )
        if not isinstance(self.reduces, bool) and (
            not isinstance(self.reduces, np.ndarray)
            or self.reduces.dtype != np.bool_
            or self.reduces.shape != self.chunk.shape
        ):
            raise BadArgument("a step: reduces is true, false, or an array of those")
        if not self.phase.isprintable():
            raise BadArgument(f"a step: phase {self.phase!r} is not printable")

    def __len__(self) -> int:
        """The number of transfers."""
        return self.chunk.size

    def __iter__(self) -> Iterator[Transfer]:
        """Each transfer in turn; for people, not for loops over many."""
        for row in zip(*(a.tolist() for a in self.flat()), strict=True):
            yield Transfer(*row)

    def flat(self) -> tuple[Ints, Ints, Ints, Bools, Ints]:
        """The transfers as one-dimensional src, dst, chunk, reduces, into."""
        return (
            self.src.ravel(),
            self.dst.ravel(),
            self.chunk.ravel(),
            self.mask.ravel(),
            self.into.ravel(),
        )

    @property
    def mask(self) -> Bools:
        """For each transfer, whether it reduces."""
        return np.broadcast_to(np.asarray(self.reduces), self.chunk.shape)

    @property
    def renames(self) -> bool:
        """Whether some transfer delivers into another name than it was read from."""
        return self.into is not self.chunk and bool((self.into != self.chunk).any())

    def named(self, phase: str) -> Step:
        """The same transfers as part of `phase`."""
        return replace(self, phase=phase)

    def copy(self) -> Step:
        """The same transfers in arrays of its own."""
        chunk, reduces = self.chunk.copy(), self.reduces
        return Step(
            self.src.copy(),
            self.dst.copy(),
            chunk,
            chunk if self.into is self.chunk else self.into.copy(),
            reduces if isinstance(reduces, bool) else reduces.copy(),
            self.phase,
        )

    def backwards(self, *, swap_kinds: bool) -> Step:
        """Every transfer the other way round; copies and reductions change places."""
        reduces = self.reduces
        if swap_kinds:
            reduces = not reduces if isinstance(reduces, bool) else ~reduces
        return Step(self.dst, self.src, self.into, self.chunk, reduces)

    def where(self, keep: Bools) -> Step:
        """Only the transfers for which `keep` is true."""
        keep = keep.ravel()
        src, dst, chunk, mask, into = self.flat()
        chunk_ = chunk[keep]
        into_ = chunk_ if self.into is self.chunk else into[keep]
        reduces = self.reduces if isinstance(self.reduces, bool) else mask[keep]
        return Step(src[keep], dst[keep], chunk_, into_, reduces, self.phase)


def copy_step(
    chunk: ArrayLike, src: ArrayLike, dst: ArrayLike, into: ArrayLike | None = None
) -> Step:
    """A step that copies `chunk` from `src` to `dst`; the arguments are broadcast."""
    return _step(chunk, src, dst, into, reduces=False)


def reduce_step(
    chunk: ArrayLike, src: ArrayLike, dst: ArrayLike, into: ArrayLike | None = None
) -> Step:
    """A step that adds `chunk` of `src` to what `dst` holds of it."""
    return _step(chunk, src, dst, into, reduces=True)


def _step(
    chunk: ArrayLike,
    src: ArrayLike,
    dst: ArrayLike,
    into: ArrayLike | None,
    *,
    reduces: bool,
) -> Step:
    names, from_, to = whole_numbers(chunk), whole_numbers(src), whole_numbers(dst)
    if into is None:
        if not names.shape == from_.shape == to.shape:
            names, from_, to = _broadcast(names, from_, to)
        return Step(from_, to, names, names, reduces)
    names, from_, to, into_ = _broadcast(names, from_, to, whole_numbers(into))
    return Step(from_, to, names, into_, reduces)


def whole_numbers(values: ArrayLike) -> Ints:
    """`values` as an array of int64, if whole numbers is what they are."""
    try:
        array = np.atleast_1d(values)
    except ValueError as why:
        raise BadArgument(f"expected an array of whole numbers: {why}") from why
    if array.dtype.kind not in "iu" and array.size:
        raise BadArgument(f"expected whole numbers, got an array of {array.dtype}")
    if array.dtype == np.uint64 and (array >> np.uint64(63)).any():
        raise BadArgument("expected whole numbers below 2^63")
    return array.astype(np.int64, copy=False)


def runs(lengths: Ints) -> tuple[Ints, Ints]:
    """Runs of these lengths, end to end: for each element, its run and place in it."""
    run = np.repeat(np.arange(lengths.size), lengths)
    place = np.arange(run.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return run, place


def _broadcast(*arrays: Ints) -> tuple[Ints, ...]:
    try:
        return np.broadcast_arrays(*arrays)
    except ValueError as why:
        shapes = ", ".join(str(a.shape) for a in arrays)
        raise BadArgument(f"a step: shapes {shapes} do not fit together") from why


def together(steps: Iterable[Step]) -> Step:
    """One step that does all of `steps` at once, in the first one's phase."""
    parts = [s for s in steps if len(s)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        empty = np.empty(0, dtype=np.int64)
        return Step(empty, empty, empty, empty, reduces=False)
    columns = [
        np.concatenate(arrays)
        for arrays in zip(*(s.flat() for s in parts), strict=True)
    ]
    src, dst, chunk, reduces, into = columns
    renames = any(s.into is not s.chunk for s in parts)
    phase = next((s.phase for s in parts if s.phase), "")
    return Step(src, dst, chunk, into if renames else chunk, reduces, phase)
