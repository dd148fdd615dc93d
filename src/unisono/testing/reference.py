"""A schedule applied to given inputs: its steps executed one by one, in NumPy.

This is the definition that every executor is held to, bit for bit. It knows nothing of
windows, pieces or waiting: a dictionary of slots, and the rules of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import BadArgument
from unisono.reductions import reduce
from unisono.schedule import Schedule
from unisono.schedule.collective import Holders
from unisono.schedule.step import Step, Transfer

Array = NDArray[Any]
Slot = tuple[int, int]
"""A rank, and one of its chunks or temporaries."""


def reference(
    schedule: Schedule,
    inputs: Sequence[Array | None],
    counts: int | Sequence[int],
    *,
    op: str = "sum",
) -> list[Array | None]:
    """The outputs of all ranks, flat; None for a rank that gets nothing.

    `inputs` are flat arrays by rank, each with all that its rank holds before, and None
    for one that holds nothing. `counts` are those of `Contract.chunk_sizes`.
    """
    state = _State(schedule, op)
    sizes = schedule.contract.chunk_sizes(counts)
    for rank, given in enumerate(inputs):
        state.give(rank, given, sizes)
    for step in schedule:
        state.follow(step)
    return [state.result(rank) for rank in range(schedule.n)]


class _State:
    """The value of every slot, and how many ranks have contributed to it."""

    def __init__(self, schedule: Schedule, op: str) -> None:
        self.schedule = schedule
        self.op = op
        self.held: dict[Slot, Array] = {}
        self.contributors: dict[Slot, int] = {}

    def give(self, rank: int, given: Array | None, sizes: NDArray[np.int64]) -> None:
        """Split a rank's input into its chunks."""
        mine = self._chunks(self.schedule.collective.before, rank)
        wanted = int(sizes[mine].sum())
        if (0 if given is None else given.size) != wanted:
            raise BadArgument(
                f"reference: the input of rank {rank} has "
                f"{'nothing' if given is None else f'{given.size} elements'}, "
                f"expected {wanted}"
            )
        if given is None:
            return
        ends = np.cumsum(sizes[mine])
        for chunk, end in zip(mine.tolist(), ends.tolist(), strict=True):
            self.held[rank, chunk] = given[end - sizes[chunk] : end]
            self.contributors[rank, chunk] = 1

    def follow(self, step: Step) -> None:
        """Execute one step: all reads before all writes."""
        arriving: dict[Slot, list[Transfer]] = defaultdict(list)
        for t in step:
            arriving[t.dst, t.into].append(t)
        made = {slot: self._made(slot, some) for slot, some in arriving.items()}
        for slot, (value, contributors) in made.items():
            self.held[slot] = value
            self.contributors[slot] = contributors

    def _made(self, slot: Slot, transfers: Sequence[Transfer]) -> tuple[Array, int]:
        """The new value of a slot, with its own value if all transfers reduce."""
        operands = [(t.src, t.chunk) for t in transfers]
        if slot in self.held and all(t.reduces for t in transfers):
            operands.append(slot)
        operands.sort(key=lambda operand: operand[0])
        sources = [self.held[operand] for operand in operands]
        contributors = sum(self.contributors[operand] for operand in operands)
        if len(sources) == 1:
            return sources[0], contributors
        total = np.empty_like(sources[0])
        whole = contributors == self.schedule.n
        if self.op == "mean" and whole:  # divided once, when all have contributed
            reduce(total, sources, "mean", divisor=self.schedule.n, by="numpy")
        else:
            reduce(total, sources, "sum" if self.op == "mean" else self.op, by="numpy")
        return total, contributors

    def result(self, rank: int) -> Array | None:
        """A rank's output, in the order of its buffer."""
        mine = self._chunks(self.schedule.collective.after, rank)
        if not mine.size:
            return None
        return np.concatenate([self.held[rank, chunk] for chunk in mine.tolist()])

    def _chunks(self, place: Holders, rank: int) -> NDArray[np.int64]:
        """The chunks that a rank holds before or after, in the order of its buffer."""
        chunks = np.arange(self.schedule.num_chunks)
        holder = self.schedule.contract.holder(place, chunks)
        return chunks if holder is None else chunks[holder == rank]
