"""Which all_reduce leaves the same bits on all ranks, and how deep the sums are."""

import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from closed_forms import ceil_log2
from numpy.typing import NDArray
from variants import VARIANTS

from unisono import Schedule, UnsupportedWorld, schedule

WORLDS = [*range(2, 18), 24, 26, 32, 60, 64]
FEW_WORLDS = [2, 3, 5, 8, 12, 13]
ALL_REDUCE = [name for what, name in VARIANTS if what == "all_reduce"]
DIFFERING = ["dissemination:carry"]
ADDING = [v for v in VARIANTS if v[0] in ("reduce", "reduce_scatter", "all_reduce")]
IN_RANK_ORDER = ["naive", "direct", "parameter_server", "parameter_server:sharded"]
LANES = 32

few_worlds_or_all = pytest.mark.parametrize(
    "worlds", [FEW_WORLDS, WORLDS], ids=["few", "all"]
)
few_are_quick = pytest.mark.quick(worlds=[FEW_WORLDS])

Floats = NDArray[np.float32]


def fitting(what: str, name: str, worlds: list[int]) -> Iterator[Schedule]:
    for n in worlds:
        try:
            yield schedule(what, name, n)
        except UnsupportedWorld:
            assert re.search("levels=|hosts=|shape=", name)


def contributions(made: Schedule) -> Floats:
    """Some numbers of single precision for every chunk of every rank."""
    random = np.random.default_rng(made.n)
    shape = made.num_slots, made.n, LANES
    return random.standard_normal(shape, dtype=np.float32)


def played(made: Schedule) -> Floats:
    """What every rank really ends with: the rules of a step, on real numbers."""
    state = contributions(made)
    for step in made:
        before = state.copy()
        added: dict[tuple[int, int], list[tuple[int, Floats]]] = defaultdict(list)
        own: dict[tuple[int, int], tuple[int, Floats]] = {}
        for t in step:
            slot, value = (t.into, t.dst), before[t.chunk, t.src]
            if t.reduces:
                added[slot].append((t.src, value))
            else:
                own[slot] = t.src, value
                state[slot] = value
        for slot, came in added.items():
            mine = own.get(slot, (slot[1], before[slot]))
            in_order = sorted([mine, *came], key=lambda operand: operand[0])
            state[slot] = left_to_right([value for _, value in in_order])
    return state[: made.num_chunks]


def left_to_right(values: list[Floats]) -> Floats:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


@few_are_quick
@few_worlds_or_all
@pytest.mark.parametrize("name", [a for a in ALL_REDUCE if a not in DIFFERING])
def test_every_rank_ends_with_the_same_bits(name, worlds):
    found = [s.consistency() for s in fitting("all_reduce", name, worlds)]
    assert found or worlds == FEW_WORLDS
    assert all(c.same_bits_on_all_ranks for c in found)


@pytest.mark.parametrize("name", DIFFERING)
@pytest.mark.parametrize("n", WORLDS)
def test_algorithms_with_overlapping_windows_differ_unless_n_is_a_power_of_two(name, n):
    same = schedule("all_reduce", name, n).consistency().same_bits_on_all_ranks
    assert same == (n & (n - 1) == 0)  # with a power of two nothing is carried


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_float_sums_confirm_the_reported_consistency(name):
    for made in fitting("all_reduce", name, [2, 3, 4, 5, 7, 8, 9, 12, 13]):
        ends = played(made)
        same = bool((ends == ends[:, :1]).all())
        assert same == made.consistency().same_bits_on_all_ranks


@pytest.mark.parametrize("name", IN_RANK_ORDER)
@pytest.mark.parametrize("n", [2, 5, 8, 13])
def test_sums_in_one_step_are_taken_in_rank_order(name, n):
    made = schedule("all_reduce", name, n)
    expected = left_to_right(list(contributions(made).swapaxes(0, 1)))
    assert (played(made) == expected[:, None]).all()


@few_are_quick
@few_worlds_or_all
@pytest.mark.parametrize(("what", "name"), ADDING)
def test_depth_is_between_that_of_the_flattest_tree_and_that_of_a_chain(
    what, name, worlds
):
    for made in fitting(what, name, worlds):
        assert ceil_log2(made.n) <= made.consistency().depth <= made.n - 1


AS_DEEP_AS_A_CHAIN = [
    *("ring", "chain", "naive", "parameter_server", "parameter_server:sharded"),
    *("direct", "direct:rotate"),
]
AS_FLAT_AS_CAN_BE = [
    *("tree", "recursive_doubling", "halving_doubling", "halving_doubling:blocks"),
    *("rabenseifner", "rabenseifner:early=1", "circulant", "pat", "swing"),
    *("dissemination", "dissemination:carry"),
]


@pytest.mark.parametrize("name", AS_DEEP_AS_A_CHAIN)
def test_sequential_sums_are_as_deep_as_there_are_other_ranks(name):
    for n in WORLDS:
        assert schedule("all_reduce", name, n).consistency().depth == n - 1


@pytest.mark.parametrize("name", AS_FLAT_AS_CAN_BE)
def test_doubling_algorithms_have_the_minimum_depth(name):
    for n in WORLDS:
        assert schedule("all_reduce", name, n).consistency().depth == ceil_log2(n)


@pytest.mark.parametrize("n", WORLDS)
def test_bidirectional_ring_is_half_as_deep_plus_one_sum(n):
    depth = schedule("all_reduce", "ring:both", n).consistency().depth
    assert depth == (n // 2 + 1 if n > 2 else 1)


@pytest.mark.parametrize(("g", "hosts"), [(4, 3), (2, 8), (8, 8)])
def test_depths_of_levels_add_up(g, hosts):
    by_levels = f"hierarchical:levels={g}x{hosts}"
    for name in (by_levels, f"torus:shape={g}x{hosts}"):
        depth = schedule("all_reduce", name, g * hosts).consistency().depth
        assert depth == g - 1 + hosts - 1


@pytest.mark.parametrize("what", ["broadcast", "all_gather", "scatter", "gather"])
def test_copies_have_no_depth_and_the_same_bits(what):
    found = schedule(what, "hierarchical", 13).consistency()
    assert (found.depth, found.same_bits_on_all_ranks) == (0, True)
