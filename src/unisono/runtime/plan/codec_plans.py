"""Plans of calls with a codec: the layout of codes in windows, and bytes sent.

Chunks and pieces end at multiples of the codec's block, so that their codes together
have as many bytes as the code of the whole; only the last block of a rank's part may be
short.
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
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.plan.codec_options import (
    as_coding,
    choose_coded,
    refuse_large_error,
    refuse_unsupported,
)
from unisono.runtime.plan.plans import (
    LINE,
    ONE_AT_A_TIME,
    ZERO_COPY_PIECE,
    CallKind,
    coded_program,
    common_fields,
    lowered,
    verified,
)
from unisono.runtime.plan.predict import CostModel
from unisono.schedule.coding import Scope
from unisono.schedule.collective import Contract, Ints
from unisono.schedule.counts import sends_per_chunk
from unisono.schedule.program import Lowered

CHANCE_BLOCK = 32
"""Pieces end at multiples of this many elements, even for codecs without blocks."""

ROOM = 4 << 20
"""Bytes for the codes of a piece where they need no window."""


def coded_plan(
    call: Call,
    reduction: Reduction,
    how: CallOptions,
    at: Position,
    spec: Callable[[str], Spec],
    *,
    window: int,
    hosts: tuple[int, ...] = (),
    model: CostModel | None = None,
) -> tuple[_native.Plan, Sequence[int]]:
    """The plan of one rank for a call with a codec, and the ranks that it sends to.

    `spec` reads an algorithm's name. BadArgument if the codec does not support the
    call, or the error would be too large.
    """
    coding = as_coding(how.codec, how.coded)
    refuse_unsupported(call.collective, coding, call.dtype, reduction)
    if how.reproducible:
        raise BadArgument(
            f"{call.collective}: reproducible=True guarantees bits that depend only on "
            "the inputs, but with a codec they depend on its blocks; leave out one"
        )
    with ONE_AT_A_TIME:  # of ranks that are threads only one verifies a schedule
        kind = coded_kind(call, reduction, how, coding, at.n, hosts, spec, model)
        return make_coded_plan(kind, at.n, at.rank, window, hosts)


def coded_kind(
    call: Call,
    reduction: Reduction,
    how: CallOptions,
    coding: Coding,
    n: int,
    hosts: tuple[int, ...],
    spec: Callable[[str], Spec] = read,
    model: CostModel | None = None,
) -> CallKind:
    """What the ranks must agree on, with an algorithm whose error is small enough."""
    choice = choose_coded(
        *(call.collective, call.total * call.dtype.itemsize, n, coding),
        itemsize=call.dtype.itemsize,
        named=how.algorithm,
        hosts=hosts,
        model=model,
    )
    by = spec(choice.algorithm)
    refuse_large_error(
        call.collective, by, n, call.root, coding, hosts, how.error_bound
    )
    return CallKind.of(call, reduction, by, how.label, coding)


def make_coded_plan(
    kind: CallKind, n: int, rank: int, window: int, hosts: tuple[int, ...] = ()
) -> tuple[_native.Plan, Sequence[int]]:
    """The plan of one rank for one kind of call, and the ranks that it sends to."""
    coding = kind.coding
    assert coding is not None
    codec = coding.codec
    key = kind.collective, kind.algorithm, n, kind.root
    sizes = chunk_sizes(verified(*key).contract, kind.counts, codec.block)
    itemsize = kind.dtype.itemsize
    made = lowered(*key, 0, hosts, coding.scope)
    largest = int(sizes.max(initial=0))
    # If all readers are on other hosts, codes need no window.
    apart = bool(hosts) and len(set(hosts)) == n and not made.places
    space = max(window, ROOM) if apart else window
    piece, at, stride = _layout(made, codec, space, itemsize, largest)
    room = made.codes * stride if apart else 0
    plan = _native.Plan(
        programs=[coded_program(*key, hosts, coding.scope, rank)],
        piece=[piece],
        pieces=[max(1, -(-largest // piece))],
        sent_bytes=int(sent_bytes(kind, n, hosts)[rank]),
        in_header=False,
        may_expose=False,
        may_cross_memory=False,
        always_exposed=0 if hosts else -1,
        streams=False,
        coding=(codec.name, codec.block, at, stride, codec.stochastic, room),
        **common_fields(kind, n, rank, sizes),
    )
    return plan, sorted({m.to for m in made.programs[rank].messages})


def chunk_sizes(contract: Contract, counts: int | Sequence[int], block: int) -> Ints:
    """The size of every chunk; each rank's part is cut at multiples of the block."""
    whole = contract.chunk_sizes(counts)
    num_parts = contract.collective.chunk_multiple(contract.n)
    count = whole.reshape(num_parts, -1).sum(axis=1, keepdims=True)
    pieces = whole.size // num_parts
    blocks = -(-count // block)
    even = blocks // pieces + (np.arange(pieces) < blocks % pieces)
    ends = np.minimum(np.cumsum(even * block, axis=1), count)
    return np.asarray(np.diff(ends, axis=1, prepend=0).ravel(), dtype=np.int64)


def _layout(
    made: Lowered, codec: Codec, window: int, itemsize: int, largest: int
) -> tuple[int, int, int]:
    """Elements of a chunk that use a window at a time, and the layout of its codes.

    The layout is the offset of the first code and the distance between codes, in bytes.
    """
    grain = max(codec.block, CHANCE_BLOCK)
    if not made.places + made.codes:
        return max(grain, ZERO_COPY_PIECE // itemsize // grain * grain), 0, 0

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
    # Equal pieces: a short last one would mostly wait.
    pieces = max(1, -(-largest // piece))
    piece = min(piece, max(grain, -(-largest // pieces // grain) * grain))
    total, at, stride = needed(piece)
    assert total <= window
    return piece, at, stride


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def sent_bytes(kind: CallKind, n: int, hosts: tuple[int, ...]) -> NDArray[np.int64]:
    """Bytes that every rank sends: codes, and values where only hosts use codes."""
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
