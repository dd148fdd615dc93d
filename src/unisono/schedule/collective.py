"""A collective is a contract: who holds which chunk before, and who must hold it after.

Four kinds of holders suffice, and every collective is one line of data:

    EVERYWHERE  all ranks          ROOT    the root
    OWNER       the rank the chunk belongs to (in all_to_all: the rank it comes from)
    TARGET      in all_to_all, the rank the chunk is for

Where several ranks hold a chunk before, each holds its own *contribution*, and the
collective adds them up. Otherwise there is one original, and it is copied.

The algebra of schedules follows from the same table: reversed, a contract swaps
its two ends (all_gather becomes reduce_scatter, scatter becomes gather); one after
the other, the inner ends must be equal and the outer ones remain (reduce_scatter, then
all_gather is all_reduce, scatter and then all_gather is broadcast).

Chunk c of `num_chunks` belongs to rank `c * n // num_chunks`. In all_to_all the chunk
from rank i to rank j is `i * n + j`, times a constant if the data is cut finer.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.errors import BadArgument, unknown, whole_number

Ints = NDArray[np.int64]


class Holders(enum.Enum):
    """Which ranks hold a chunk."""

    EVERYWHERE = "everywhere"
    ROOT = "root"
    OWNER = "owner"
    TARGET = "target"


@dataclass(frozen=True)
class Collective:
    """One contract: its name, and where chunks lie before and after."""

    name: str
    before: Holders
    after: Holders
    meaning: str

    @property
    def reduces(self) -> bool:
        """Whether contributions are added up, rather than one original copied."""
        return self.before is Holders.EVERYWHERE

    @property
    def rooted(self) -> bool:
        """Whether one rank is the root."""
        return Holders.ROOT in (self.before, self.after)

    @property
    def owned(self) -> bool:
        """Whether each chunk belongs to a rank, so that there are n shares of them."""
        return Holders.OWNER in (self.before, self.after)

    def chunk_multiple(self, n: int) -> int:
        """The number that must divide `num_chunks` for every rank to have its share."""
        if self.after is Holders.TARGET:
            return n * n
        return n if self.owned else 1

    def default_chunks(self, n: int) -> int:
        """How many chunks an algorithm has unless it gives another number."""
        return n if self is ALL_REDUCE else self.chunk_multiple(n)


BROADCAST = Collective(
    "broadcast", Holders.ROOT, Holders.EVERYWHERE, "the root's data, on every rank"
)
SCATTER = Collective(
    "scatter",
    Holders.ROOT,
    Holders.OWNER,
    "each rank gets its share of the root's data",
)
GATHER = Collective(
    "gather", Holders.OWNER, Holders.ROOT, "the root gets every rank's share"
)
REDUCE = Collective(
    "reduce", Holders.EVERYWHERE, Holders.ROOT, "the root gets the sum over all ranks"
)
ALL_GATHER = Collective(
    "all_gather",
    Holders.OWNER,
    Holders.EVERYWHERE,
    "every rank gets every rank's share",
)
REDUCE_SCATTER = Collective(
    "reduce_scatter",
    Holders.EVERYWHERE,
    Holders.OWNER,
    "each rank gets its share of the sum",
)
ALL_REDUCE = Collective(
    "all_reduce", Holders.EVERYWHERE, Holders.EVERYWHERE, "every rank gets the sum"
)
ALL_TO_ALL = Collective(
    "all_to_all",
    Holders.OWNER,
    Holders.TARGET,
    "every rank gets one share from each rank",
)
# Last, so that `between` finds all_gather first: a barrier is an all_gather of the
# messages that a rank has arrived, which have no bytes.
BARRIER = Collective(
    "barrier",
    Holders.OWNER,
    Holders.EVERYWHERE,
    "every rank knows that all have arrived",
)

COLLECTIVES: dict[str, Collective] = {
    c.name: c
    for c in (
        BROADCAST,
        SCATTER,
        GATHER,
        REDUCE,
        ALL_GATHER,
        REDUCE_SCATTER,
        ALL_REDUCE,
        ALL_TO_ALL,
        BARRIER,
    )
}
"""All collectives, by name."""
REDUCING = tuple(c.name for c in COLLECTIVES.values() if c.reduces)
"""The collectives that have an operation."""
ROOTED = tuple(c.name for c in COLLECTIVES.values() if c.rooted)
"""The collectives that have a root."""


def collective(name: str) -> Collective:
    """The collective called `name`, or BadArgument with the nearest names."""
    try:
        return COLLECTIVES[name]
    except KeyError:
        raise unknown("collective", name, COLLECTIVES) from None


def between(before: Holders, after: Holders) -> Collective:
    """The collective with these holders before and after."""
    for known in COLLECTIVES.values():
        if (known.before, known.after) == (before, after):
            return known
    raise BadArgument(
        f"no collective leads from {before.value} to {after.value}: "
        "these two schedules cannot be joined"
    )


@dataclass(frozen=True)
class Contract:
    """A collective made concrete: for n ranks, one root and so many chunks."""

    collective: Collective
    n: int
    root: int
    num_chunks: int

    def __post_init__(self) -> None:
        """Refuse worlds and chunk counts in which the contract has no meaning."""
        if not isinstance(self.collective, Collective):
            raise BadArgument(f"{self.collective!r}: expected a collective")
        for name in ("n", "root", "num_chunks"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.n < 1:
            raise BadArgument(f"n = {self.n}: a world has at least one rank")
        if not 0 <= self.root < self.n:
            raise BadArgument(f"root = {self.root}: ranks are 0..{self.n - 1}")
        multiple = self.collective.chunk_multiple(self.n)
        if self.num_chunks < 1 or self.num_chunks % multiple:
            raise BadArgument(
                f"{self.collective.name}(n={self.n}) with {self.num_chunks} chunks: "
                f"their number must be a positive multiple of {multiple}"
            )

    def owner(self, chunk: Ints) -> Ints:
        """The rank each chunk belongs to, or in all_to_all comes from."""
        return chunk * self.n // self.num_chunks

    def target(self, chunk: Ints) -> Ints:
        """The rank each chunk of an all_to_all is for."""
        return chunk // (self.num_chunks // self.n**2) % self.n

    def holder(self, place: Holders, chunk: Ints) -> Ints | None:
        """The one rank that `place` means for each chunk; None if it is all of them."""
        match place:
            case Holders.EVERYWHERE:
                return None
            case Holders.ROOT:
                return np.full_like(chunk, self.root)
            case Holders.OWNER:
                return self.owner(chunk)
            case Holders.TARGET:
                return self.target(chunk)

    @property
    def chunks_per_rank(self) -> int:
        """How many chunks make up one rank's whole buffer."""
        to_all = self.collective is ALL_TO_ALL
        return self.num_chunks // self.n if to_all else self.num_chunks

    def chunk_sizes(self, count: int | Sequence[int] | Ints) -> Ints:
        """The size of every chunk when the buffer has `count` elements.

        A sequence gives uneven shares: one count per rank where chunks are owned, one
        per (source, target) pair, row by row, in all_to_all. A share is cut into its
        chunks as evenly as whole elements allow, the larger ones first.
        """
        try:
            given = np.asarray(count)
        except ValueError as why:
            raise BadArgument(f"count: expected whole numbers: {why}") from why
        if (given.dtype.kind not in "iu" and given.size) or (given < 0).any():
            raise BadArgument(f"count {count}: expected whole numbers, none negative")
        if given.size and given.astype(np.float64).sum() >= 2.0**53:
            raise BadArgument(f"count {count}: more than any memory has")
        if self.collective is BARRIER:
            return np.zeros(self.num_chunks, dtype=np.int64)
        shares = self.collective.chunk_multiple(self.n)
        counts = given.astype(np.int64).ravel()
        if given.ndim == 0 and self.collective is ALL_TO_ALL:
            counts = np.tile(_even(int(given), self.n), self.n)
        elif given.ndim == 0:
            counts = _even(int(given), shares)
        if counts.size != shares:
            raise BadArgument(
                f"{self.collective.name}(n={self.n}): expected {shares} counts, one "
                f"per share, got {counts.size}"
            )
        pieces = self.num_chunks // shares
        return (
            counts[:, None] // pieces + (np.arange(pieces) < counts[:, None] % pieces)
        ).ravel()


def _even(total: int, parts: int) -> Ints:
    """`total` cut into `parts` whole numbers that differ by at most one."""
    return np.asarray(
        total // parts + (np.arange(parts) < total % parts), dtype=np.int64
    )
