"""A call on arrays of a device in pieces that fit into memory of the host.

By its contract a collective has shares: one that all ranks have, one of each rank, or
one for each pair of ranks. Every share is cut into the same number of parts, and the
parts with one number are a call of the same collective, on smaller arrays. So the
pieces of every collective are made in one way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from unisono.runtime.call.arguments import Call, Position
from unisono.schedule.collective import (
    COLLECTIVES,
    Collective,
    Contract,
    Holders,
    Ints,
)

GRAIN = 64
"""Parts are cut at multiples of so many elements, except for the last."""
FEWEST = 8
"""Pieces of a call if each has half the room or more: while the first is copied from
the device, and the last to it, nothing is on the wire."""
ALIGNMENT = 256
"""Bytes at a multiple of which the output of a piece begins."""

Part = tuple[int, int]
"""Bytes of an array: where they begin, and how many they are."""


def least_pieces(nbytes: int, room: int) -> int:
    """How many pieces at least a call is cut into, of which each fits into the room."""
    return max(1, ceil(nbytes / room), min(FEWEST, 2 * nbytes // room))


class Piece(NamedTuple):
    """One piece: elements as `Call.counts`, and what it has of input and output."""

    counts: int | tuple[int, ...]
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]

    @property
    def input_bytes(self) -> int:
        """The bytes of the piece's input."""
        return sum(nbytes for _, nbytes in self.inputs)

    @property
    def output_bytes(self) -> int:
        """The bytes of the piece's output."""
        return sum(nbytes for _, nbytes in self.outputs)


class Pieces:
    """The pieces of one call, each of at most `room` bytes, on one rank.

    All ranks have as many. `in_place` is whether a piece's input and output are one
    array, which takes its bytes once.
    """

    def __init__(
        self,
        call: Call,
        at: Position,
        room: int,
        places: Sequence[int] | None = None,
    ) -> None:
        """Cut a call.

        `places` are the elements at which the shares of the output begin; they follow
        each other if it is not given.
        """
        collective = COLLECTIVES[call.collective]
        num_shares = collective.chunk_multiple(at.n)
        contract = Contract(collective, at.n, call.root, num_shares)
        self.in_place = num_shares == 1
        self._sizes = contract.chunk_sizes(call.counts)
        self._itemsize = call.dtype.itemsize
        shares = np.arange(num_shares)
        self._before = contract.holder(collective.before, shares)
        self._after = contract.holder(collective.after, shares)
        self._at = at
        rounded = 2 * at.n * GRAIN * self._itemsize  # the most bytes that it adds
        self._grain = GRAIN if rounded <= room // 4 else 1
        self.number = self._number_for(room)
        self._places = None if places is None else np.array(places, np.int64)
        self._reads = call.input is not None
        self._writes = call.output is not None
        if _keeps(collective, call, at):
            self._writes = False
        self._parts = self._cut(self.number)

    def _number_for(self, room: int) -> int:
        """Few pieces that fit on every rank, but enough of them to overlap."""
        n, both = self._at.n, not self.in_place
        held = _held(self._sizes, self._before, n)
        if both:
            held = held + _held(self._sizes, self._after, n)
        largest = int(held.max(initial=0)) * self._itemsize
        number = least_pieces(largest, room)
        while self._needed(number) > room and number < largest:
            number += max(1, number // 8)
        return number

    def _needed(self, number: int) -> int:
        """The most bytes that a piece has on any rank, if there are so many."""
        parts, n = self._cut(number), self._at.n
        held = _held(parts, self._before, n)
        if self.in_place:
            return int(held.max(initial=0)) * self._itemsize
        held = held + _held(parts, self._after, n)
        return int(held.max(initial=0)) * self._itemsize + ALIGNMENT

    def _cut(self, number: int) -> Ints:
        """The size of each share's parts, of which the last may be smaller."""
        parts = -(-self._sizes // number)
        return parts if number == 1 else -(-parts // self._grain) * self._grain

    @property
    def output_bytes(self) -> int:
        """The bytes of this rank's whole output."""
        held = _held(self._sizes, self._after, self._at.n)
        return int(held[self._at.rank]) * self._itemsize

    def __iter__(self) -> Iterator[Piece]:
        """All of them."""
        return (self.piece(k) for k in range(self.number))

    def piece(self, number: int) -> Piece:
        """One of them."""
        begin = np.minimum(number * self._parts, self._sizes)
        sizes = np.minimum(begin + self._parts, self._sizes) - begin
        counts = int(sizes[0]) if self.in_place else tuple(sizes.tolist())
        return Piece(
            counts,
            self._parts_of(self._before, begin, sizes) if self._reads else (),
            self._parts_of(self._after, begin, sizes, self._places)
            if self._writes
            else (),
        )

    def _parts_of(
        self,
        holder: Ints | None,
        begin: Ints,
        sizes: Ints,
        places: Ints | None = None,
    ) -> tuple[Part, ...]:
        """Where the parts are in this rank's array, which has its shares in order."""
        mine = slice(None) if holder is None else holder == self._at.rank
        shares = self._sizes[mine]
        firsts = np.cumsum(shares) - shares if places is None else places
        at = (firsts + begin[mine]) * self._itemsize
        nbytes = sizes[mine] * self._itemsize
        return tuple(zip(at.tolist(), nbytes.tolist(), strict=True))


def _held(sizes: Ints, holder: Ints | None, n: int) -> Ints:
    """The elements of each rank's array."""
    if holder is None:
        return np.full(n, sizes.sum())
    held = np.zeros(n, np.int64)
    np.add.at(held, holder, sizes)
    return held


def _keeps(collective: Collective, call: Call, at: Position) -> bool:
    """Whether the output has its values already: that of a root, in place."""
    return (
        collective.before is Holders.ROOT
        and collective.after is Holders.EVERYWHERE
        and at.rank == call.root
        and call.addresses[0] == call.addresses[1]
    )
