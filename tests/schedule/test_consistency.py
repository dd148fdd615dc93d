"""Same bits and depths, against an interpreter that adds in the documented order.

The operands of a slot, its own value (or the copy that replaces it) included, are
summed from the left in the order of the ranks they come from. Run on floating-point
numbers, this shows whether bits differ; run on trees, it shows whether they may.
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from unisono.algorithms import library
from unisono.schedule import (
    Schedule,
    Step,
    Transfer,
    copy_step,
    from_steps,
    reduce_step,
    together,
)
from unisono.schedule.collective import ALL_REDUCE

law = settings(max_examples=150)
NAMES = [name for what, name in library() if what == "all_reduce"]
NAMES += ["dissemination:carry", "direct:rotate", "ring:both", "tree:radix=3"]
NAMES += ["rabenseifner:early=1", "rabenseifner:early=2", "swing+ring"]
NAMES += ["halving_doubling:blocks", "hierarchical:by=tree/direct"]
WORLDS = (*range(2, 10), 13)
T = TypeVar("T")
Slot = tuple[int, int]
Tree = tuple[int, int]


def run(
    schedule: Schedule, begin: Callable[[int, int], T], add: Callable[[T, T], T]
) -> dict[Slot, T]:
    """All slots in the end, by rank and chunk."""
    ranks, slots = range(schedule.n), range(schedule.num_slots)
    held = {(r, c): begin(r, c) for r in ranks for c in slots}
    for step in schedule:
        held |= written(step, held, add)
    return held


def written(step: Step, held: dict[Slot, T], add: Callable[[T, T], T]) -> dict[Slot, T]:
    """The new values of the slots that a step writes."""
    base: dict[Slot, tuple[int, T]] = {}
    arriving: dict[Slot, list[tuple[int, T]]] = defaultdict(list)
    for t in step:
        operand = (t.src, held[t.src, t.chunk])
        if t.reduces:
            arriving[t.dst, t.into].append(operand)
        else:
            base[t.dst, t.into] = operand
    new = {}
    for slot in base.keys() | arriving.keys():
        own = base.get(slot, (slot[0], held[slot]))
        operands = sorted([own, *arriving[slot]], key=lambda operand: operand[0])
        new[slot] = functools.reduce(add, (value for _, value in operands))
    return new


def floats(schedule: Schedule, seed: int) -> list[list[str]]:
    """The bits with which every chunk ends on every rank, for random numbers."""
    rng = np.random.default_rng(seed)
    shape = schedule.n, schedule.num_slots
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-8, 8, shape)
    end = run(schedule, lambda r, c: float(values[r, c]), lambda a, b: a + b)
    ranks, chunks = range(schedule.n), range(schedule.num_chunks)
    return [[end[r, c].hex() for r in ranks] for c in chunks]


def same_bits(schedule: Schedule, seed: int) -> bool:
    return all(len(set(bits)) == 1 for bits in floats(schedule, seed))


def trees(schedule: Schedule) -> dict[Slot, Tree]:
    """For every slot a number that is the same for the same tree, and its depth."""
    known: dict[tuple[int, int], int] = {}

    def add(a: Tree, b: Tree) -> Tree:
        sides = (min(a[0], b[0]), max(a[0], b[0]))
        tree = known.setdefault(sides, schedule.n + len(known))
        return tree, max(a[1], b[1]) + 1

    return run(schedule, lambda rank, _: (rank, 0), add)


def reported(schedule: Schedule) -> tuple[bool, int]:
    found = schedule.consistency()
    return found.same_bits_on_all_ranks, found.depth


def traced(schedule: Schedule) -> tuple[bool, int]:
    end = trees(schedule)
    ranks, chunks = range(schedule.n), range(schedule.num_chunks)
    same = all(len({end[r, c][0] for r in ranks}) == 1 for c in chunks)
    return same, max(end[r, c][1] for r in ranks for c in chunks)


@pytest.mark.parametrize("name", NAMES)
def test_consistency_reports_exactly_when_bits_differ(name):
    for n in WORLDS:
        made = unisono.schedule("all_reduce", name, n)
        if made.consistency().same_bits_on_all_ranks:
            assert all(same_bits(made, seed) for seed in range(3))
        else:
            assert not all(same_bits(made, seed) for seed in range(20))


@pytest.mark.parametrize("name", NAMES)
def test_trees_and_depths_match_the_reference_interpreter(name):
    for n in (1, *WORLDS):
        made = unisono.schedule("all_reduce", name, n)
        assert reported(made) == traced(made)


def test_ranks_that_add_in_different_orders_are_detected():
    differing = {
        n
        for n in WORLDS
        if not reported(unisono.schedule("all_reduce", "dissemination:carry", n))[0]
    }
    assert differing == {n for n in WORLDS if n & (n - 1)}


def transfers(n: int) -> st.SearchStrategy[Transfer]:
    ranks, chunk = st.integers(0, n - 1), st.integers(0, 1)
    made = st.builds(Transfer, ranks, ranks, chunk, st.booleans(), chunk)
    return made.map(lambda t: t._replace(into=t.chunk)).filter(lambda t: t.src != t.dst)


def lawful(rows: list[Transfer]) -> Step:
    """A step of these transfers, less what would be a second copy into a slot."""
    kept = {(t.dst, t.chunk, t.src if t.reduces else -1): t for t in rows}
    src, dst, chunk, reduces, into = np.array(list(kept.values()), dtype=np.int64).T
    return Step(src, dst, chunk, into, reduces.astype(bool))


@pytest.mark.sweep
@law
@given(st.lists(st.lists(transfers(4), min_size=1, max_size=9), max_size=4))
def test_random_steps_match_the_reference_interpreter(rows):
    made = from_steps(ALL_REDUCE, 4, [lawful(step) for step in rows], num_chunks=2)
    assert reported(made) == traced(made)


def test_copy_has_the_order_of_its_sender():
    """Rank 3 adds to a copy of rank 0's value as rank 0 itself does: (0 + 1) + 2."""
    twice = [reduce_step(0, src=[1, 2], dst=rank) for rank in (0, 3)]
    steps = [
        together([copy_step(0, src=0, dst=3), *twice]),
        copy_step(0, src=0, dst=[1, 2]),
    ]
    made = from_steps(ALL_REDUCE, 4, steps, num_chunks=1)
    assert reported(made) == traced(made) == (True, 2)


