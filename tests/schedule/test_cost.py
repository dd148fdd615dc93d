"""Costs: laws that hold for every schedule, whatever its algorithm."""

import json
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from unisono.algorithms import library
from unisono.errors import BadArgument
from unisono.schedule import Cost, Schedule

law = settings(max_examples=40)
VARIANTS = [
    ("broadcast", "tree:radix=4"),
    ("broadcast", "chain:segments=9"),
    ("broadcast", "tree+circulant"),
    ("reduce", "ring+tree"),
    ("all_gather", "ring:both"),
    ("all_reduce", "dissemination:carry"),
    ("all_reduce", "rabenseifner:early=1"),
    ("all_reduce", "parameter_server:sharded"),
    ("all_to_all", "bruck:radix=3"),
    ("all_to_all", "direct:rotate"),
]
CASES = list(library()) + VARIANTS
cases = st.sampled_from(CASES)
worlds = st.integers(1, 9)
counts = st.one_of(st.just(0), st.just(1), st.integers(0, 100))
SHARED = [k for k in CASES if k[0] not in ("broadcast", "reduce", "all_reduce")]


def scheduled(case: tuple[str, str], n: int) -> Schedule:
    what, name = case
    return unisono.schedule(what, name, n)


def total(schedule: Schedule, sizes: np.ndarray) -> float:
    """What all transfers between different ranks move, one by one."""
    return sum(float(sizes[t.chunk]) for s in schedule for t in s if t.src != t.dst)


def sized(cost: Cost) -> np.ndarray:
    """All that is measured in the unit of the count."""
    singles = [cost.span, cost.work, cost.bound.span, cost.bound.work]
    return np.concatenate([singles, cost.sent, cost.received, cost.reduced])


@law
@given(cases, worlds, st.integers(0, 50))
def test_sizes_scale_with_the_count_and_the_rest_does_not(case, n, each):
    made = scheduled(case, n)
    unit, some = made.cost(), made.cost(each * made.contract.chunks_per_rank)
    scale = each * made.contract.chunks_per_rank
    assert sized(some) == pytest.approx(sized(unit) * scale)
    for same in ("steps", "rounds", "ports", "messages", "transfers"):
        assert getattr(some, same) == getattr(unit, same)


def recounted(schedule: Schedule, sizes: np.ndarray) -> list[float | list[float]]:
    """Rounds, span, work, and by rank sent, received, reduced, one by one."""
    rounds = span = work = 0.0
    totals = np.zeros((3, schedule.n))
    for step in schedule:
        here = np.zeros((3, schedule.n))
        apart = [t for t in step if t.src != t.dst]
        for t in apart:
            here[0, t.src] += sizes[t.chunk]
            here[1, t.dst] += sizes[t.chunk]
        for t in step:
            here[2, t.dst] += sizes[t.chunk] * t.reduces
        pairs = {(t.src, t.dst) for t in apart}
        busy = Counter(end for s, d in pairs for end in (("out", s), ("in", d)))
        rounds += max(busy.values(), default=0)
        span, work = span + here[:2].max(), work + here[2].max()
        totals += here
    return [rounds, span, work, *totals.tolist()]


@law
@given(cases, worlds, counts)
def test_counts_are_those_found_transfer_by_transfer(case, n, count):
    made = scheduled(case, n)
    found, sizes = made.cost(count), made.contract.chunk_sizes(count)
    sizes = np.resize(sizes, made.num_slots)
    result = [found.rounds, found.span, found.work]
    by_rank = [a.tolist() for a in (found.sent, found.received, found.reduced)]
    assert [*result, *by_rank] == recounted(made, sizes)


@law
@given(cases, worlds, st.one_of(st.none(), counts))
def test_totals_sent_and_received_are_equal(case, n, count):
    cost = scheduled(case, n).cost(count)
    assert cost.sent.sum() == pytest.approx(cost.received.sum())
    assert cost.sent.shape == cost.received.shape == cost.reduced.shape == (n,)


@law
@given(cases, worlds, st.one_of(st.none(), counts))
def test_table_of_pairs_sums_to_what_is_sent_and_received(case, n, count):
    cost = scheduled(case, n).cost(count)
    assert cost.pairs.shape == (n, n)
    assert cost.pairs.sum(axis=1) == pytest.approx(cost.sent)
    assert cost.pairs.sum(axis=0) == pytest.approx(cost.received)
    assert not cost.pairs.diagonal().any()


@law
@given(st.sampled_from(SHARED), worlds, st.data())
def test_uneven_shares_move_as_many_elements_as_their_transfers_do(case, n, data):
    made = scheduled(case, n)
    shares = made.collective.chunk_multiple(n)
    result = data.draw(st.lists(counts, min_size=shares, max_size=shares))
    cost = made.cost(result)
    assert cost.sent.sum() == total(made, made.contract.chunk_sizes(result))
    assert cost.span >= cost.bound.span - 1e-9
    assert cost.work >= cost.bound.work - 1e-9


@law
@given(worlds, st.data())
def test_uneven_shares_reach_every_rank_once(n, data):
    result = data.draw(st.lists(counts, min_size=n, max_size=n))
    for what in ("all_gather", "reduce_scatter"):
        cost = unisono.schedule(what, "ring", n).cost(result)
        assert cost.sent.sum() == (n - 1) * sum(result)
    root = data.draw(st.integers(0, n - 1))
    scatter = unisono.schedule("scatter", "direct", n, root=root).cost(np.array(result))
    assert scatter.sent.sum() == scatter.sent[root] == sum(result) - result[root]
    assert scatter.span == scatter.bound.span


