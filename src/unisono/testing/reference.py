"""What a schedule makes of given inputs: the steps carried out one by one, in NumPy.

This is the definition that every executor is held to, bit for bit. It knows nothing of
windows, pieces or waiting: a dictionary of chunks, and the rules of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.runtime.kernels import reduce as reduce_arrays
from unisono.schedule import Schedule
from unisono.schedule.collective import Place

Array = NDArray[Any]


def reference(
    schedule: Schedule,
    inputs: Sequence[Array | None],
    counts: int | Sequence[int],
    *,
    op: str = "sum",
) -> list[Array | None]:
    """The outputs of all ranks, flat; None where a rank has none.

    `inputs` are flat arrays by rank, each with what that rank holds before.
    """
    contract = schedule.contract
    sizes = contract.chunk_sizes(counts)
    chunks = np.arange(schedule.num_chunks)
    held: dict[tuple[int, int], Array] = {}
    whole: dict[tuple[int, int], int] = {}
    for rank, given in enumerate(inputs):
        mine = _of(schedule, schedule.collective.before, rank)
        if given is None or not mine.size:
            continue
        parts = np.split(given, np.cumsum(sizes[mine])[:-1])
        for chunk, part in zip(mine.tolist(), parts, strict=True):
            held[rank, chunk] = part
            whole[rank, chunk] = 1
    for step in schedule:
        arriving = defaultdict(list)
        for t in step:
            arriving[t.dst, t.into].append(t)
        held |= _stepped(schedule.n, held, whole, arriving, op)
    del chunks
    return [_result(schedule, held, rank, inputs) for rank in range(schedule.n)]


def _stepped(
    n: int,
    held: dict[tuple[int, int], Array],
    whole: dict[tuple[int, int], int],
    arriving: dict[tuple[int, int], list[Any]],
    op: str,
) -> dict[tuple[int, int], Array]:
    made: dict[tuple[int, int], Array] = {}
    counts: dict[tuple[int, int], int] = {}
    for (rank, slot), transfers in arriving.items():
        operands = [(t.src, (t.src, t.chunk)) for t in transfers]
        if (rank, slot) in held and all(t.reduces for t in transfers):
            operands.append((rank, (rank, slot)))
        operands.sort(key=lambda pair: pair[0])
        sources = [held[key] for _, key in operands]
        counts[rank, slot] = sum(whole[key] for _, key in operands)
        if len(sources) == 1:
            made[rank, slot] = sources[0]
            continue
        total = np.empty_like(sources[0])
        reduce_arrays(total, sources, "sum" if op == "mean" else op)
        if op == "mean" and counts[rank, slot] == n:
            total = _mean(sources, n)
        made[rank, slot] = total
    whole |= counts
    return made


def _mean(sources: Sequence[Array], n: int) -> Array:
    """The sum of all contributions, divided once."""
    from unisono.dtypes import dtype_of
    from unisono.runtime.kernels import _in_numpy

    with np.errstate(all="ignore"):
        result = _in_numpy(dtype_of(sources[0]), sources, "sum", n)
    return result.astype(sources[0].dtype)


def _of(schedule: Schedule, place: Place, rank: int) -> NDArray[np.int64]:
    """The chunks that a rank holds in a place, in the order they lie in its buffer."""
    chunks = np.arange(schedule.num_chunks)
    holder = schedule.contract.holder(place, chunks)
    return chunks if holder is None else chunks[holder == rank]


def _result(
    schedule: Schedule,
    held: dict[tuple[int, int], Array],
    rank: int,
    inputs: Sequence[Array | None],
) -> Array | None:
    mine = _of(schedule, schedule.collective.after, rank)
    if not mine.size:
        return None
    return np.concatenate([held[rank, chunk] for chunk in mine.tolist()])
