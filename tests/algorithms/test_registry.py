"""Algorithms are called by names that people type, and refuse what cannot be."""

import numpy as np
import pytest

from unisono import BadArgument, UnsupportedWorld, schedule
from unisono.algorithms import algorithm, find, library, power_of_two
from unisono.algorithms.library import offers
from unisono.schedule import collective, copy_step


@algorithm(needs=power_of_two, alike="tree or ring")
def broadcast(n, both: bool = False, radix: int = 2, order: str = "up"):
    """A broadcast that refuses most worlds."""
    yield copy_step(0, src=0, dst=np.arange(1, n))


@algorithm
def scatter(n, root: int = 0, last: bool = False):
    """A scatter that takes its root, and serves the ranks in order."""
    c = np.delete(np.arange(n), root)
    yield copy_step(c[::-1] if last else c, src=root, dst=c[::-1] if last else c)


@algorithm
def gather(n, root: int = 0):
    """A gather that takes its root and ignores it."""
    return schedule("gather", "direct", n)


NAMES = {
    "ring": "ring",
    "ring:both": "ring:both",
    "ring:both=true": "ring:both",
    "ring:both=false": "ring",
    "tree:radix=2": "tree",
    "tree:radix=4": "tree:radix=4",
    "hierarchical:levels=4x3": "hierarchical:levels=4x3",
    "hierarchical:levels=4x3,by=direct/ring": "hierarchical:levels=4x3,by=direct/ring",
    "ring+recursive_doubling": "ring+recursive_doubling",
    "ring:both+direct:rotate": "ring:both+direct:rotate",
    "hierarchical:levels=5+4+3": "hierarchical:levels=5+4+3",
    "hierarchical:hosts=0-2x4,segments=1": "hierarchical:hosts=0-2x4",
    "hierarchical:hosts=0-2x4,segments=2": "hierarchical:hosts=0-2x4,segments=2",
}


@pytest.mark.parametrize("message", NAMES)
def test_schedule_has_the_shortest_name_of_its_algorithm(message):
    made = schedule("all_reduce", message, 12)
    assert made.name == NAMES[message]
    again = schedule("all_reduce", made.name, 12)
    assert [list(s) for s in again] == [list(s) for s in made]


def test_parameters_in_the_name_and_by_keyword_mean_the_same():
    result = schedule("all_reduce", "tree:radix=3", 9)
    given = schedule("all_reduce", "tree", 9, radix=3)
    assert result.name == given.name == "tree:radix=3"
    assert result.cost().as_dict() == given.cost().as_dict()


def test_spelled_omits_default_parameters():
    assert broadcast.spelled() == "test_registry"
    assert broadcast.spelled(both=True) == "test_registry:both"
    assert broadcast.spelled(both=False, radix=2) == "test_registry"
    assert broadcast.spelled(radix=3, order="up") == "test_registry:radix=3"
    named = broadcast.spelled(both=True, radix=3, order="down")
    assert named == "test_registry:both,radix=3,order=down"


def test_algorithm_has_name_collective_and_parameters():
    assert broadcast.collective is collective("broadcast")
    assert broadcast.params == {"both": False, "radix": 2, "order": "up"}
    assert broadcast.about == "A broadcast that refuses most worlds."
    assert broadcast.story.startswith("Algorithms are called")
    assert "test_registry.py:" in broadcast.where


def test_find_gives_the_algorithm_and_the_parameters_given():
    found, result = find(collective("all_reduce"), "hierarchical:levels=2x2,by=tree")
    assert found is library()["all_reduce", "hierarchical"]
    assert result == {"levels": "2x2", "by": "tree"}


def test_pair_runs_its_first_half_and_then_its_second():
    pair = schedule("broadcast", "tree+ring", 6, root=4)
    halves = schedule("scatter", "tree", 6).then(schedule("all_gather", "ring", 6))
    assert pair.root == 4
    assert pair.cost().as_dict() == halves.rooted_at(4).cost().as_dict()
    assert "scatter by tree" in pair.about


UNKNOWN = [
    ("all_reduce", "rong", ["ring", "swing"]),
    ("all_reduce", "recursive_dubling", ["recursive_doubling"]),
    ("broadcast", "tre", ["tree", "double_tree"]),
    ("all_reduce", "ring+rung", ["ring"]),
    ("all_reduc", "ring", ["all_reduce", "reduce"]),
    ("all_reduce", "hierarchical:by=rung", ["ring"]),
]


@pytest.mark.parametrize(("what", "name", "near"), UNKNOWN)
def test_unknown_name_is_refused_with_the_three_nearest(what, name, near):
    with pytest.raises(BadArgument, match="nearest: ") as refused:
        schedule(what, name, 4)
    nearest = str(refused.value).rpartition("nearest: ")[2].split(", ")
    assert len(nearest) == 3
    assert nearest[: len(near)] == near


def test_algorithm_of_another_collective_is_refused_with_its_collectives():
    with pytest.raises(BadArgument, match="bruck") as refused:
        schedule("broadcast", "bruck", 4)
    assert "all_to_all" in str(refused.value)
    assert "double_tree" in str(refused.value)


