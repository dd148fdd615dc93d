"""A barrier with one notice from rank to rank, instead of one for each rank.

As a schedule a barrier is an all_gather of n notices without bytes, which proves that
every rank hears of every other. Lowered as it is, it has n(n-1) transfers. But a rank
that passes on what it knows need not name it: one empty message says that all it has
heard of have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.schedule.collective import ALL_REDUCE
from unisono.schedule.counts import distinct
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step, reduce_step


def joined_notices(barrier: Schedule) -> Schedule:
    """The same messages between the same ranks in each step, one from rank to rank.

    A rank sends what it knew before the step, all in one, so every rank knows at least
    as much as by `barrier`. It is for lowering alone: as a sum it would count ranks
    several times.
    """

    def steps() -> Iterator[Step]:
        for step in barrier:
            src, dst, *_ = step.flat()
            apart = src != dst
            pairs = distinct(src[apart] * barrier.n + dst[apart])
            yield reduce_step(0, src=pairs // barrier.n, dst=pairs % barrier.n)

    return barrier.but(
        collective=ALL_REDUCE, num_chunks=1, num_temporaries=0, make=steps
    )
