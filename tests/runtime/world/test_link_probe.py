"""The probe of links between hosts, and the model that is made from it."""

import os
from itertools import product

import numpy as np
import pytest

from unisono.runtime.plan import predict
from unisono.runtime.plan.predict import MODEL, CostModel, fitted, small_calls
from unisono.runtime.plan.select import choose
from unisono.runtime.world import links
from unisono.testing import world_across

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


def model_here(comm):
    """The model of this rank, of a group of it, and the text that tells."""
    session = comm.core.session
    group = comm.split(comm.rank % 2)
    mine = session.links_between(group.core.world_ranks)
    text = comm.explain("all_reduce", np.zeros(1 << 18, np.float32))
    total = comm.all_reduce(np.ones(1 << 18, np.float32))
    return session.links, mine, text, float(total[0])


def probed_here(comm):
    """A probe that is taken for good even if the machine is busy."""
    links.BUDGET_S = 1e9
    links.LONGEST = 1 << 16
    comm.core.session.links = links.probed(comm, 60.0)
    return model_here(comm)


def probed_without_time(comm):
    """A probe that has no time for small calls."""
    links.BUDGET_S = 0.0
    return links.probed(comm, 60.0)


def probed_when_busy(comm):
    """A probe in which bursts of the same pair differ a hundredfold."""
    exchanged = links._exchanged
    links._exchanged = lambda *given: (exchanged(*given)[0], 100.0)
    links.BUDGET_S = 1e9
    links.LONGEST = 1 << 16
    return links.probed(comm, 60.0)


@pytest.mark.timeout(60)
def test_links_are_taken_for_equal_if_there_is_no_time_for_small_calls():
    one, other = world_across([1, 1]).run(probed_without_time)
    assert one == other
    assert {*one.leaving, *one.entering} == {one.byte}
    assert (one.start, one.message) == (MODEL.start, MODEL.message)


@pytest.mark.timeout(60)
def test_busy_hosts_have_equal_links_and_the_latencies_of_their_small_calls():
    one, other = world_across([1, 1]).run(probed_when_busy)
    assert one == other
    assert len({*one.leaving}) == len({*one.entering}) == 1
    assert one.start != MODEL.start


def test_latency_of_busy_hosts_decides_on_small_calls():
    """A slow rate with the latency of an ordinary network chooses too many steps."""
    pairs = {(a, b): MBIT / 200 for a in FOUR for b in FOUR if a != b}
    true = predict.all_alike(4, MBIT / 200, CostModel(start=180e-6, message=60e-6))
    seconds = [
        predict.predicted("all_gather", name, 1, FOUR, 0, true)
        for name in small_calls(4)
    ]
    ask = {"n": 4, "named": None, "reproducible": False, "hosts": FOUR}
    measured = fitted(FOUR, pairs, seconds, alike=100.0)
    worst = dict.fromkeys((measured, predict.all_alike(4, MBIT / 200)), 1.0)
    for what, nbytes in product(("all_reduce", "broadcast"), (1 << 10, 4 << 10)):
        best = choose(what, nbytes, **ask, model=true).predicted
        for model, regret in worst.items():
            found = choose(what, nbytes, **ask, model=model).algorithm
            took = predict.predicted(what, found, 1, FOUR, nbytes, true)
            worst[model] = max(regret, took / best)
    as_measured, one_rate = worst.values()
    assert as_measured <= 1.02
    assert one_rate > 1.1


def test_rates_within_the_spread_of_bursts_are_taken_for_equal():
    pairs = {(0, 1): 1e-8, (1, 0): 1e-8, (0, 2): 2e-8, (2, 0): 2e-8}
    pairs |= {(1, 2): 2e-8, (2, 1): 2e-8}
    at_rest, busy = (fitted((0, 1, 2), pairs, [1e-4] * 2, alike=a) for a in (1.3, 3.0))
    assert len(set(at_rest.leaving)) == 2
    assert len(set(busy.leaving)) == 1


@pytest.mark.timeout(60)
def test_the_world_is_probed_when_it_meets(monkeypatch):
    monkeypatch.setenv("UNISONO_PROBE", "1")
    models = [end[0] for end in world_across([1, 1]).run(model_here)]
    assert models[0] == models[1]
    assert len(models[0].leaving) == 2


@pytest.mark.timeout(60)
def test_all_ranks_probe_and_have_the_same_model():
    ends = world_across([1, 2, 1]).run(probed_here)
    models, groups, texts, sums = zip(*ends, strict=True)
    assert len(set(models)) == 1
    assert len(models[0].leaving) == 3
    assert groups[0] == groups[2] == models[0].of([0, 1])
    assert groups[1] == groups[3] == models[0].of([1, 2])
    assert "as probed at the start" in texts[0]
    assert sums == (4.0,) * 4


@pytest.mark.timeout(60)
def test_one_rank_that_does_not_want_it_is_enough():
    def of(rank):
        return {"UNISONO_PROBE": "0" if rank == 1 else "1"}

    ends = world_across([1, 1], env_of=of).run(model_here)
    assert [model for model, *_ in ends] == [None, None]
    assert "without a probe" in ends[0][2]


def test_the_variable_switches_it_off(monkeypatch):
    assert os.environ["UNISONO_PROBE"] == "0"
    assert not links.wanted()
    monkeypatch.delenv("UNISONO_PROBE")
    assert links.wanted()


def test_of_many_hosts_each_asks_few():
    assert [len(links._shifts(n)) for n in (2, 8, 9, 1000)] == [1, 7, 4, 10]
