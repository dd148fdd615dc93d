"""Every algorithm, in every variant, keeps its contract among 1 to 64 ranks."""

import re
from collections.abc import Iterable, Iterator

import pytest
from variants import VARIANTS, as_cases

from unisono import Schedule, UnsupportedWorld, schedule
from unisono.algorithms import library
from unisono.schedule import COLLECTIVES

WORLDS = range(1, 65)
SMALL_WORLDS = [*range(1, 10), 13, 16]
FEW_WORLDS = [1, 2, 5, 8]
ROOTED = [v for v in VARIANTS if COLLECTIVES[v[0]].rooted]
SHAPED = [v for v in VARIANTS if re.search("levels=|hosts=|shape=", v[1])]
UNSHAPED = [v for v in VARIANTS if v not in SHAPED]

every_variant = pytest.mark.parametrize(("what", "name"), VARIANTS)
quick_variants = pytest.mark.parametrize(("what", "name"), as_cases(VARIANTS))
few_worlds_or_all = pytest.mark.parametrize("few", [True, False], ids=["few", "all"])


def fitting(what: str, name: str, worlds: Iterable[int]) -> Iterator[Schedule]:
    """The schedules for those worlds that the shape in the name, if any, fits."""
    for n in worlds:
        try:
            yield schedule(what, name, n)
        except UnsupportedWorld:
            assert (what, name) in SHAPED


@pytest.mark.quick(few=[True])
@few_worlds_or_all
@every_variant
def test_every_algorithm_keeps_its_contract_in_every_world(what, name, few):
    worlds = FEW_WORLDS if few and (what, name) in UNSHAPED else WORLDS
    proofs = [s.verify() for s in fitting(what, name, worlds)]
    assert proofs
    assert all(p.steps > 0 or p.schedule.n == 1 for p in proofs)


@pytest.mark.quick(few=[True])
@few_worlds_or_all
@pytest.mark.parametrize(("what", "name"), as_cases(ROOTED))
def test_every_algorithm_keeps_its_contract_for_every_root(what, name, few):
    worlds = list(fitting(what, name, FEW_WORLDS if few else SMALL_WORLDS))
    for at_zero in worlds or [next(fitting(what, name, WORLDS))]:
        for root in range(at_zero.n):
            turned = schedule(what, name, at_zero.n, root=root)
            assert turned.root == root
            turned.verify()


@pytest.mark.parametrize(("what", "name"), SHAPED)
def test_shape_that_does_not_fit_is_refused_with_the_number_of_ranks(what, name):
    with pytest.raises(UnsupportedWorld, match="59") as refused:
        schedule(what, name, 59)
    assert refused.value.n == 59


@pytest.mark.parametrize(("what", "name"), UNSHAPED)
def test_world_of_one_rank_sends_nothing(what, name):
    assert schedule(what, name, 1).cost().messages == 0


@quick_variants
def test_steps_are_the_same_in_every_iteration(what, name):
    first = next(fitting(what, name, (13, *WORLDS)))
    once, again = ([list(step) for step in first] for _ in range(2))
    assert once == again
    assert all(step.phase for step in first)


@pytest.mark.quick(few=[True])
@few_worlds_or_all
@quick_variants
def test_no_algorithm_beats_the_lower_bound(what, name, few):
    small = FEW_WORLDS if few else SMALL_WORLDS
    worlds = WORLDS if (what, name) in SHAPED else small
    for found in fitting(what, name, worlds):
        cost = found.cost()
        assert cost.rounds >= cost.bound.rounds
        assert cost.span >= cost.bound.span * (1 - 1e-12)
        assert cost.work >= cost.bound.work * (1 - 1e-12)


def test_every_algorithm_has_a_description():
    for algorithm in library().values():
        assert algorithm.about.endswith(".")
        assert algorithm.story


def test_every_collective_has_an_algorithm():
    assert {what for what, _ in library()} == set(COLLECTIVES)


def test_every_parameter_of_every_algorithm_has_a_variant():
    tried = {
        (what, part.partition(":")[0], item.partition("=")[0])
        for what, name in VARIANTS
        for part in name.split("+")
        for item in part.partition(":")[2].split(",")
    }
    for (what, name), algorithm in library().items():
        for parameter in algorithm.params:
            assert (what, name, parameter) in tried
