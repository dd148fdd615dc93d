"""Plans for devices: the same programs, laid out for the interpreter kernel.

Every block of the kernel works on its own slice of a piece, so a piece is as large as
the window allows; where a program uses no window, a chunk is one piece.
"""

from __future__ import annotations

from unisono import _native
from unisono.errors import BadArgument
from unisono.runtime.plan.plans import (
    ONE_AT_A_TIME,
    CallKind,
    common_fields,
    rank_program,
    sends,
    verified,
)

GRAIN = 256
"""Bytes: places of a window begin at multiples of this, so vectors are aligned."""
MODES = range(4)
"""By what all ranks expose: bit 0 the inputs, bit 1 the outputs."""


def device_plan(kind: CallKind, n: int, rank: int, *, window: int) -> _native.Plan:
    """The plan of one rank; `window` is the size of half a window, in bytes."""
    with ONE_AT_A_TIME:
        return _device_plan(kind, n, rank, window)


def _device_plan(kind: CallKind, n: int, rank: int, window: int) -> _native.Plan:
    key = kind.collective, kind.algorithm, n, kind.root
    sizes = verified(*key).contract.chunk_sizes(kind.counts)
    itemsize = kind.dtype.itemsize
    largest = int(sizes.max(initial=0))
    # A rank that does not expose its input may publish it before it knows whether
    # outputs are exposed: so the pieces of modes 0 and 2 are the same.
    made = [rank_program(*key, mode, (), rank) for mode in MODES]
    places = [made[mode if mode & 1 else 0].places for mode in MODES]
    piece = [_piece(window, p, itemsize, largest) for p in places]
    return _native.Plan(
        programs=[one.program for one in made],
        piece=piece,
        pieces=[max(1, -(-largest // p)) for p in piece],
        sent_bytes=int(sends(*key, rank) @ sizes) * itemsize,
        in_header=False,
        may_expose=True,
        may_cross_memory=False,
        always_exposed=-1,
        streams=False,
        coding=None,
        places=places[0],
        **common_fields(kind, n, rank, sizes),
    )


def _piece(window: int, places: int, itemsize: int, largest: int) -> int:
    """Elements of a chunk that are processed at a time, in whole grains."""
    per_grain = GRAIN // itemsize
    whole = max(1, -(-largest // per_grain)) * per_grain
    if places == 0:
        return whole
    grains = window // (places * GRAIN)
    if grains == 0:
        raise BadArgument(
            f"this schedule keeps {places} values in flight, too many for a device "
            f"window of {window} bytes: choose another algorithm"
        )
    pieces = -(-whole // (grains * per_grain))
    even = -(-whole // pieces)  # a short last piece would mostly wait
    return -(-even // per_grain) * per_grain
