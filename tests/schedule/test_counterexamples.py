"""What is wrong with a schedule is said exactly: the rule, or the end, and where."""

import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from unisono.errors import ScheduleError
from unisono.schedule import (
    Schedule,
    Step,
    check_exactly,
    copy_step,
    from_steps,
    reduce_step,
    together,
    verify,
)
from unisono.schedule.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE

law = settings(max_examples=60)
Judge = Callable[[Schedule], object]
N = 4


def by_numpy(schedule: Schedule) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["unisono.schedule.domains"], "_native", None)
        verify(schedule)


@pytest.fixture(params=[verify, by_numpy, check_exactly], ids=lambda j: j.__name__)
def judge(request: pytest.FixtureRequest) -> Judge:
    return request.param  # type: ignore[no-any-return]


def error(judge: Judge, schedule: Schedule) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        judge(schedule)
    return caught.value


def with_second_step(schedule: Schedule, step: Step) -> Schedule:
    first, *rest = schedule
    return schedule.but(make=lambda: [first, step, *rest])


BREACHES = {
    "dst too large": (copy_step(0, src=0, dst=N), N, 0, "is outside the ranks 0..3"),
    "dst negative": (copy_step(0, src=0, dst=-1), -1, 0, "is outside the ranks 0..3"),
    "src too large": (copy_step(2, src=N, dst=0), 0, 2, "is outside the ranks 0..3"),
    "src negative": (copy_step(2, src=-1, dst=3), 3, 2, "is outside the ranks 0..3"),
    "chunk too large": (copy_step(N, src=0, dst=1), 1, N, "is outside the chunks 0..3"),
    "chunk negative": (
        copy_step(-1, src=0, dst=1),
        1,
        -1,
        "is outside the chunks 0..3",
    ),
    "nowhere": (
        reduce_step(3, src=2, dst=2),
        2,
        3,
        "has the same source and destination",
    ),
    "second copy": (copy_step(1, src=[0, 2], dst=3), 3, 1, "second copy into one slot"),
    "renamed": (
        copy_step(1, src=0, dst=3, into=2),
        3,
        1,
        "the algorithm declares no temporaries",
    ),
}


