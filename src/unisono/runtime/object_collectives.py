"""Collectives of Python objects, and the exchange of uneven counts before them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import BadArgument, Corrupted, whole_number
from unisono.runtime.call.buffers import readable
from unisono.runtime.call.objects import MOST_BYTES, decode, encode
from unisono.runtime.collectives import Collectives
from unisono.units import format_bytes

_MOST_ROWS = 1 << 48
"""More than any machine holds: a larger number is invalid."""


def broadcast_object(
    comm: Collectives, thing: Any, root: int, allow_pickle: bool
) -> Any:
    """The root's object on every rank: its size first, then its bytes."""
    if comm.rank != root:
        size = int(comm.broadcast(np.zeros(1, np.int64), root=root)[0])
        _check_sizes(comm, "broadcast_object", [(root, size)])
        data = comm.broadcast(np.empty(size, np.uint8), root=root)
        return decode(data.data, allow_pickle=allow_pickle)
    data = _encoded(thing, allow_pickle)
    comm.broadcast(np.array([data.size], np.int64), root=root)
    comm.broadcast(data.copy(), root=root)
    return thing


def gather_objects(
    comm: Collectives, thing: Any, root: int | None, allow_pickle: bool
) -> list[Any] | None:
    """Every rank's object on the root, or on every rank if root is None."""
    data = _encoded(thing, allow_pickle)
    sizes = comm.all_gather(np.array([data.size], np.int64)).tolist()
    _check_sizes(comm, "gathering objects", enumerate(sizes))
    if root is None:
        joined = comm.all_gather(data, counts=sizes)
    else:
        joined = comm.gather(data, root=root, counts=sizes)
    if joined is None:
        return None
    ends = np.cumsum(sizes)
    parts = [joined[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [decode(part.data, allow_pickle=allow_pickle) for part in parts]


def all_gather_objects(comm: Collectives, thing: Any, allow_pickle: bool) -> list[Any]:
    """Every rank's object on every rank."""
    found = gather_objects(comm, thing, None, allow_pickle)
    assert found is not None
    return found


def scatter_objects(
    comm: Collectives, things: Sequence[Any] | None, root: int, allow_pickle: bool
) -> Any:
    """This rank's object of the root's: the sizes first, then the bytes."""
    n, sizes, joined = comm.world_size, np.zeros(comm.world_size, np.int64), None
    wrong = ""
    if comm.rank == root:
        if things is None or len(things) != n:
            given = "none" if things is None else str(len(things))
            wrong = f"scatter_objects: {given} objects given, expected {n}, one a rank"
        else:
            parts = [_encoded(thing, allow_pickle) for thing in things]
            sizes[:] = [part.size for part in parts]
            joined = np.concatenate(parts)
    comm.broadcast(sizes, root=root)  # a root with a mistake takes part, too
    if wrong:
        raise BadArgument(wrong)
    if not sizes.any():
        raise BadArgument("scatter_objects: the root gave a wrong number of objects")
    _check_sizes(comm, "scatter_objects", ((root, size) for size in sizes.tolist()))
    mine = np.empty(sizes[comm.rank], np.uint8)
    comm.scatter(joined, root=root, out=mine, counts=sizes.tolist())
    return decode(mine.data, allow_pickle=allow_pickle)


def _check_sizes(
    comm: Collectives, what: str, sizes: Iterable[tuple[int, int]]
) -> None:
    """Check sizes before allocating: all ranks see the same, and raise together."""
    for rank, size in sizes:
        if not 0 < size <= MOST_BYTES:
            raise Corrupted(
                f"{what}: {comm.peers[rank]} announces an object of {size} bytes; "
                f"expected 1 to {format_bytes(MOST_BYTES)}"
            )


def _encoded(thing: Any, allow_pickle: bool) -> NDArray[np.uint8]:
    return np.frombuffer(encode(thing, allow_pickle=allow_pickle), dtype=np.uint8)


def exchange_counts(
    comm: Collectives,
    x: Any,
    send: Sequence[int] | None,
    recv: Sequence[int] | None,
) -> list[list[int]]:
    """The rows that every rank sends to every other, exchanged by all_gather."""
    n = comm.world_size
    if send is None:
        rows = readable(x, "all_to_all").rows
        send = [rows // n] * n if rows % n == 0 else []
    mine = [whole_number("send_counts", c) for c in send]
    wrong = len(mine) != n or min(mine, default=0) < 0
    # A rank with an invalid argument still takes part, so that the others do not wait.
    counts = comm.all_gather(np.array([[-1] * n if wrong else mine], np.int64))
    if wrong:
        raise BadArgument(
            f"all_to_all: send_counts = {list(send)}: expected {n} numbers, "
            "none negative"
        )
    bad = [r for r in range(n) if not _are_valid(counts[r])]
    if bad:
        raise BadArgument(f"all_to_all: rank {bad[0]} gave invalid send_counts")
    arriving = counts[:, comm.rank].tolist()
    if recv is not None and list(recv) != arriving:
        raise BadArgument(
            f"all_to_all: recv_counts = {list(recv)}, but the others send {arriving}"
        )
    matrix: list[list[int]] = counts.tolist()
    return matrix


def _are_valid(counts: NDArray[np.int64]) -> bool:
    return bool(((counts >= 0) & (counts <= _MOST_ROWS)).all())
