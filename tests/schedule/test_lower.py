"""Lowered programs: every order of the ranks leads to what the schedule says."""

from random import Random

import pytest
from lowering import (
    FEW_WORLDS,
    MODES,
    WORLDS,
    call,
    expected,
    mean,
    rounded_sum,
    schedules,
)
from variants import VARIANTS, as_cases

from program_player import play
from unisono import schedule
from unisono.algorithms import library
from unisono.errors import ScheduleError, UnsupportedWorld
from unisono.schedule import copy_step, reduce_step
from unisono.schedule.collective import ALL_REDUCE, BROADCAST
from unisono.schedule.lower import lower
from unisono.schedule.program import Home
from unisono.schedule.schedule import from_steps

PLAIN = list(library())
SPECIAL = [v for v in VARIANTS if v not in PLAIN]
REDUCING = [v for v in PLAIN if v[0] in ("reduce", "reduce_scatter", "all_reduce")]


def check(made, mode, seed):
    one = call(made, mode, seed)
    found = play([one], mean(made.n), seed=seed)[0]
    assert found == expected(made, one.inputs)
    check_form(made, one.lowered, mode)


@pytest.mark.quick(worlds=[FEW_WORLDS])
@pytest.mark.parametrize("worlds", [FEW_WORLDS, WORLDS], ids=["few", "all"])
@pytest.mark.parametrize(("what", "name"), PLAIN)
def test_programs_do_what_their_schedule_says_in_any_order(what, name, worlds):
    for made in schedules(what, name, worlds):
        for number, mode in enumerate(MODES):
            check(made, mode, seed=number + made.n)


@pytest.mark.quick(worlds=[[2, 5]])
@pytest.mark.parametrize("worlds", [[2, 5], [3, 8]], ids=str)
@pytest.mark.parametrize(("what", "name"), as_cases(SPECIAL))
def test_programs_of_algorithms_with_parameters_do_what_their_schedule_says(
    what, name, worlds
):
    for made in schedules(what, name, worlds):
        check(made, MODES[made.n % 4], seed=made.n)
        check(made, MODES[3 - made.n % 4], seed=made.n + 1)


@pytest.mark.quick(seeds=[range(30)])
@pytest.mark.parametrize("seeds", [range(30), range(30, 150)], ids=str)
def test_calls_follow_each_other_through_the_same_windows(seeds):
    """Each has other readers, and begins before the last has ended everywhere."""
    for seed in seeds:
        random = Random(seed)
        n = random.randint(2, 6)
        made = [schedule(*random.choice(PLAIN), n) for _ in range(4)]
        made = [s.rooted_at(random.randrange(n)) for s in made]
        calls = [call(s, random.choice(MODES), seed + i) for i, s in enumerate(made)]
        found = play(calls, mean(n), seed=seed)
        assert found == [
            expected(s, c.inputs) for s, c in zip(made, calls, strict=True)
        ]


@pytest.mark.quick(worlds=[[1, 2, 3, 5]])
@pytest.mark.parametrize("worlds", [[1, 2, 3, 5], [4, 8, 9]], ids=str)
@pytest.mark.parametrize(("what", "name"), REDUCING)
def test_canonical_means_one_rounding_in_rank_order(what, name, worlds):
    for made in schedules(what, name, worlds):
        one = call(made, MODES[made.n % 4], made.n, lanes=64, dtype="bfloat16")
        found = play([one], rounded_sum)[0]
        in_order = {}
        for chunk in range(made.num_chunks):
            of_ranks = [one.inputs[r, chunk] for r in range(made.n)]
            in_order[chunk] = [
                rounded_sum(list(piece), True) for piece in zip(*of_ranks, strict=True)
            ]
        same = all(
            (piece == in_order[c][i]).all()
            for (_, c), pieces in found.items()
            for i, piece in enumerate(pieces)
        )
        assert same == one.lowered.canonical


@pytest.mark.parametrize(("what", "name"), [v for v in PLAIN if v not in REDUCING])
def test_collectives_that_only_copy_are_canonical(what, name):
    assert all(lower(s).canonical for s in schedules(what, name, [1, 2, 5]))


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_only_keeps_its_input(mode):
    for what, name in PLAIN:
        one = call(schedule(what, name, 1), mode, 1)
        (program,) = one.lowered.programs
        assert one.lowered.places == one.lowered.depth == 0
        assert not program.awaited


def test_with_shared_buffers_direct_copies_nothing():
    for what in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter"):
        lowered = lower(
            schedule(what, "direct", 5), input_shared=True, output_shared=True
        )
        assert lowered.places == 0


def test_programs_wait_no_more_often_than_steps_need():
    """A direct all_reduce: each rank waits once for every other in either half."""
    lowered = lower(schedule("all_reduce", "direct", 4))
    for p in lowered.programs:
        waited = [w for a in p.actions for w in a.waits]
        assert len(waited) == len(set(waited)) == 2 * 3


def test_ranks_outside_the_world_are_refused():
    steps = [copy_step([0], src=[0], dst=[2])]
    with pytest.raises(ScheduleError):
        lower(from_steps(BROADCAST, 2, steps, num_chunks=1))


def test_sums_of_chunks_with_different_names_are_refused():
    steps = [reduce_step([0], src=[1], dst=[0], into=[1])]
    with pytest.raises(UnsupportedWorld, match="different names"):
        lower(from_steps(ALL_REDUCE, 2, steps, num_chunks=2, num_temporaries=1))


def check_form(made, lowered, mode):
    """What executors and plans rely on, beyond the waits."""
    programs = lowered.programs
    for p in programs:
        sources = [s for a in p.actions for s in a.sources]
        places = [a.window for a in p.actions if a.window is not None]
        assert len(set(places)) == len(places) <= lowered.places
        for w in all_waits(p):
            assert w.rank != p.rank
            assert 0 < w.count <= len(programs[w.rank].actions)
        for a in p.actions[: p.lead[p.rank]]:
            assert a.waits == ()
            assert [(s.home, s.rank) for s in a.sources] == [(Home.INPUT, p.rank)]
        awaited = [w for q in programs for w in all_waits(q) if w.rank == p.rank]
        assert p.awaited == {w.count for w in awaited}
        foreign = [s for s in sources if s.rank != p.rank]
        assert all(s.home is Home.WINDOW or mode[s.home] for s in foreign)
    check_readers(programs, lowered)


def all_waits(program):
    return [*program.exits, *(w for a in program.actions for w in a.waits)]


def check_readers(programs, lowered):
    """`readers` are the ranks that have a source in the window of the rank."""
    reads = {(s.home, s.rank, p.rank) for p in programs for s in all_sources(p)}
    for p in programs:
        others = [q.rank for q in programs if q.rank != p.rank]
        readers = [q for q in others if (Home.WINDOW, p.rank, q) in reads]
        assert list(p.readers) == readers
        assert p.lead == programs[0].lead


def all_sources(program):
    return [s for a in program.actions for s in a.sources]
