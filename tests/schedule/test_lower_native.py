"""The native core lowers one rank's program; it is the one that `lower` makes."""

import numpy as np
import pytest
from lowering import FEW_WORLDS, WORLDS, holders, schedules
from variants import VARIANTS, as_cases

from unisono import BadArgument, ScheduleError, UnsupportedWorld, _native, schedule
from unisono.algorithms import library
from unisono.runtime.plan import programs
from unisono.runtime.plan.programs import rank_program, tables
from unisono.schedule import copy_step, reduce_step
from unisono.schedule.collective import ALL_REDUCE, BARRIER, COLLECTIVES
from unisono.schedule.lower import lower
from unisono.schedule.notices import joined_notices
from unisono.schedule.schedule import from_steps
from unisono.schedule.step import Step

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
                assert found.canonical == every.canonical
                to = sorted({m.to for m in program.messages})
                assert found.destinations == tuple(to)


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


def test_program_of_a_joined_ring_barrier_of_64_hosts():
    ring = schedule("all_gather", "ring", 64).but(collective=BARRIER)
    made, hosts = joined_notices(ring), tuple(range(64))
    every = lower(made, hosts=hosts).programs
    for rank in (0, 31, 63):
        found = rank_program(made, rank, 0, hosts).program
        expected = _native.program_tables(tables(every[rank]))
        assert _native.program_tables(found) == expected


def test_contributions_are_counted_beyond_32_bits():
    """2^32 + 3 of 3 ranks: that is no sum of all ranks."""
    both = reduce_step([0, 0], src=[0, 1], dst=[1, 0])
    one = reduce_step([0], src=[2], dst=[0])
    check(from_steps(ALL_REDUCE, 3, [both] * 32 + [one] * 3, num_chunks=1))


HELD = [c for c in COLLECTIVES.values() if c is not BARRIER]


@pytest.mark.parametrize("collective", HELD, ids=lambda c: c.name)
def test_random_schedules_give_the_same_programs(collective):
    """Verified or not: whatever the steps, the storage and the order are the same."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        n, temporaries = int(random.integers(2, 5)), int(random.integers(0, 3))
        chunks = collective.chunk_multiple(n) * int(random.integers(1, 3))
        root = int(random.integers(n)) if collective.rooted else 0
        empty = from_steps(
            collective, n, [], num_chunks=chunks, num_temporaries=temporaries, root=root
        )
        steps = random_steps(random, empty)
        check(empty.but(make=lambda steps=steps: steps))


def random_steps(random, made):
    """Steps of copies and reductions, also into temporaries and out of them."""
    names = {slot: slot[1] for slot in holders(made, made.collective.before)}
    steps = []
    for _ in range(int(random.integers(1, 6))):
        there, arriving, rows = list(names), {}, []
        for _ in range(int(random.integers(1, 3 * made.n))):
            src, chunk = there[random.integers(len(there))]
            name, dst = names[src, chunk], int(random.integers(made.n))
            others = range(made.num_chunks, made.num_slots)
            into = int(random.choice([name, name, *others]))
            reduces = bool(random.random() < 0.5)
            slot = dst, into
            other_name = names.get(slot, name) != name
            copied, expected = arriving.get(slot, (False, name))
            if (
                (src, chunk) == slot
                or expected != name
                or (reduces and other_name)
                or (copied and not reduces)
            ):
                continue
            arriving[slot] = copied or not reduces, name
            rows.append((src, dst, chunk, into, reduces))
        if rows:
            *columns, reduces = (np.array(column) for column in zip(*rows, strict=True))
            steps.append(Step(*columns, reduces=reduces))
        names |= {slot: name for slot, (_, name) in arriving.items()}
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
    """It is proven all the same: no result depends on that temporary."""
    steps = [
        reduce_step([0, 0], src=[0, 1], dst=[1, 0]),
        copy_step([0, 2], src=[1, 0], dst=[0, 1], into=[1, 1]),
    ]
    made = from_steps(ALL_REDUCE, 2, steps, num_chunks=1, num_temporaries=2)
    made.verify()
    for make in (lambda: lower(made), lambda: rank_program(made, 0)):
        with pytest.raises(ScheduleError, match="step 2: chunk 2 as 1: 0 → 1") as found:
            make()
        assert "rank 0 has no chunk 2 yet" in str(found.value)
        assert (found.value.step, found.value.rank, found.value.chunk) == (2, 0, 2)


def test_transfers_between_no_ranks_or_chunks_are_refused():
    for steps in (
        [copy_step(np.array([0]), src=[0], dst=[5])],
        [copy_step(np.array([0]), src=[-1], dst=[1])],
        [copy_step(np.array([7]), src=[0], dst=[1])],
        [copy_step(np.array([0]), src=[0], dst=[1], into=[7])],
    ):
        with pytest.raises(ValueError, match="between no ranks or chunks"):
            rank_program(from_steps(ALL_REDUCE, 2, steps, num_chunks=2), 0)


def lowered(**changes):
    """What the binding makes of a world of two ranks without steps."""
    given = {
        "n": 2,
        "num_chunks": 1,
        "num_slots": 1,
        "before": None,
        "after": None,
        "steps": [],
        "hosts": [0, 0],
        "input_shared": False,
        "output_shared": False,
        "rank": 0,
    }
    return _native.lower(**given | changes)


def columns(*sizes):
    """The arrays of a step, of these sizes."""
    src, dst, chunk, into = (np.zeros(size, np.int64) for size in sizes)
    return src, dst, chunk, np.zeros(sizes[0], bool), into


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hosts": [0]}, "a host for every rank"),
        ({"rank": 2}, "one of the ranks"),
        ({"rank": -1}, "one of the ranks"),
        ({"num_chunks": -1}, "fewer slots than chunks"),
        ({"num_chunks": 2}, "fewer slots than chunks"),
        ({"num_slots": 1 << 31}, "more chunks than can be numbered"),
        (
            {"num_chunks": 1 << 30, "num_slots": 1 << 30},
            "more values than can be numbered",
        ),
        ({"before": np.zeros(2, np.int64)}, "a rank for every chunk"),
        ({"before": np.array([2])}, "held by no rank"),
        ({"after": np.array([-1])}, "held by no rank"),
        ({"steps": [columns(1, 1, 2, 1)]}, "differ in length"),
        ({"steps": [columns(1, 1, 1, 2)]}, "differ in length"),
    ],
)
def test_binding_refuses_what_is_no_schedule(changes, why):
    assert lowered()[1:4] == (0, 0, 1)
    with pytest.raises(ValueError, match=why):
        lowered(**changes)


def test_more_values_than_can_be_numbered_are_refused(monkeypatch):
    made = schedule("all_reduce", "ring", 4)
    values = 4 * 4 + 2 * 6 * 4
    monkeypatch.setattr(programs, "MOST_VALUES", values)
    rank_program(made, 0)
    monkeypatch.setattr(programs, "MOST_VALUES", values - 1)
    with pytest.raises(BadArgument, match=f"up to {values} values, at most"):
        rank_program(made, 0)
