"""Calls for `program_player.play`, and what should come of them."""

from itertools import product
from random import Random

import numpy as np

from program_player import Call
from unisono import Schedule, UnsupportedWorld, schedule
from unisono.dtypes import numpy_dtype
from unisono.reductions import reduce
from unisono.schedule.collective import BARRIER, Holders
from unisono.schedule.lower import lower
from unisono.schedule.program import Lowered
from unisono.testing import reference

WORLDS = [*range(1, 10), 13, 16]
FEW_WORLDS = [1, 2, 3, 5, 6]
MODES = list(product([False, True], repeat=2))
PIECES = 3


def schedules(what: str, name: str, worlds=WORLDS) -> list[Schedule]:
    """For every world that has it; rooted ones in turn at the first and last rank."""
    found = []
    for n in worlds:
        try:
            made = schedule(what, name, n)
        except UnsupportedWorld:
            continue
        roots = {0, n - 1} if made.collective.rooted and n <= 5 else {n // 2}
        found += [made.rooted_at(r) for r in sorted(roots)]
    return found


def holders(made: Schedule, place: Holders) -> list[tuple[int, int]]:
    """All (rank, chunk) that a place means."""
    chunks = np.arange(made.num_chunks)
    holder = made.contract.holder(place, chunks)
    if holder is None:
        return [(r, c) for r in range(made.n) for c in chunks.tolist()]
    return list(zip(holder.tolist(), chunks.tolist(), strict=True))


def inputs_of(made: Schedule, seed: int, lanes: int = 0, dtype="float64"):
    """Random numbers for every piece of what ranks hold before."""
    random = np.random.default_rng(seed)
    shape = (PIECES, lanes) if lanes else (PIECES,)
    slots = holders(made, made.collective.before)
    every = random.standard_normal((len(slots), *shape))
    values = every.astype(numpy_dtype(dtype)) if lanes else every.tolist()
    return {slot: list(some) for slot, some in zip(slots, values, strict=True)}


def call(
    made: Schedule, mode, seed: int, lowered: Lowered | None = None, hosts=(), **more
):
    """One call of a schedule, with each rank's buffers apart or in place by chance."""
    input_shared, output_shared = mode
    if lowered is None:
        lowered = lower(
            made, input_shared=input_shared, output_shared=output_shared, hosts=hosts
        )
    random = Random(seed)
    some = frozenset(r for r in range(made.n) if random.random() < 0.5)
    in_place = random.choice([frozenset(), frozenset(range(made.n)), some])
    inputs = inputs_of(made, seed, **more)
    return Call(lowered, inputs, PIECES, in_place, input_shared, output_shared, hosts)


def mean(n: int):
    """Adds from the left; where that completes the sum, it is divided."""

    def combine(values, completes):
        total = values[0]
        for value in values[1:]:
            total += value
        return total / n if completes else total

    return combine


def rounded_sum(values, completes):
    """Adds small floats as the engine does: rounded once for every pass."""
    return reduce(np.empty_like(values[0]), values, by="numpy")


def expected(made: Schedule, inputs):
    """What the schedule itself makes of the inputs: means of Python floats."""
    if made.collective is BARRIER:  # its words take no bytes, but each has an origin
        after = holders(made, Holders.EVERYWHERE)
        return {(r, c): inputs[c * made.n // made.num_chunks, c] for r, c in after}
    given = [[] for _ in range(made.n)]
    for (rank, _), values in sorted(inputs.items()):
        given[rank] += values
    count = made.contract.chunks_per_rank * PIECES
    arrays = [np.array(some) if some else None for some in given]
    results = reference(made, arrays, count, op="mean")
    after = sorted(holders(made, made.collective.after))
    found = {}
    for rank, result in enumerate(results):
        mine = [slot for slot in after if slot[0] == rank]
        parts = [] if result is None else result.reshape(len(mine), PIECES).tolist()
        found |= dict(zip(mine, parts, strict=True))
    return found
