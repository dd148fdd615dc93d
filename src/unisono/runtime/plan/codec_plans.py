"""Plans of calls with a codec: where codes lie, and how many bytes they take.

Chunks and pieces end where blocks end, so that the codes of all of them together have
as many bytes as the code of the whole; a block is short only where a share itself ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from unisono import _native
from unisono.algorithms import Spec, read
from unisono.codecs import Codec
from unisono.errors import BadArgument
from unisono.runtime.call.arguments import Call, Position
from unisono.runtime.call.coding import Coding
from unisono.runtime.call.options import How
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.plan.codec_options import (
    as_coding,
    choose_coded,
    refuse_misfits,
    refuse_too_wrong,
)
from unisono.runtime.plan.plans import (
    LENT_PIECE,
    LINE,
    ONE_AT_A_TIME,
    Kind,
    lowered,
    native_program,
    verified,
    what_is_called,
)
from unisono.schedule.coding import Scope
from unisono.schedule.collective import Contract, Ints
from unisono.schedule.counts import sends_per_chunk
from unisono.schedule.program import Lowered

CHANCE_BLOCK = 32
"""Pieces end at multiples of so many elements, even where there are no blocks."""

ROOM = 4 << 20
"""Bytes for the codes of a piece where they need not lie in a window."""


def coded_plan(
    call: Call,
    reduction: Reduction,
    how: How,
    at: Position,
    spec: Callable[[str], Spec],
    *,
    window: int,
    hosts: tuple[int, ...] = (),
) -> tuple[_native.Plan, list[int]]:
    """The plan of one rank for a call with a codec, and which ranks it sends to.

    `spec` tells what an algorithm's name means. BadArgument if the plan cannot be had,
    or not with so small an error.
    """
    coding = as_coding(how.codec, how.coded)
    refuse_misfits(call.collective, coding, call.dtype, reduction)
    if how.reproducible:
        raise BadArgument(
            f"{call.collective}: reproducible=True promises bits that depend on "
            "nothing but the inputs, those of codes depend on blocks; leave out one"
        )
    with ONE_AT_A_TIME:  # ranks that are threads need not all prove the same
        kind = coded_kind(call, reduction, how, coding, at.n, hosts, spec)
        return make_coded_plan(kind, at.n, at.rank, window, hosts)


def coded_kind(
    call: Call,
    reduction: Reduction,
    how: How,
    coding: Coding,
    n: int,
    hosts: tuple[int, ...],
    spec: Callable[[str], Spec] = read,
) -> Kind:
    """What the ranks must agree on, the algorithm chosen and found good enough."""
    choice = choose_coded(
        *(call.collective, call.total * call.dtype.itemsize, n, coding),
        itemsize=call.dtype.itemsize,
        named=how.algorithm,
        hosts=hosts,
    )
    by = spec(choice.algorithm)
    refuse_too_wrong(call.collective, by, n, call.root, coding, hosts, how.error_bound)
    what = call.collective, call.dtype, reduction, call.root, call.counts
    return Kind(*what, by, how.label, coding, call.shape)


def make_coded_plan(
    kind: Kind, n: int, rank: int, window: int, hosts: tuple[int, ...] = ()
) -> tuple[_native.Plan, list[int]]:
    """The plan of one rank for one kind of call, and which ranks it sends to."""
    coding = kind.coding
    assert coding is not None
    codec = coding.codec
    key = kind.collective, kind.algorithm, n, kind.root
    sizes = chunk_sizes(verified(*key).contract, kind.counts, codec.block)
    itemsize = kind.dtype.itemsize
    made = lowered(*key, 0, hosts, coding.scope)
    largest = int(sizes.max(initial=0))
    # Where all readers are on other hosts, codes need not lie in a window.
    apart = bool(hosts) and len(set(hosts)) == n and not made.places
    space = max(window, ROOM) if apart else window
    piece, at, stride = _layout(made, codec, space, itemsize, largest)
    room = made.codes * stride if apart else 0
    plan = _native.Plan(
        programs=[native_program(*key, 0, hosts, coding.scope, rank)],
        piece=[piece],
        pieces=[max(1, -(-largest // piece))],
        sent_bytes=int(sent_bytes(kind, n, hosts)[rank]),
        in_header=False,
        may_expose=False,
        may_cross_memory=False,
        always_exposed=0 if hosts else -1,
        streams=False,
        coding=(codec.name, codec.block, at, stride, codec.stochastic, room),
        **what_is_called(kind, n, rank, sizes),
    )
    return plan, sorted({m.to for m in made.programs[rank].messages})


def chunk_sizes(contract: Contract, counts: int | Sequence[int], block: int) -> Ints:
    """The size of every chunk; shares are cut into them at multiples of the block."""
    whole = contract.chunk_sizes(counts)
    shares = contract.collective.chunk_multiple(contract.n)
    count = whole.reshape(shares, -1).sum(axis=1, keepdims=True)
    pieces = whole.size // shares
    blocks = -(-count // block)
    even = blocks // pieces + (np.arange(pieces) < blocks % pieces)
    ends = np.minimum(np.cumsum(even * block, axis=1), count)
    return np.asarray(np.diff(ends, axis=1, prepend=0).ravel(), dtype=np.int64)


def _layout(
    made: Lowered, codec: Codec, window: int, itemsize: int, largest: int
) -> tuple[int, int, int]:
    """How many elements of a chunk go through a window at a time, and where codes lie.

    These are the bytes from its beginning to the first, and from each to the next.
    """
    grain = max(codec.block, CHANCE_BLOCK)
    if not made.places + made.codes:
        return max(grain, LENT_PIECE // itemsize // grain * grain), 0, 0

    def needed(piece: int) -> tuple[int, int, int]:
        at = _lines(made.places * piece * itemsize)
        stride = _lines(codec.nbytes(piece))
        return at + made.codes * stride, at, stride

    per_grain = made.places * grain * itemsize + made.codes * codec.nbytes(grain)
    piece = (window - (made.codes + 1) * LINE) // per_grain * grain
    if piece < grain:
        raise BadArgument(
            f"this schedule keeps {made.places} values and {made.codes} codes in "
            f"flight, too many for blocks of {codec.block} in a window of {window} "
            "bytes: choose another algorithm, or a smaller block"
        )
    # Equal pieces: a short last one would be all waiting and no work.
    pieces = max(1, -(-largest // piece))
    piece = min(piece, max(grain, -(-largest // pieces // grain) * grain))
    total, at, stride = needed(piece)
    assert total <= window
    return piece, at, stride


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def sent_bytes(kind: Kind, n: int, hosts: tuple[int, ...]) -> NDArray[np.int64]:
    """What every rank sends to others: codes, and values where only hosts get codes."""
    coding = kind.coding
    assert coding is not None
    key = kind.collective, kind.algorithm, n, kind.root
    sizes = chunk_sizes(verified(*key).contract, kind.counts, coding.codec.block)
    codes = np.array([coding.codec.nbytes(int(s)) for s in sizes], dtype=np.int64)
    near, far = _sends(*key, hosts)
    if coding.scope is Scope.ALL:
        return np.asarray((near + far) @ codes)
    return np.asarray(near @ (sizes * kind.dtype.itemsize) + far @ codes)


@lru_cache(maxsize=64)
def _sends(
    collective: str, algorithm: Spec, n: int, root: int, hosts: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many times each rank sends each chunk, within its host and to others."""
    schedule = verified(collective, algorithm, n, root)
    host = np.array(hosts or [0] * n)
    times = sends_per_chunk(
        schedule, 2 * n, lambda src, dst: src + n * (host[src] != host[dst])
    )
    return times[:n], times[n:]
