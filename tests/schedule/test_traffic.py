"""What crosses between hosts is counted as one would count it by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import Schedule, schedule
from unisono.algorithms import library
from unisono.errors import BadArgument
from unisono.schedule import traffic as counting
from unisono.schedule.counts import distinct
from unisono.schedule.traffic import ROWS, traffic

law = settings(max_examples=60)
KEYS = [key for key in library() if key[0] != "barrier"]


def by_hand(made: Schedule, hosts: list[int]) -> tuple[list[float], list[float]]:
    """What leaves and what enters each host, transfer by transfer."""
    leaving, entering = [0.0] * (max(hosts) + 1), [0.0] * (max(hosts) + 1)
    for step in made:
        for t in step:
            if hosts[t.src] != hosts[t.dst]:
                leaving[hosts[t.src]] += 1 / made.contract.chunks_per_rank
                entering[hosts[t.dst]] += 1 / made.contract.chunks_per_rank
    return leaving, entering


@law
@given(st.sampled_from(KEYS), st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_traffic_is_the_sum_over_transfers(key, hosts):
    made = schedule(*key, len(hosts))
    counted = traffic(made, hosts)
    leaving, entering = by_hand(made, hosts)
    assert counted.leaving == pytest.approx(leaving)
    assert counted.entering == pytest.approx(entering)
    cost = made.cost()
    assert counted.taken.sum(axis=0) / counted.unit == pytest.approx(cost.received)
    assert counted.added.sum(axis=0) / counted.unit == pytest.approx(cost.reduced)


@law
@given(
    st.sampled_from(["ring", "direct", "tree", "rabenseifner"]),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.integers(1, 6),
)
def test_split_schedule_has_the_traffic_of_the_whole_split(name, hosts, segments):
    made = schedule("all_reduce", name, len(hosts))
    foretold = traffic(made, hosts).split(segments)
    found = traffic(made.split(segments), hosts)
    assert foretold.unit == found.unit
    for rows in ROWS[:-2]:
        assert np.array_equal(getattr(foretold, rows), getattr(found, rows)), rows
    assert (foretold.peers >= found.peers).all()


def test_one_rank_per_host_sends_everything_between_hosts():
    made = schedule("all_reduce", "ring", 5)
    counted = traffic(made, range(5))
    assert counted.leaving == pytest.approx(made.cost().sent)
    assert (counted.peers == 1).all()


def test_one_host_sends_nothing_between_hosts():
    counted = traffic(schedule("all_reduce", "ring", 5), [0] * 5)
    assert not counted.leaving.any()
    assert not counted.peers.any()


def test_barrier_sends_messages_without_bytes():
    counted = traffic(schedule("barrier", "direct", 4), [0, 0, 1, 1])
    assert not counted.entering.any()
    assert (counted.peers == 2).all()


@pytest.mark.parametrize("hosts", [[0], [0] * 5, [0, 0, 0, -1], [0.5] * 4])
def test_invalid_hosts_are_refused(hosts):
    with pytest.raises(BadArgument):
        traffic(schedule("all_reduce", "ring", 4), hosts)


@pytest.mark.parametrize(
    ("collective", "name", "depth"),
    [
        ("all_reduce", "ring", 6),
        ("all_reduce", "naive", 1),
        ("all_reduce", "direct", 2),
        ("broadcast", "chain:segments=8", 3),
        ("broadcast", "naive", 1),
    ],
)
def test_depth_is_the_way_of_one_chunk(collective, name, depth):
    made = schedule(collective, name, 4)
    assert traffic(made, range(4)).depth == depth
    assert traffic(made, range(4)).split(4).depth == depth
    assert traffic(made, (0,) * 4).depth == 0


def test_mutual_peers_send_to_each_other():
    ring = traffic(schedule("all_reduce", "ring", 4), range(4))
    pairs = traffic(schedule("all_reduce", "recursive_doubling", 4), range(4))
    assert not ring.mutual.any()
    assert (pairs.mutual == 1).all()


@pytest.mark.parametrize(
    ("name", "hosts", "fan"),
    [
        ("chain", (0, 1, 2, 3), 1),
        ("double_tree", (0, 1, 2, 3), 2),
        ("naive", (0, 1, 2, 3), 3),
        ("naive", (0, 0, 1, 2), 2),
        ("naive", (0, 0, 0, 0), 0),
    ],
)
def test_fan_is_with_how_many_ranks_of_other_hosts_one_exchanges_messages(
    name, hosts, fan
):
    assert traffic(schedule("broadcast", name, 4), hosts).fan == fan


def test_fan_keeps_no_more_than_the_different_pairs_of_each_batch(monkeypatch):
    """A ring of many has n pairs, however many transfers."""
    sizes = []

    def counted(values):
        sizes.append(values.size)
        return distinct(values)

    made = schedule("all_reduce", "ring", 8)
    steps = list(made)
    monkeypatch.setattr(counting, "distinct", counted)
    monkeypatch.setattr(counting, "MOST_AT_ONCE", 16)
    assert counting._fan(steps, np.arange(8)) == 1
    assert max(sizes[:-1]) <= 16
    assert sizes[-1] == 7 * 8
