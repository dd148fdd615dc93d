"""The native core lowers one rank's program; it is the one that `lower` makes."""

import numpy as np
import pytest
from lowering import FEW_WORLDS, WORLDS, schedules
from variants import VARIANTS, as_cases

from unisono import UnsupportedWorld, _native, schedule
from unisono.algorithms import library
from unisono.runtime.plan.programs import rank_program, tables
from unisono.schedule import copy_step, reduce_step
from unisono.schedule.collective import ALL_REDUCE, BARRIER
from unisono.schedule.lower import lower
from unisono.schedule.notices import joined_notices
from unisono.schedule.schedule import from_steps

PLAIN = list(library())
SPECIAL = [v for v in VARIANTS if v not in PLAIN]


def placements(n):
    """One host; as many as ranks; two in blocks; three in turn."""
    blocks = tuple(int(r >= (n + 1) // 2) for r in range(n))
    turns = tuple(r % 3 for r in range(n))
    return {(), tuple(range(n)), blocks, turns}


def check(made):
    for hosts in sorted(placements(made.n)):
        for exposed in range(4):
            shared = bool(exposed & 1), bool(exposed & 2)
            every = lower(
                made, input_shared=shared[0], output_shared=shared[1], hosts=hosts
            )
            for rank, program in enumerate(every.programs):
                found = rank_program(made, rank, exposed, hosts)
                expected = _native.program_tables(tables(program))
                assert _native.program_tables(found.program) == expected, (
                    f"{made.title}, rank {rank}, exposed {exposed}, hosts {hosts}"
                )
                assert found.places == every.places
                assert found.depth == every.depth
                assert found.longest == max(len(p.actions) for p in every.programs)
                to = sorted({m.to for m in program.messages})
                assert found.destinations == to


@pytest.mark.quick(worlds=[[1, 2, 3, 5]])
@pytest.mark.parametrize("worlds", [[1, 2, 3, 5], FEW_WORLDS, WORLDS], ids=str)
@pytest.mark.parametrize(("what", "name"), PLAIN)
def test_program_of_each_rank_is_the_one_made_in_python(what, name, worlds):
    for made in schedules(what, name, worlds):
        check(made)


@pytest.mark.quick(worlds=[[4]])
@pytest.mark.parametrize("worlds", [[4], [3, 6, 8, 12]], ids=str)
@pytest.mark.parametrize(("what", "name"), as_cases(SPECIAL))
def test_programs_of_algorithms_with_parameters(what, name, worlds):
    for made in schedules(what, name, worlds):
        check(made)


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_programs_of_barriers_of_many(n):
    for name in (name for what, name in PLAIN if what == BARRIER.name):
        try:
            check(joined_notices(schedule(BARRIER.name, name, n)))
        except UnsupportedWorld:
            continue


def test_random_schedules_give_the_same_programs():
    """Verified or not: whatever the steps, the storage and the order are the same."""
    for seed in range(40):
        random = np.random.default_rng(seed)
        n, chunks = int(random.integers(2, 6)), int(random.integers(1, 4))
        check(
            from_steps(
                ALL_REDUCE, n, random_steps(random, n, chunks), num_chunks=chunks
            )
        )


def random_steps(random, n, chunks):
    """Reductions, and copies of which no two go into one slot."""
    steps = []
    for _ in range(int(random.integers(1, 6))):
        count = int(random.integers(1, 2 * n))
        src, dst = random.integers(0, n, (2, count))
        chunk = random.integers(0, chunks, count)
        if random.random() < 0.5:
            _, first = np.unique(dst * chunks + chunk, return_index=True)
            src, dst, chunk = src[first], dst[first], chunk[first]
            make = copy_step
        else:
            make = reduce_step
        apart = src != dst
        if apart.any():
            steps.append(make(chunk[apart], src=src[apart], dst=dst[apart]))
    return steps


def test_schedule_that_adds_chunks_of_different_names_is_refused():
    steps = [
        copy_step([0], src=[0], dst=[1], into=[2]),  # a temporary
        reduce_step([2], src=[1], dst=[0], into=[1]),
    ]
    made = from_steps(ALL_REDUCE, 2, steps, num_chunks=2, num_temporaries=1)
    with pytest.raises(UnsupportedWorld) as python:
        lower(made)
    with pytest.raises(UnsupportedWorld) as native:
        rank_program(made, 0)
    assert str(native.value) == str(python.value)


def test_schedule_that_reads_what_is_not_there_is_refused():
    for steps in (
        [copy_step(np.array([0]), src=[0], dst=[5])],
        [copy_step(np.array([7]), src=[0], dst=[1])],
    ):
        with pytest.raises(ValueError, match="between no ranks or chunks"):
            rank_program(from_steps(ALL_REDUCE, 2, steps, num_chunks=2), 0)
