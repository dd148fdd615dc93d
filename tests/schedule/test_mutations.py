"""Every algorithm with one fault put in: the fast verifier and the exact one agree.

A fault is not always a mistake: a step may come earlier than it need, or a transfer be
in vain. So the exact interpreter is the judge, and the fast one must say the same.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import unisono
from unisono.algorithms import library
from unisono.errors import ScheduleError
from unisono.schedule import (
    Schedule,
    Step,
    Transfer,
    check_exactly,
    from_steps,
    verify,
)

WORLDS = (5, 8)
VARIANTS = [
    ("broadcast", "tree:radix=3"),
    ("broadcast", "tree+ring"),
    ("scatter", "direct:rotate"),
    ("gather", "hierarchical:by=direct/tree"),
    ("reduce", "chain:segments=1"),
    ("all_gather", "ring:both"),
    ("all_gather", "halving_doubling:blocks"),
    ("reduce_scatter", "pat:aggregate=1"),
    ("all_reduce", "dissemination:carry"),
    ("all_reduce", "hierarchical:by=tree/ring"),
    ("all_reduce", "parameter_server:sharded"),
    ("all_reduce", "rabenseifner:early=1"),
    ("all_reduce", "swing+recursive_doubling"),
    ("all_to_all", "bruck:radix=3"),
    ("barrier", "hierarchical:by=dissemination"),
]
CASES = list(library()) + VARIANTS
Rows = list[Transfer]
Mutation = Callable[[Rows, int, random.Random, int], Rows]


def other_than(rank: int, n: int, rng: random.Random) -> int:
    return (rank + rng.randrange(1, n)) % n


def drop(rows: Rows, at: int, rng: random.Random, n: int) -> Rows:
    return rows[:at] + rows[at + 1 :]


def redirect_dst(rows: Rows, at: int, rng: random.Random, n: int) -> Rows:
    t = rows[at]
    return [*rows[:at], t._replace(dst=other_than(t.dst, n, rng)), *rows[at + 1 :]]


def redirect_src(rows: Rows, at: int, rng: random.Random, n: int) -> Rows:
    t = rows[at]
    return [*rows[:at], t._replace(src=other_than(t.src, n, rng)), *rows[at + 1 :]]


def duplicate(rows: Rows, at: int, rng: random.Random, n: int) -> Rows:
    return [*rows, rows[at]]


def change_kind(rows: Rows, at: int, rng: random.Random, n: int) -> Rows:
    t = rows[at]
    return [*rows[:at], t._replace(reduces=not t.reduces), *rows[at + 1 :]]


MUTATIONS = (drop, redirect_dst, redirect_src, duplicate, change_kind)


def step_of(rows: Rows) -> Step:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    src, dst, chunk, reduces, into = columns
    renames = bool((into != chunk).any())
    return Step(src, dst, chunk, into if renames else chunk, reduces.astype(bool))


def with_steps(schedule: Schedule, steps: list[Step]) -> Schedule:
    return from_steps(
        schedule.collective,
        schedule.n,
        steps,
        num_chunks=schedule.num_chunks,
        num_temporaries=schedule.num_temporaries,
        root=schedule.root,
        name=f"mutated {schedule.name}",
    )


@cache
def steps_of(what: str, name: str, n: int) -> list[Step]:
    return list(unisono.schedule(what, name, n, root=root_of(what, n)))


def root_of(what: str, n: int) -> int:
    """A root other than 0, where there is one."""
    return n - 2 if what in ("broadcast", "scatter", "gather", "reduce") else 0


def mutants(what: str, name: str, n: int, mutate: Mutation) -> list[Schedule]:
    """The schedule with one transfer changed, for every transfer."""
    rng = random.Random(f"{what} {name} {n} {mutate.__name__}")
    right = unisono.schedule(what, name, n, root=root_of(what, n))
    steps = steps_of(what, name, n)
    places = [(s, t) for s, step in enumerate(steps) for t in range(len(step))]
    made = []
    for s, t in places:
        changed = step_of(mutate(list(steps[s]), t, rng, n))
        made.append(with_steps(right, [*steps[:s], changed, *steps[s + 1 :]]))
    return made


def swapped_steps(what: str, name: str, n: int) -> list[Schedule]:
    """The schedule with two neighbouring steps exchanged, for all of them."""
    right = unisono.schedule(what, name, n, root=root_of(what, n))
    steps = steps_of(what, name, n)
    return [
        with_steps(right, [*steps[:s], steps[s + 1], steps[s], *steps[s + 2 :]])
        for s in range(len(steps) - 1)
    ]


def accepts(judge: Callable[[Schedule], object], schedule: Schedule) -> bool:
    try:
        judge(schedule)
    except ScheduleError:
        return False
    return True


def assert_judged_alike(schedules: list[Schedule]) -> None:
    for mutant in schedules:
        exact, fast = accepts(check_exactly, mutant), accepts(verify, mutant)
        assert fast == exact, [[str(t) for t in step] for step in mutant]


def each_with_one() -> list:
    """Every case with every mutation; sweeps, but for one of each case, in turn."""
    found = []
    for i, case in enumerate(CASES):
        for j, mutate in enumerate(MUTATIONS):
            marks = () if i % len(MUTATIONS) == j else pytest.mark.sweep
            found.append(pytest.param(*case, mutate, marks=marks))
    return found


@pytest.mark.quick(n=[5])
@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize(("what", "name", "mutate"), each_with_one())
def test_verifiers_agree_on_one_wrong_transfer(what, name, n, mutate):
    assert_judged_alike(mutants(what, name, n, mutate))


@pytest.mark.quick(n=[5])
@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize(("what", "name"), CASES)
def test_verifiers_agree_on_swapped_steps(what, name, n):
    assert_judged_alike(swapped_steps(what, name, n))


@pytest.mark.parametrize("mutate", [drop, redirect_dst, redirect_src])
def test_some_faults_are_harmless_and_most_are_not(mutate):
    cases = [("broadcast", "tree+ring"), ("all_reduce", "naive"), ("reduce", "tree")]
    made = [m for case in cases for m in mutants(*case, 5, mutate)]
    accepted = [accepts(check_exactly, mutant) for mutant in made]
    assert 0 < sum(accepted) < len(accepted) / 2


@pytest.mark.parametrize("mutate", [duplicate, change_kind])
def test_repeated_transfer_or_wrong_kind_is_always_detected(mutate):
    for what, name in (
        ("all_gather", "ring"),
        ("all_reduce", "ring"),
        ("reduce", "tree"),
    ):
        made = mutants(what, name, 5, mutate)
        assert made
        assert not any(accepts(check_exactly, mutant) for mutant in made)


def test_some_swapped_steps_are_harmless_and_others_are_not():
    kinds = {
        name: [accepts(check_exactly, s) for s in swapped_steps("all_gather", name, 8)]
        for name in ("direct:rotate", "ring")
    }
    assert all(kinds["direct:rotate"])
    assert not any(kinds["ring"])


@pytest.mark.sweep
def test_overview_states_the_number_of_mutants():
    kinds = [mutants(*case, n, m) for case in CASES for n in WORLDS for m in MUTATIONS]
    kinds += [swapped_steps(*case, n) for case in CASES for n in WORLDS]
    total = sum(len(made) for made in kinds)
    overview = Path(__file__).parents[2] / "docs" / "overview.md"
    assert f"all {total:,} mutations" in overview.read_text(encoding="utf-8")