def test_operands_of_a_sum_commute():
    """Ranks 2 and 3 hold what 1 and 0 do, so 2 adds 1 + 0 where 0 adds 0 + 1."""
    steps = [
        copy_step(0, src=[1, 0], dst=[2, 3]),
        reduce_step(0, src=[1, 3], dst=[0, 2]),
        copy_step(0, src=[0, 2], dst=[1, 3]),
    ]
    made = from_steps(ALL_REDUCE, 4, steps, num_chunks=1)
    assert reported(made) == traced(made) == (True, 1)


@pytest.mark.parametrize("n", [1, *WORLDS])
def test_depths_are_known_in_closed_form(n):
    levels = (n - 1).bit_length()
    for what, name, depth in (
        ("all_reduce", "ring", n - 1),
        ("reduce_scatter", "ring", n - 1),
        ("reduce", "chain", n - 1),
        ("reduce_scatter", "direct", n - 1),
        ("all_reduce", "parameter_server", n - 1),
        ("reduce", "tree", levels),
        ("all_reduce", "tree", levels),
        ("reduce_scatter", "circulant", levels),
    ):
        found = unisono.schedule(what, name, n).consistency()
        assert found.depth == depth, (what, name)
        assert found.same_bits_on_all_ranks


@pytest.mark.parametrize("levels", range(5))
def test_depth_of_doubling_is_its_number_of_levels(levels):
    for name in ("recursive_doubling", "halving_doubling", "swing", "dissemination"):
        made = unisono.schedule("all_reduce", name, 1 << levels)
        assert reported(made) == (True, levels)


@pytest.mark.parametrize(
    ("what", "name"), [key for key in library() if "reduce" not in key[0]]
)
def test_collectives_that_only_copy_have_depth_zero(what, name):
    assert reported(unisono.schedule(what, name, 5)) == (True, 0)
