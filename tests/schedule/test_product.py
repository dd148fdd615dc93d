"""Hierarchies: any algorithms inside groups of any sizes, and any across them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from unisono.algorithms import library
from unisono.errors import BadArgument
from unisono.schedule import Schedule, product, verify
from unisono.schedule.product import RankGroups

law = settings(max_examples=40)
KEYS = list(library())
group_sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
PLAIN = ["all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter"]
PLAIN += ["gather", "reduce", "barrier"]
HALVES = [("reduce_scatter", "all_gather"), ("reduce", "broadcast")]


def drawn(data: st.DataObject, what: str, n: int) -> Schedule:
    """Some algorithm for `what`, perhaps with its chunks cut."""
    names = [name for collective, name in KEYS if collective == what]
    segments = data.draw(st.integers(1, 2))
    return unisono.schedule(what, data.draw(st.sampled_from(names)), n).split(segments)


@pytest.mark.cases(3)
@pytest.mark.parametrize("what", PLAIN)
@law
@given(sizes=group_sizes, data=st.data())
def test_inside_and_across_make_the_same_collective(what, sizes, data):
    inside = [drawn(data, what, size) for size in sizes]
    made = product(inside, drawn(data, what, len(sizes)))
    assert (made.collective.name, made.n) == (what, sum(sizes))
    assert verify(made)


@pytest.mark.parametrize(("first", "last"), HALVES)
@law
@given(sizes=group_sizes, data=st.data())
def test_all_reduce_runs_within_across_and_within_groups(first, last, sizes, data):
    inside = [drawn(data, first, size) for size in sizes]
    back = [drawn(data, last, size) for size in sizes]
    made = product(inside, drawn(data, "all_reduce", len(sizes)), back)
    assert (made.collective.name, made.n) == ("all_reduce", sum(sizes))
    assert verify(made)


@law
@given(group_sizes, st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_product_of_a_product_has_another_level(sizes, outer, data):
    hosts = [drawn(data, "all_gather", size) for size in outer]
    across = product(hosts, drawn(data, "all_gather", len(outer)))
    sizes = (sizes * across.n)[: across.n]
    made = product([drawn(data, "all_gather", size) for size in sizes], across)
    assert made.n == sum(sizes)
    assert verify(made)


def test_steps_inside_and_across_follow_each_other():
    inside = [unisono.schedule("all_gather", "ring", size) for size in (4, 2)]
    made = product(inside, unisono.schedule("all_gather", "direct", 2))
    phases = ["all_gather across"] + 3 * ["all_gather inside"]
    assert [step.phase for step in made] == phases


def test_every_group_runs_its_own_schedule():
    inside = [unisono.schedule("all_gather", name, 4) for name in ("direct", "ring")]
    made = product(inside, unisono.schedule("all_gather", "direct", 2))
    assert verify(made)
    steps = [step for step in made if step.phase == "all_gather inside"]
    assert len(steps) == 3
    assert all((step.src >= 4).all() for step in steps[1:])


def test_carrier_has_the_same_relative_position_in_its_group():
    groups = RankGroups(np.array([4, 2, 3]))
    ranks = np.arange(9)
    places = [groups.carrier(ranks, np.full(9, group)).tolist() for group in range(3)]
    assert places[0] == [0, 1, 2, 3, 0, 2, 0, 1, 2]
    assert places[1] == [0, 0, 1, 1, 0, 1, 0, 0, 1]
    assert places[2] == [0, 0, 1, 2, 0, 1, 0, 1, 2]


def test_pieces_of_one_share_have_several_carriers():
    groups = RankGroups(np.array([4, 1]))
    last, part = np.full(4, 4), np.arange(4)
    assert groups.times_larger == 4
    assert groups.carrier(last, np.zeros(4, int), part, 4).tolist() == [0, 1, 2, 3]
    assert groups.carrier(np.arange(4), np.ones(4, int), part, 4).tolist() == [0] * 4
    own = groups.carrier(np.arange(4), np.zeros(4, int), part, 4)
    assert own.tolist() == [0, 1, 2, 3]


def test_equal_groups_are_cut_no_finer():
    inside = [unisono.schedule("all_gather", "direct", 3)] * 2
    across = unisono.schedule("all_gather", "direct", 2)
    assert product(inside, across).num_chunks == 6


def test_groups_of_another_number_than_ranks_across_are_refused():
    inside = [unisono.schedule("all_gather", "ring", 2)] * 3
    with pytest.raises(BadArgument, match="3 groups, but 4 ranks"):
        product(inside, unisono.schedule("all_gather", "ring", 4))


def test_all_reduce_without_a_final_phase_is_refused():
    across = unisono.schedule("all_reduce", "ring", 2)
    for what in ("reduce_scatter", "reduce"):
        name = "ring" if what == "reduce_scatter" else "tree"
        inside = [unisono.schedule(what, name, 3)] * 2
        with pytest.raises(BadArgument):
            list(product(inside, across))


def test_parts_of_different_collectives_are_refused():
    gathers, tree = (
        unisono.schedule(what, name, 2)
        for what, name in (("all_gather", "ring"), ("broadcast", "tree"))
    )
    for inside in ([tree, tree], [gathers, tree]):
        with pytest.raises(BadArgument, match="all_gather"):
            product(inside, gathers)


def test_parts_with_another_root_are_refused():
    tree = unisono.schedule("broadcast", "tree", 2)
    turned = tree.rooted_at(1)
    for inside, across in (([turned, tree], tree), ([tree, tree], turned)):
        with pytest.raises(BadArgument, match="root"):
            product(inside, across)
