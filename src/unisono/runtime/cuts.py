"""How an array is divided among ranks, and which part each rank has.

A cut is the number of a dimension (each rank has a slice along it), REPLICATED (each
has the whole) or PARTIAL (each has a summand of the whole).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from unisono.errors import BadArgument, whole_number
from unisono.runtime.call.shard_sizes import shard_sizes

REPLICATED: Literal["replicated"] = "replicated"
PARTIAL: Literal["partial"] = "partial"
Ints = NDArray[np.int64]
Cut = int | Literal["replicated", "partial"]
_EXPECTED = (
    "expected the number of a dimension, None (or 'replicated') for the whole on every "
    "rank, or 'partial' for summands; or torch's Shard(dim), Replicate(), Partial()"
)


def as_cut(name: str, given: Any, num_dims: int) -> Cut:
    """The cut that is meant; torch's placements are known by their methods."""
    if given is None or _says(given, "is_replicate"):
        return REPLICATED
    if _says(given, "is_partial"):
        if given.reduce_op != "sum":
            raise BadArgument(
                f"redistribute: {name} = {given!r}: give 'partial', and the reduction "
                f"as op={given.reduce_op!r}"
            )
        return PARTIAL
    if isinstance(given, str) and given in (REPLICATED, PARTIAL):
        return PARTIAL if given == PARTIAL else REPLICATED
    if not is_dimension(given):
        raise BadArgument(f"redistribute: {name} = {given!r}: {_EXPECTED}")
    dim = given.dim if _says(given, "is_shard") else given
    dim = whole_number(f"redistribute: {name}", dim)
    if not num_dims:
        raise BadArgument(
            f"redistribute: {name} = {dim}: a single number has no dimension to cut; "
            "reshape it to (1,)"
        )
    if not -num_dims <= dim < num_dims:
        raise BadArgument(
            f"redistribute: {name} = {dim}: the array has {num_dims} dimensions; a cut "
            f"is along one of {-num_dims}..{num_dims - 1}"
        )
    return dim % num_dims


def is_partial(given: Any) -> bool:
    """Whether it means summands."""
    return _says(given, "is_partial") or (isinstance(given, str) and given == PARTIAL)


def is_dimension(given: Any) -> bool:
    """Whether it means a cut along a dimension, be that a possible one or not."""
    return _says(given, "is_shard") or hasattr(given, "__index__")


def _says(given: Any, method: str) -> bool:
    """Whether it is a placement of torch's kind that answers yes to this question."""
    return callable(asked := getattr(given, method, None)) and bool(asked())


@dataclass(frozen=True)
class Division:
    """An array of this whole shape in parts along one dimension, one for each rank."""

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]

    @classmethod
    def by_rule(cls, shape: tuple[int, ...], dim: int, n: int) -> Division:
        """The library's division: the first ranks have one more than the others."""
        return cls(shape, dim, tuple(shard_sizes(shape[dim], n)))

    @property
    def elements(self) -> list[int]:
        """The number of elements of each part."""
        row = prod(_with(self.shape, self.dim, 1))
        return [size * row for size in self.sizes]

    def part(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's part."""
        return _with(self.shape, self.dim, self.sizes[rank])

    def index(self, rank: int) -> tuple[slice, ...]:
        """What a rank's part is of the whole."""
        begin = sum(self.sizes[:rank])
        return along(self.dim, begin, begin + self.sizes[rank])

    def shared_with(self, other: Division) -> tuple[Ints, Ints, Ints]:
        """What a part here (row) and a part of the other (column) have in common.

        Its length along this dimension, its length along the other's, its elements.
        """
        here, there = np.array(self.sizes, np.int64), np.array(other.sizes, np.int64)
        if self.dim != other.dim:
            rest = _with(_with(self.shape, self.dim, 1), other.dim, 1)
            both = here.size, there.size
            lengths = np.broadcast_to(here[:, None], both)
            return lengths, np.broadcast_to(there, both), lengths * there * prod(rest)
        ends, stops = np.cumsum(here), np.cumsum(there)
        first = np.maximum.outer(ends - here, stops - there)
        common = np.maximum(np.minimum.outer(ends, stops) - first, 0)
        return common, common, common * prod(_with(self.shape, self.dim, 1))


def along(dim: int, begin: int, end: int) -> tuple[slice, ...]:
    """The index of a slice along one dimension."""
    return (*(slice(None),) * dim, slice(begin, end))


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
