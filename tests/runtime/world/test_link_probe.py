"""The probe of links between hosts, and the model that is made from it."""

import os
from dataclasses import asdict

import numpy as np
import pytest

from unisono.runtime.plan import predict
from unisono.runtime.plan.predict import MODEL, CostModel, fitted, small_calls
from unisono.runtime.plan.select import choose
from unisono.runtime.world import links

FOUR = (0, 1, 2, 3)
MBIT = 8e-6
"""Seconds per byte at 1 Mbit/s."""


def probe_of(rates, hosts=None, start=40e-6, message=15e-6):
    """The model from a perfect probe of links with these rates, in Mbit/s."""
    hosts = hosts or tuple(range(len(rates)))
    pairs = {
        (a, b): MBIT / min(rates[a], rates[b])
        for a in range(len(rates))
        for b in range(len(rates))
        if a != b
    }
    true = CostModel(start=start, message=message)
    seconds = [
        predict.predicted("all_gather", name, 1, hosts, 0, true)
        for name in small_calls(len(hosts))
    ]
    return fitted(hosts, pairs, seconds)


@pytest.mark.parametrize("rates", [[200] * 3, [5000] * 4, [200, 200, 1000, 1000]])
def test_model_has_the_constants_that_the_probe_found(rates):
    found = probe_of(rates, start=300e-6, message=50e-6)
    expected = [MBIT / rate for rate in rates]
    assert found.leaving == pytest.approx(expected)
    assert found.entering == pytest.approx(expected)
    assert found.start == pytest.approx(300e-6)
    assert found.message == pytest.approx(50e-6)


def test_two_hosts_have_one_kind_of_step_and_the_usual_share_of_messages():
    found = probe_of([1000, 1000], start=50e-6, message=30e-6)
    assert found.start + found.message == pytest.approx(80e-6)
    assert found.message / found.start == pytest.approx(MODEL.message / MODEL.start)


def test_several_ranks_of_a_host_are_counted():
    hosts = (0, 0, 1, 1, 2, 2)
    found = probe_of([200, 1000, 1000], hosts, start=100e-6, message=20e-6)
    assert len(found.leaving) == 3
    assert found.start == pytest.approx(100e-6)
    assert found.message == pytest.approx(20e-6)


def test_similar_rates_are_taken_for_equal():
    found = probe_of([1000, 950, 1030, 200])
    assert len(set(found.leaving[:3])) == 1
    assert found.leaving[3] == pytest.approx(MBIT / 200)


def test_disturbed_small_calls_give_positive_times():
    for seconds in ([1e-3, 1e-5], [1e-5, 1e-3], [1e-9, 1e-9]):
        found = fitted(FOUR, {}, seconds)
        assert found.start > 0
        assert found.message > 0
        assert found.leaving == (MODEL.byte,) * 4  # nothing was heard of the links


def test_model_of_some_hosts():
    found = probe_of([200, 500, 1000, 5000])
    assert found.of([3, 1]).leaving == (found.leaving[3], found.leaving[1])
    assert MODEL.of([3, 1]) is MODEL


def test_choice_follows_the_links():
    """On a slow network few bytes win, on one of long latency few steps."""
    slow = probe_of([20] * 4, start=40e-6)
    far = probe_of([10_000] * 4, start=20e-3)
    ask = {"n": 4, "named": None, "reproducible": False, "hosts": FOUR}
    names = [
        choose("all_reduce", 64 << 10, **ask, model=model).algorithm
        for model in (slow, far)
    ]
    assert names[1] == "naive"
    assert names[0] != "naive"


def test_expected_time_is_that_of_the_slowest_link():
    ask = {"n": 4, "named": None, "reproducible": False, "hosts": FOUR}
    nbytes = 16 << 20
    equal, unequal = (
        choose("all_reduce", nbytes, **ask, model=probe_of(rates)).predicted
        for rates in ([200] * 4, [200, 1000, 1000, 1000])
    )
    assert equal > 1.4 * nbytes * MBIT / 200
    assert nbytes * MBIT / 200 < unequal <= equal


def as_json(model):
    """A model as it travels."""
    return model and asdict(model)


def as_model(fields):
    """A model that has travelled."""
    links = {name: tuple(fields[name]) for name in ("leaving", "entering")}
    return CostModel(**fields | links)


def model_here(rank):
    """The model of this rank, of a group of it, and the text that tells."""
    with rank.init() as comm:
        return described(comm)


def described(comm):
    session = comm.core.session
    group = comm.split(comm.rank % 2)
    mine = session.links_between(group.core.world_ranks)
    text = comm.explain("all_reduce", np.zeros(1 << 18, np.float32))
    total = comm.all_reduce(np.ones(1 << 18, np.float32))
    return as_json(session.links), as_json(mine), text, float(total[0])


def probed_here(rank):
    """A probe that is taken for good even if the machine is busy."""
    links.STEADY = links.BUDGET_S = 1e9
    links.LONGEST = 1 << 16
    with rank.init() as comm:
        comm.core.session.links = links.probed(comm, 60.0)
        return described(comm)


def probed_when_busy(rank):
    """A probe that takes nothing for steady."""
    links.STEADY = 0.0
    with rank.init() as comm:
        return as_json(links.probed(comm, 60.0))


def values(ends):
    """What ranks returned, all of which ended well."""
    assert all(end.status == 0 for end in ends), ends
    return [end.value for end in ends]


@pytest.mark.timeout(60)
def test_links_are_taken_for_equal_if_bursts_differ(forks):
    ends = forks.run(2, probed_when_busy, hosts=[1, 1])
    one, other = map(as_model, values(ends))
    assert one == other
    assert {*one.leaving, *one.entering} == {one.byte}
    assert (one.start, one.message) == (MODEL.start, MODEL.message)


@pytest.mark.timeout(60)
def test_the_world_is_probed_when_it_meets(forks):
    ends = forks.having(UNISONO_PROBE="1").run(2, model_here, hosts=[1, 1])
    models = [as_model(model) for model, *_ in values(ends)]
    assert models[0] == models[1]
    assert len(models[0].leaving) == 2


@pytest.mark.timeout(60)
def test_all_ranks_probe_and_have_the_same_model(forks):
    ends = forks.run(4, probed_here, hosts=[1, 2, 1])
    models, groups, texts, sums = zip(*values(ends), strict=True)
    models, groups = (list(map(as_model, found)) for found in (models, groups))
    assert len(set(models)) == 1
    assert len(models[0].leaving) == 3
    assert groups[0] == groups[2] == models[0].of([0, 1])
    assert groups[1] == groups[3] == models[0].of([1, 2])
    assert "as probed at the start" in texts[0]
    assert sums == (4.0,) * 4


@pytest.mark.timeout(60)
def test_one_rank_that_does_not_want_it_is_enough(forks):
    env = [{"UNISONO_PROBE": "1"}, {"UNISONO_PROBE": "0"}]
    found = values(forks.run(2, model_here, hosts=[1, 1], env=env))
    assert [model for model, *_ in found] == [None, None]
    assert "without a probe" in found[0][2]


def test_the_variable_switches_it_off(monkeypatch):
    assert os.environ["UNISONO_PROBE"] == "0"
    assert not links.wanted()
    monkeypatch.delenv("UNISONO_PROBE")
    assert links.wanted()


def test_of_many_hosts_each_asks_few():
    assert [len(links._shifts(n)) for n in (2, 8, 9, 1000)] == [1, 7, 4, 10]