@pytest.mark.parametrize("what", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("case", BREACHES)
def test_broken_rule_error_has_step_rank_and_chunk(judge, what, case):
    step, rank, chunk, words = BREACHES[case]
    found = error(judge, with_second_step(unisono.schedule(what, "ring", N), step))
    assert (found.step, found.rank, found.chunk) == (2, rank, chunk)
    assert found.args[0].startswith(f"{what} by ring, n=4, step 2: chunk {chunk}")
    assert (found.missing, found.doubled) == ((), ())
    assert str(found).endswith(words)


@pytest.mark.parametrize("at", [0, 3])
def test_transfer_that_breaks_a_rule_is_found_among_correct_ones(judge, at):
    fine = [copy_step(c, src=c, dst=(c + 1) % N) for c in range(N)]
    step = together([*fine[:at], copy_step(2, src=2, dst=7), *fine[at:]])
    found = error(
        judge, with_second_step(unisono.schedule("all_gather", "ring", N), step)
    )
    assert (found.step, found.rank, found.chunk) == (2, 7, 2)


def test_copy_and_reductions_share_a_slot(judge):
    steps = [
        reduce_step(0, src=0, dst=1),
        together([reduce_step(0, src=2, dst=0), copy_step(0, src=1, dst=0)]),
        copy_step(0, src=0, dst=[1, 2]),
    ]
    judge(from_steps(ALL_REDUCE, 3, steps, num_chunks=1))


def all_to_root(n: int, ranks: list[int]) -> Step:
    return reduce_step(0, src=np.array(ranks, dtype=np.int64), dst=0)


@law
@given(st.integers(2, 70), st.data())
def test_missing_names_the_ranks_whose_contribution_is_absent(n, data):
    missing = sorted(data.draw(st.sets(st.integers(1, n - 1), min_size=1)))
    step = all_to_root(n, [r for r in range(1, n) if r not in missing])
    wrong = from_steps(REDUCE, n, [step], num_chunks=1)
    found = error(verify, wrong)
    assert found.missing == tuple(missing)
    assert (found.rank, found.chunk, found.doubled) == (0, 0, ())
    assert found.step == (1 if len(step) else None)
    assert str(found) == str(error(check_exactly, wrong))


@law
@given(st.integers(2, 70), st.data())
def test_doubled_names_the_ranks_counted_twice(n, data):
    again = data.draw(st.integers(1, n - 1))
    into = data.draw(st.sets(st.integers(1, n - 1).filter(lambda r: r != again)))
    steps = [
        all_to_root(n, list(range(1, n))),
        reduce_step(0, src=np.array(sorted(into), dtype=np.int64), dst=again),
        reduce_step(0, src=again, dst=0),
    ]
    wrong = from_steps(REDUCE, n, steps, num_chunks=1)
    found = error(verify, wrong)
    assert found.doubled == tuple(sorted(into | {again}))
    assert (found.rank, found.chunk, found.missing) == (0, 0, ())
    assert found.step == (3 if into else 2)
    assert str(found) == str(error(check_exactly, wrong))


def test_step_of_a_doubled_value_is_the_first_wrong_one(judge):
    tree = list(unisono.schedule("reduce", "tree", N))
    extra = reduce_step(0, src=1, dst=2)
    wrong = from_steps(REDUCE, N, [tree[0], extra, *tree[1:], extra], num_chunks=1)
    found = error(judge, wrong)
    assert (found.step, found.rank, found.doubled) == (3, 0, (1,))
    assert "rank 0 already counts rank 1 in chunk 0" in str(found)


def test_only_the_wrong_chunk_is_reported(judge):
    ring = unisono.schedule("all_reduce", "ring", N)
    first, *rest = ring
    wrong = ring.but(make=lambda: [first.where(first.chunk != 2), *rest])
    found = error(judge, wrong)
    assert (found.chunk, found.missing) == (2, (3,))


def test_missing_copy_is_reported_at_its_rank(judge):
    tree = unisono.schedule("broadcast", "tree", 5, root=2)
    wrong = tree.but(make=lambda: [step.where(step.dst != 1) for step in tree])
    found = error(judge, wrong)
    assert (found.rank, found.chunk, found.missing) == (1, 0, (2,))
    assert found.step is None
    assert "rank 1 never receives chunk 0, which begins at rank 2" in str(found)


def test_sending_an_absent_chunk_is_reported(judge):
    steps = [copy_step(0, src=1, dst=2), copy_step(0, src=0, dst=1)]
    found = error(judge, from_steps(BROADCAST, 3, steps, num_chunks=1))
    assert (found.step, found.rank) == (1, 2)
    assert "rank 1 sends chunk 0, which it does not have" in str(found)


def test_adding_to_an_absent_chunk_is_reported(judge):
    found = error(
        judge, from_steps(BROADCAST, 2, [reduce_step(0, src=0, dst=1)], num_chunks=1)
    )
    assert (found.step, found.rank) == (1, 1)
    assert "rank 1 adds to chunk 0, of which it has nothing" in str(found)


def test_adding_an_original_to_itself_is_reported(judge):
    steps = [copy_step(0, src=0, dst=1), reduce_step(0, src=1, dst=0)]
    found = error(judge, from_steps(BROADCAST, 2, steps, num_chunks=1))
    assert (found.step, found.rank, found.doubled) == (2, 0, (0,))


def test_overwriting_repairs_a_wrong_slot(judge):
    steps = [copy_step(0, src=1, dst=2), copy_step(0, src=0, dst=[1, 2])]
    judge(from_steps(BROADCAST, 3, steps, num_chunks=1))


def test_sums_of_different_chunks_are_reported(judge):
    steps = [
        reduce_step([0, 1], src=1, dst=0),
        reduce_step(1, src=0, dst=0, into=0),
        copy_step([0, 1], src=0, dst=1),
    ]
    found = error(
        judge, from_steps(ALL_REDUCE, 2, steps, num_chunks=2, num_temporaries=1)
    )
    assert (found.step, found.rank, found.chunk) == (2, 0, 0)
    assert "rank 0 adds chunk 1 to chunk 0" in str(found)


def test_wrong_chunk_in_a_slot_is_reported(judge):
    steps = [copy_step([0, 1], src=[0, 1], dst=[1, 0], into=1)]
    wrong = from_steps(ALL_GATHER, 2, steps, num_chunks=2, num_temporaries=1)
    found = error(judge, wrong)
    assert (found.step, found.rank, found.chunk) == (None, 1, 0)
    steps += [copy_step(1, src=0, dst=0, into=0), copy_step(0, src=0, dst=1)]
    found = error(judge, wrong.but(make=lambda: steps))
    assert (found.step, found.rank, found.chunk) == (2, 0, 0)
    assert "rank 0 holds chunk 1" in str(found)


def test_sum_of_a_wrong_chunk_in_a_slot_is_reported(judge):
    steps = [
        reduce_step([[0], [1]], src=[0, 1], dst=[1, 0]),
        copy_step(1, src=0, dst=0, into=0),
    ]
    wrong = from_steps(ALL_REDUCE, 2, steps, num_chunks=2, num_temporaries=1)
    found = error(judge, wrong)
    assert (found.step, found.rank, found.chunk) == (2, 0, 0)
    assert "rank 0 holds chunk 1" in str(found)


def test_temporaries_begin_empty(judge):
    steps = [copy_step(1, src=0, dst=0, into=0), copy_step(0, src=0, dst=1)]
    wrong = from_steps(BROADCAST, 2, steps, num_chunks=1, num_temporaries=1)
    found = error(judge, wrong)
    assert (found.step, found.rank) == (1, 0)
    assert "rank 0 sends chunk 1, which it does not have" in str(found)


def test_many_ranks_are_counted_rather_than_listed():
    step = all_to_root(20, [1])
    found = error(verify, from_steps(REDUCE, 20, [step], num_chunks=1))
    assert "lacks ranks 2, 3, 4, 5, 6, 7 and 12 more in chunk 0" in str(found)
    assert found.missing == tuple(range(2, 20))


def test_schedule_without_steps_keeps_its_contract_only_with_one_rank(judge):
    judge(from_steps(ALL_REDUCE, 1, [], num_chunks=1))
    found = error(judge, from_steps(ALL_REDUCE, 2, [], num_chunks=1))
    assert (found.rank, found.missing, found.step) == (0, (1,), None)
    assert "never written" in str(found)
