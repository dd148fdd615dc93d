"""The choice between hosts by simulation of those that the model finds quickest."""

from dataclasses import replace

import numpy as np
import pytest

from unisono.algorithms.choices import chosen_from, spelled
from unisono.runtime.plan import select, simulated
from unisono.runtime.plan.predict import MODEL, all_alike, predicted
from unisono.schedule.collective import COLLECTIVES
from unisono.simulate import simulate
from unisono.topology.files import loads

FOUR = (0, 1, 2, 3)
TWO_BY_TWO = (0, 0, 1, 1)
RATES = replace(all_alike(4, 1e-9), added_byte=5e-10, byte_inside=1e-12)


def forget():
    for kept in (select._across_hosts, select._expected):
        kept.cache_clear()


def on_a_switch(model):
    """Four ranks with the same links, as the simulator has them."""
    return loads(
        f'ranks = 4\nname = "four"\nswitches = ["hub"]\nstreams = true\n'
        f"overhead = {model.message}\nreduce = {model.added_byte}\n"
        f"[kinds.link]\nlatency = {model.start / 2}\nbandwidth = {1 / model.byte}\n"
        '[[links]]\nbetween = [[0, 1, 2, 3], ["hub"]]\nkind = "link"\n'
    )


@pytest.mark.parametrize(
    ("what", "name"), [("broadcast", "chain:segments=8"), ("all_gather", "direct")]
)
def test_times_are_those_of_the_simulator(what, name):
    """Nothing is added up, and both directions are alike."""
    model = replace(RATES, mutual=0.0)
    there = simulate(name, on_a_switch(model), 1 << 20, "events", collective=what).time
    assert simulated.simulated(what, name, 1, FOUR, 1 << 20, model) == pytest.approx(
        there, rel=1e-6
    )


def test_adding_goes_on_while_a_pipeline_sends():
    """The model takes the one after the other."""
    ask = "reduce", "chain:segments=8", 1, FOUR, 16 << 20, RATES
    assert simulated.simulated(*ask) < 0.8 * predicted(*ask)


def test_a_receiver_pays_for_its_messages_as_a_sender_does():
    slow = replace(RATES, message=1e-3)
    gathered, scattered = (
        simulated.simulated(what, "direct", 1, FOUR, 4096, slow)
        for what in ("gather", "scatter")
    )
    assert gathered == pytest.approx(scattered, rel=0.01)
    assert gathered > 3e-3


def test_ranks_that_send_to_each_other_are_slower():
    ask = "all_gather", "direct", 1, FOUR, 64 << 20
    alone = simulated.simulated(*ask, replace(RATES, mutual=0.0))
    assert simulated.simulated(*ask, RATES) == pytest.approx(1.1 * alone, rel=0.01)


def test_messages_inside_a_host_do_not_cost_what_others_do():
    """Of three messages of each rank two leave its host."""
    found = simulated._message("all_gather", "direct", TWO_BY_TWO, MODEL)
    assert found == pytest.approx((2 * MODEL.message + MODEL.start_inside) / 3)
    assert simulated._message("all_gather", "direct", FOUR, MODEL) == MODEL.message


@pytest.mark.parametrize("what", COLLECTIVES)
def test_few_candidates_are_simulated_and_the_quickest_is_chosen(what, monkeypatch):
    times = {}

    def counted(*ask):
        name, segments = ask[1:3]
        return times.setdefault(spelled(name, segments), simulated.simulated(*ask))

    monkeypatch.setattr(select, "simulated", counted)
    most = select.MOST_SIMULATED
    many = [((0, 1) * 16, most // 2)] if what == "all_gather" else []
    for hosts, few in ((FOUR, most), (TWO_BY_TWO, most), *many):
        forget()
        times.clear()
        found = select._across_hosts(what, 1 << 20, hosts, MODEL)
        assert 2 <= len(times) <= few
        assert found.predicted == times[found.algorithm]
        assert found.predicted <= (1 + select.SIMILAR) * min(times.values())


def test_similar_sizes_are_simulated_once(monkeypatch):
    asked = []

    def counted(*ask):
        asked.append(ask)
        return simulated.simulated(*ask)

    monkeypatch.setattr(select, "simulated", counted)
    forget()
    first = select._across_hosts("all_reduce", 1 << 20, FOUR, MODEL)
    count = len(asked)
    second = select._across_hosts("all_reduce", (1 << 20) + 4096, FOUR, MODEL)
    assert len(asked) == count > 0
    assert first.algorithm == second.algorithm
    select._across_hosts("all_reduce", 3 << 20, FOUR, MODEL)
    assert len(asked) > count


def test_rounded_sizes_are_near_and_in_order():
    sizes = np.unique(np.geomspace(1, 1 << 34, 4000).astype(int)).tolist()
    rounded = [select._rounded(size) for size in sizes]
    assert rounded == sorted(rounded)
    assert all(abs(r / s - 1) <= 1 / 16 for r, s in zip(rounded, sizes, strict=True))
    assert [select._rounded(size) for size in range(17)] == list(range(17))


def test_many_ranks_choose_by_the_model_alone(monkeypatch):
    monkeypatch.setattr(select, "simulated", pytest.fail)
    hosts = tuple(range(simulated.MOST_RANKS + 1))
    forget()
    found = select._across_hosts("all_gather", 1 << 20, hosts, MODEL)
    times = {
        spelled(*c): predicted("all_gather", *c, hosts, 1 << 20)
        for c in chosen_from("all_gather", hosts)
    }
    assert found.predicted == times[found.algorithm]


def test_the_choice_is_the_same_each_time():
    """Ranks choose each for itself."""
    asks = [("reduce", 12_345_678, FOUR, MODEL), ("gather", 99, TWO_BY_TWO, MODEL)]
    once = [select._across_hosts(*ask) for ask in asks]
    forget()
    simulated._network.cache_clear()
    simulated._steps.cache_clear()
    assert [select._across_hosts(*ask) for ask in asks] == once