REFUSED = {
    "ring:bot": "nearest: both",
    "naive:radix=2": "no parameters",
    "ring:both=maybe": "true or false",
    "tree:radix=many": "a whole number",
    "tree:radix": "a whole number",
    "chain:segments=0": "at least 1",
    "hierarchical:levels=axb": "4x3",
    "hierarchical:levels=0": "at least one rank",
    "torus:shape=axb": "4x4x4",
    "torus:shape=0x12": "at least 1",
    "ring+tree": "tree has no all_gather",
    "ring+ring+ring": "at most two",
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_parameter_is_refused_with_the_valid_ones(name):
    with pytest.raises(BadArgument, match=REFUSED[name]):
        schedule("all_reduce", name, 12)


OUT_OF_RANGE = [
    ("all_reduce", "tree:radix=1"),
    ("all_reduce", "butterfly:radix=1"),
    ("all_reduce", "rabenseifner:early=-1"),
    ("all_gather", "pat:aggregate=-1"),
    ("all_to_all", "bruck:radix=1"),
]


@pytest.mark.parametrize(("what", "name"), OUT_OF_RANGE)
def test_parameter_out_of_range_is_refused_when_steps_are_made(what, name):
    with pytest.raises(BadArgument, match="at least"):
        schedule(what, name, 12).verify()


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"radix": 2.5}, "a whole number"),
        ({"radix": True}, "a whole number"),
        ({"radix": "2"}, "a whole number"),
        ({"both": 1}, "true or false"),
        ({"both": "yes"}, "true or false"),
        ({"order": 3}, "a text"),
        ({"radics": 3}, "nearest: radix"),
    ],
)
def test_keyword_of_the_wrong_type_is_refused_with_the_expected_type(params, wanted):
    with pytest.raises(BadArgument, match=wanted):
        broadcast(4, **params)


def test_pair_takes_its_parameters_in_the_name_only():
    with pytest.raises(BadArgument, match="into the name"):
        schedule("all_reduce", "ring+ring", 4, both=True)


def test_pairs_exist_only_for_what_has_two_halves():
    with pytest.raises(BadArgument, match="all_reduce, broadcast, reduce"):
        schedule("all_to_all", "ring+ring", 4)


@pytest.mark.parametrize("n", [1, 2, 4, 64])
def test_world_that_meets_the_requirement_is_accepted(n):
    assert broadcast.supports(n)
    assert broadcast(n).verify().schedule.n == n


@pytest.mark.parametrize("n", [3, 6, 63])
def test_world_that_does_not_meet_a_requirement_is_refused(n):
    assert not broadcast.supports(n)
    with pytest.raises(UnsupportedWorld, match=f"a power of two, got {n}") as refused:
        broadcast(n)
    assert refused.value.n == n
    assert "try tree or ring" in str(refused.value)


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "4", None])
def test_invalid_number_of_ranks_is_refused(n):
    with pytest.raises(BadArgument, match=r"at least one rank|whole number"):
        schedule("all_reduce", "ring", n)


def test_number_of_ranks_may_be_a_numpy_integer():
    four = np.arange(5).max()
    assert schedule("all_reduce", "ring", four).verify().schedule.n == 4


@pytest.mark.parametrize("root", [-1, 4])
@pytest.mark.parametrize("name", ["tree", "hierarchical", "tree+ring"])
def test_root_outside_the_ranks_is_refused(name, root):
    with pytest.raises(BadArgument, match=r"0\.\.3"):
        schedule("broadcast", name, 4, root=root)


@pytest.mark.parametrize("made_by", [scatter, gather])
def test_algorithm_takes_the_root_or_is_relabelled_to_it(made_by):
    assert made_by.takes_root
    assert not broadcast.takes_root
    assert "root" not in made_by.params
    for root in range(5):
        made = made_by.rooted_at(root, 5, {})
        assert made.verify().schedule.root == root
        assert made.name == "test_registry"


def test_root_is_not_a_parameter_in_the_name():
    with pytest.raises(BadArgument, match="nearest: last"):
        scatter(4, root=2)


def test_both_halves_of_a_pair_have_the_root():
    for root in range(6):
        pair = schedule(
            "reduce", "hierarchical:levels=3x2+hierarchical:levels=3x2", 6, root=root
        )
        assert pair.verify().schedule.root == root


@pytest.mark.parametrize("name", ["ring", "ring+ring"])
def test_collective_without_a_root_refuses_a_root(name):
    with pytest.raises(BadArgument, match="all_reduce has no root"):
        schedule("all_reduce", name, 4, root=1)


def test_offers_finds_algorithms_of_a_collective():
    assert offers("direct", "reduce_scatter")
    assert not offers("naive", "reduce_scatter")
    assert not offers("nobody", "reduce_scatter")
    assert not offers("registry", "reduce_scatter")


def test_library_is_a_mapping_in_the_order_of_collectives():
    keys = list(library())
    assert len(keys) == len(library()) == len(set(keys))
    assert keys[0][0] == "broadcast"
    assert keys[-1][0] == "barrier"
    assert library()["all_reduce", "ring"].name == "ring"
    with pytest.raises(KeyError):
        library()["all_reduce", "rung"]