def test_uneven_all_to_all_moves_every_chunk_whose_owner_is_not_its_target():
    table = np.arange(9).reshape(3, 3)
    cost = unisono.schedule("all_to_all", "direct", 3).cost(table)
    away = table * (1 - np.eye(3))
    assert np.array_equal(cost.pairs, away)
    assert cost.sent.tolist() == away.sum(axis=1).tolist()
    assert cost.received.tolist() == away.sum(axis=0).tolist()


@law
@given(cases, worlds, st.one_of(st.none(), counts))
def test_counts_of_one_schedule_fit_together(case, n, count):
    made = scheduled(case, n)
    cost = made.cost(count)
    assert cost.steps == made.num_steps
    assert cost.messages <= cost.transfers == sum(len(s) for s in made)
    assert cost.steps * min(1, n - 1) <= cost.rounds <= cost.steps * cost.ports
    assert cost.ports <= max(0, n - 1)
    assert max(cost.sent.max(), cost.received.max()) <= cost.span + 1e-9
    assert cost.reduced.max() <= cost.work + 1e-9


@law
@given(st.sampled_from([k for k in CASES if "reduce" in k[0]]), worlds, counts)
def test_every_contribution_but_one_is_added(case, n, count):
    cost = scheduled(case, n).cost(count)
    assert cost.reduced.sum() >= (n - 1) * count


@law
@given(st.sampled_from([k for k in CASES if "reduce" not in k[0]]), worlds, counts)
def test_collectives_that_only_copy_have_no_work(case, n, count):
    cost = scheduled(case, n).cost(count)
    assert cost.work == cost.bound.work == 0
    assert not cost.reduced.any()


@pytest.mark.parametrize(("what", "name"), CASES)
def test_world_of_one_costs_nothing(what, name):
    cost = unisono.schedule(what, name, 1).cost(100)
    assert (cost.steps, cost.rounds, cost.messages, cost.transfers) == (0, 0, 0, 0)
    assert not sized(cost).any()
    assert set(cost.distance.values()) == {1.0}


@pytest.mark.parametrize("name", ["dissemination", "hierarchical"])
@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("count", [None, 1000])
def test_barrier_has_messages_but_no_bytes(name, n, count):
    cost = unisono.schedule("barrier", name, n).cost(count)
    assert cost.messages > 0
    assert cost.rounds >= (n - 1).bit_length()
    assert not sized(cost).any()


@pytest.mark.parametrize(("what", "name"), CASES)
def test_no_algorithm_beats_the_lower_bound(what, name):
    for n in range(2, 18):
        cost = unisono.schedule(what, name, n).cost()
        assert cost.rounds >= cost.bound.rounds
        assert cost.span >= cost.bound.span - 1e-9
        assert cost.work >= cost.bound.work - 1e-9
        assert min(cost.distance.values()) >= 1 - 1e-9


@pytest.mark.parametrize(
    ("what", "name", "term"),
    [
        ("all_gather", "circulant", "rounds"),
        ("all_gather", "circulant", "span"),
        ("all_reduce", "ring", "span"),
        ("all_reduce", "ring", "work"),
        ("scatter", "tree", "rounds"),
        ("all_to_all", "direct", "span"),
        ("barrier", "dissemination", "rounds"),
    ],
)
def test_some_algorithms_reach_the_bound(what, name, term):
    for n in range(2, 18):
        distance = unisono.schedule(what, name, n).cost().distance[term]
        assert distance == pytest.approx(1)


def test_distance_is_infinite_where_the_bound_is_zero():
    lap = unisono.schedule("all_gather", "ring", 3)
    cost = lap.cost([0, 0, 0])
    assert cost.distance["span"] == 1.0
    spoilt = lap.but(make=lambda: [s.backwards(swap_kinds=True) for s in lap])
    assert spoilt.cost([1, 1, 1]).distance["work"] == float("inf")


def test_cost_is_plain_data():
    cost = unisono.schedule("all_reduce", "ring", 4).cost(8)
    plain = json.loads(json.dumps(cost.as_dict()))
    assert plain["sent"] == cost.sent.tolist() == [12.0] * 4
    assert plain["lower_bound"] == {"rounds": 2, "span": 12.0, "work": 6.0}
    for name in ("steps", "rounds", "ports", "messages", "transfers", "span", "work"):
        assert plain[name] == getattr(cost, name)


def test_table_of_pairs_is_refused_where_it_would_be_too_large(monkeypatch):
    cost = unisono.schedule("all_gather", "ring", 5).cost()
    monkeypatch.setattr(sys.modules["unisono.schedule.cost"], "MAX_PAIRS", 4)
    with pytest.raises(BadArgument, match="n = 5, but the table is made for up to 4"):
        _ = cost.pairs


@pytest.mark.parametrize("count", [2**63, [2**62] * 4, [[1], [2, 3]], 1.5, "4"])
def test_counts_that_are_too_large_or_malformed_are_refused(count):
    with pytest.raises(BadArgument, match="count"):
        unisono.schedule("all_gather", "ring", 4).cost(count)


def test_counts_of_the_wrong_number_are_refused():
    with pytest.raises(BadArgument, match="expected 4 counts"):
        unisono.schedule("all_gather", "ring", 4).cost([1, 2, 3])
