"""The probe of links between hosts, and the model that is made from it."""

import os
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from unisono.runtime.plan import predict
from unisono.runtime.plan.predict import MODEL, CostModel, fitted, small_calls
from unisono.runtime.plan.select import choose
from unisono.runtime.plan.simulated import simulated
from unisono.runtime.world import bursts, links
from unisono.transports import tcp, ucx

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
        predict.predicted(*call, 1, hosts, 0, true) for call in small_calls(len(hosts))
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
    for seconds in ([1e-3, 1e-5] * 2, [1e-5, 1e-3] * 2, [1e-9] * 4):
        found = fitted(FOUR, {}, seconds)
        assert found.start > 0
        assert found.message > 0
        assert found.leaving == (MODEL.byte,) * 4  # nothing was heard of the links


def test_one_small_call_that_took_too_long_counts_less_than_the_others():
    """Of two times it would be half of what is known."""
    true = CostModel(start=10e-6, message=40e-6)
    exact = [predict.predicted(*call, 1, FOUR, 0, true) for call in small_calls(4)]
    for late in range(len(exact)):
        seconds = [1.5 * t if k == late else t for k, t in enumerate(exact)]
        found = fitted(FOUR, {}, seconds)
        step = found.start + found.message
        assert step == pytest.approx(true.start + true.message, rel=0.5)
        assert found.message > found.start


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


def model_of(told):
    """A model as a rank has told it."""
    if told is None:
        return None
    lists = {k: tuple(v) for k, v in told.items() if isinstance(v, list)}
    return CostModel(**told | lists)


def tell_models(comm):
    """The model of this rank, of a group of it, and the text that tells."""
    session = comm.core.session
    group = comm.split(comm.rank % 2)
    models = session.links, session.links_between(group.core.world_ranks)
    text = comm.explain("all_reduce", np.zeros(1 << 18, np.float32))
    total = comm.all_reduce(np.ones(1 << 18, np.float32))
    return *(model and asdict(model) for model in models), text, float(total[0])


def as_it_met(rank):
    with rank.init(timeout_s=60) as comm:
        return tell_models(comm)


def probed_here(rank):
    """A probe that is taken for good even if the machine is busy."""
    links.BUDGET_S = 1e9
    bursts.LONGEST = 1 << 16
    with rank.init(timeout_s=60) as comm:
        comm.core.session.links = links.probed(comm, 60.0)
        return tell_models(comm)


def probed_with(rank, folder, tcp):
    """A probe of hosts whose congestion control is in files of their ranks' names."""
    with rank.init(timeout_s=60) as comm:
        assert not comm.core.session.tcp  # emulated hosts are on one machine
        comm.core.session.tcp = tcp
        links._CONGESTION = Path(folder) / str(comm.rank)
        return asdict(links.probed(comm, 60.0))


class Counting:
    """What a probe does, in calls and bursts."""

    def __init__(self, links):
        self.calls, self.bursts, self.asked = [], [], 0
        self._seconds, self._burst = links._seconds, links._burst
        links._seconds, links._burst = self.seconds, self.burst
        self._most = links.Ranks.most
        links.Ranks.most = lambda ranks, values: self.most(ranks, values)

    def most(self, ranks, values):
        self.asked += 1
        return self._most(ranks, values)

    def seconds(self, ranks, *call):
        self.calls.append(call)
        return self._seconds(ranks, *call)

    def burst(self, comm, dst, src, sent, taken, timeout_s):
        self.bursts.append((dst, src, sent.size, taken.size))
        return self._burst(comm, dst, src, sent, taken, timeout_s)


def probed_without_time(rank):
    """A probe that has no time for anything, on rank 1 alone; and what it does."""
    with rank.init(timeout_s=60) as comm:
        links.BUDGET_S = 0.0 if comm.rank == 1 else 1e9
        made = Counting(links)
        model = asdict(links.probed(comm, 60.0))
        return model, made.calls, made.bursts, made.asked


def probed_unequal(rank):
    """A probe of three hosts, of which none seems to send slowly, or the second one."""
    links.BUDGET_S = 1e9
    bursts.LONGEST = 1 << 16
    made, found = Counting(links), []

    def as_if(slow):
        def burst(comm, dst, src, sent, taken, timeout_s):
            made.burst(comm, dst, src, sent, taken, timeout_s)
            return 1e-4 + taken.size * (1e-6 if src == slow else 1e-7)

        return burst

    with rank.init(timeout_s=60) as comm:
        for slow in (None, 1):
            made.bursts.clear()
            links._burst = as_if(slow)
            model = asdict(links.probed(comm, 60.0))
            found.append((model, [(dst, src) for dst, src, *_ in made.bursts]))
    return found


def probed_when_busy(rank):
    """A probe in which bursts of the same pair differ a hundredfold."""
    exchanged = links._exchanged
    links._exchanged = lambda *given, **more: (exchanged(*given, **more)[0], 100.0)
    links.BUDGET_S = 1e9
    bursts.LONGEST = 1 << 16
    with rank.init(timeout_s=60) as comm:
        return asdict(links.probed(comm, 60.0))


def values_of(ends):
    assert all(end.status == 0 for end in ends), ends
    return [end.value for end in ends]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.timeout(60)
def test_without_time_all_ranks_make_the_same_few_calls_and_bursts(forks, n):
    """One rank alone has no time, and it has none for what others begin."""
    told = values_of(forks.run(n, probed_without_time, hosts=(1,) * n))
    models = {model_of(model) for model, *_ in told}
    assert len(models) == 1
    assert models.pop().start != MODEL.start  # the call by which they agree
    for place, (_, calls, made, asked) in enumerate(told):
        assert calls == []
        assert asked == 6
        peers = [(place + 1) % n, (place - 1) % n]
        sizes = [[bursts.SHORT] * 2] * 2 + [[bursts.FIRST] * 2]
        assert made == [peers + size for size in sizes]


@pytest.mark.timeout(60)
def test_other_pairs_are_asked_only_where_rates_differ(forks):
    told = values_of(forks.run(3, probed_unequal, hosts=(1, 1, 1)))
    for place in range(3):
        after, before = (place + 1) % 3, (place - 1) % 3
        one, both = ({tuple(p) for p in told[place][k][1]} for k in (0, 1))
        assert one == {(after, before)}
        assert both == {(after, before), (before, after)}
    model = model_of(told[0][1][0])
    assert model.leaving == pytest.approx([1e-7, 1e-6, 1e-7])
    assert model.entering == pytest.approx([1e-7] * 3)
    assert len({model_of(found[1][0]) for found in told}) == 1


@pytest.mark.timeout(60)
def test_busy_hosts_have_equal_links_and_the_latencies_of_their_small_calls(forks):
    ends = forks.run(2, probed_when_busy, hosts=(1, 1))
    one, other = map(model_of, values_of(ends))
    assert one == other
    assert len({*one.leaving}) == len({*one.entering}) == 1
    assert one.start != MODEL.start


def test_latency_of_busy_hosts_decides_on_small_calls():
    """A slow rate with the latency of an ordinary network chooses too many steps."""
    pairs = {(a, b): MBIT / 200 for a in FOUR for b in FOUR if a != b}
    true = predict.all_alike(4, MBIT / 200, CostModel(start=180e-6, message=60e-6))
    seconds = [predict.predicted(*call, 1, FOUR, 0, true) for call in small_calls(4)]
    ask = {"n": 4, "named": None, "reproducible": False, "hosts": FOUR}
    measured = fitted(FOUR, pairs, seconds, alike=100.0)
    worst = dict.fromkeys((measured, predict.all_alike(4, MBIT / 200)), 1.0)
    for what, nbytes in product(("all_reduce", "broadcast"), (1 << 10, 4 << 10)):
        best = choose(what, nbytes, **ask, model=true).predicted
        for model, regret in worst.items():
            found = choose(what, nbytes, **ask, model=model).algorithm
            took = simulated(what, found, 1, FOUR, nbytes, true)
            worst[model] = max(regret, took / best)
    as_measured, one_rate = worst.values()
    assert as_measured <= 1.02
    assert one_rate > 1.1


@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20])
def test_with_bbr_nobody_sends_to_several_if_that_gains_little(nbytes):
    """As measured on four hosts of 200 Mbit/s."""
    plain = predict.all_alike(4, MBIT / 191, CostModel(start=1e-4, message=4e-5))
    bbr = replace(plain, shared=predict.SHARED_BY_BBR)
    ask = {"n": 4, "named": None, "reproducible": False, "hosts": FOUR}
    names = [
        choose("broadcast", nbytes, **ask, model=model).algorithm
        for model in (plain, bbr)
    ]
    assert names == ["double_tree:segments=8", "chain:segments=8"]


@pytest.mark.parametrize(
    ("text", "place", "tcp", "shared"),
    [
        ("bbr\n", 1, True, True),
        ("bbr\n", 2, True, True),
        ("bbr\n", 2, False, False),  # as over UCX, which has its own
        ("cubic\n", 2, True, False),
    ],
)
@pytest.mark.timeout(60)
def test_one_rank_with_bbr_is_enough(forks, tmp_path, text, place, tcp, shared):
    """Rank 2 is not the first of its host; the others cannot tell what they have."""
    (tmp_path / str(place)).write_text(text)
    ends = forks.run(3, probed_with, str(tmp_path), tcp, hosts=(1, 2))
    models = [model_of(told) for told in values_of(ends)]
    assert models[0] == models[1] == models[2]
    assert models[0].shared == (predict.SHARED_BY_BBR if shared else 0.0)


def test_bytes_of_ucx_do_not_go_by_this_systems_tcp(monkeypatch):
    monkeypatch.setattr(ucx, "_native", SimpleNamespace(Ucx=object))
    monkeypatch.setattr(ucx, "describe", str)
    assert not ucx.Ucx().wires().tcp
    assert tcp.Tcp().wires().tcp


def test_rates_within_the_spread_of_bursts_are_taken_for_equal():
    pairs = {(0, 1): 1e-8, (1, 0): 1e-8, (0, 2): 2e-8, (2, 0): 2e-8}
    pairs |= {(1, 2): 2e-8, (2, 1): 2e-8}
    at_rest, busy = (fitted((0, 1, 2), pairs, [1e-4] * 4, alike=a) for a in (1.3, 3.0))
    assert len(set(at_rest.leaving)) == 2
    assert len(set(busy.leaving)) == 1


@pytest.mark.timeout(60)
def test_the_world_is_probed_when_it_meets(forks):
    ends = forks.having(UNISONO_PROBE="1").run(2, as_it_met, hosts=(1, 1))
    models = [model_of(value[0]) for value in values_of(ends)]
    assert models[0] == models[1]
    assert len(models[0].leaving) == 2


@pytest.mark.timeout(60)
def test_all_ranks_probe_and_have_the_same_model(forks):
    ends = forks.run(4, probed_here, hosts=(1, 2, 1))
    models, groups, texts, sums = zip(*values_of(ends), strict=True)
    models, groups = [*map(model_of, models)], [*map(model_of, groups)]
    assert len(set(models)) == 1
    assert models[0].byte_inside > 0 < models[0].added_byte
    assert models[0].byte_inside != MODEL.byte_inside
    assert models[0].added_byte != MODEL.added_byte
    assert len(models[0].leaving) == 3
    assert groups[0] == groups[2] == models[0].of([0, 1])
    assert groups[1] == groups[3] == models[0].of([1, 2])
    assert "as probed at the start" in texts[0]
    assert sums == (4.0,) * 4


@pytest.mark.timeout(60)
def test_one_rank_that_does_not_want_it_is_enough(forks):
    env = [{"UNISONO_PROBE": probes} for probes in ("1", "0")]
    told = values_of(forks.run(2, as_it_met, hosts=(1, 1), env=env))
    assert [model for model, *_ in told] == [None, None]
    assert "without a probe" in told[0][2]


def test_the_variable_switches_it_off(monkeypatch):
    assert os.environ["UNISONO_PROBE"] == "0"
    assert not links.wanted()
    monkeypatch.delenv("UNISONO_PROBE")
    assert links.wanted()


PAIR = 0, 1


def bursts_of(byte, latency, each):
    """What is found of a link, in bursts that may take so long together."""
    found = bursts.Bursts({PAIR: latency})
    for _ in range(bursts.LONGER):
        sizes, _ = found.longer(each, [PAIR])
        found.add(sizes, {p: latency + size * byte for p, size in sizes.items()})
    return found.rates[PAIR]


@pytest.mark.parametrize("gbit", [0.1, 1, 10, 100, 400])
def test_latency_is_not_taken_for_bytes(gbit):
    byte = 8e-9 / gbit
    assert bursts_of(byte, 1e-5, 3e-3) == pytest.approx(byte, rel=0.01)
    assert bursts_of(byte, 0.0, 3e-3) == pytest.approx(byte, rel=0.01)


@pytest.mark.parametrize("gbit", [10, 40, 100])
def test_long_latency_is_told_from_bytes_by_fewer_bursts(gbit):
    """Short bursts take a third of the time there is, nearly all of it latency."""
    found = bursts.Bursts({PAIR: 5e-4})
    assert found.longer(1.5e-3, [PAIR]) == ({PAIR: bursts.FIRST}, 1)
    assert found.longer(1.0, [PAIR]) == ({PAIR: bursts.FIRST}, bursts.REPEATS)
    assert bursts_of(8e-9 / gbit, 5e-4, 1.5e-3) == pytest.approx(8e-9 / gbit, rel=0.01)


def test_bursts_that_tell_little_of_the_rate_are_not_taken_for_nothing():
    found = bursts.Bursts({PAIR: 2e-4})
    found.add({PAIR: 1 << 20}, {PAIR: 1.9e-4})  # quicker than the short one
    least = bursts.LEAST_BYTES * 1.9e-4 / (1 << 20)
    assert found.rates[PAIR] == pytest.approx(least, rel=0.01)
    found.add({PAIR: 1 << 14}, {PAIR: 1.0})  # bytes may have taken none of that
    assert found.rates[PAIR] == pytest.approx(1.0 / (1 << 14), rel=0.01)


def test_rate_of_busy_hosts_is_half_way_to_the_usual_one():
    """The burst of 16 KiB took as long as the short one: anything may be true."""
    found = bursts.Bursts({PAIR: 10e-3})
    found.add({PAIR: bursts.FIRST}, {PAIR: 10e-3})
    slowest = 10e-3 / bursts.FIRST
    assert found.rates[PAIR] == pytest.approx((slowest * MODEL.byte) ** 0.5, rel=0.01)


def test_bursts_get_little_longer_as_long_as_little_is_known():
    """The first one may have taken less by chance than the time of its bytes."""
    found = bursts.Bursts({PAIR: 2e-3})
    found.add({PAIR: bursts.FIRST}, {PAIR: 2e-3})
    (size,) = found.longer(6e-3, [PAIR])[0].values()
    assert size == pytest.approx(4e-3 / (bursts.LEAST_BYTES * 2e-3) * bursts.FIRST)


def test_bursts_do_not_get_longer_at_once_by_what_a_full_bucket_lets_through():
    """16 KiB pass in no time, where the bytes after them may take long."""
    found = bursts.Bursts({PAIR: 1e-5})
    sizes = []
    for _ in range(bursts.LONGER):
        made, _ = found.longer(1.0, [PAIR])
        found.add(made, dict.fromkeys(made, 1.1e-5))
        sizes += made.values()
    assert sizes == [bursts.FIRST, 16 * bursts.FIRST, 256 * bursts.FIRST]


def test_bursts_that_may_take_no_time_are_not_made_longer():
    found = bursts.Bursts({PAIR: 1e-4})
    found.add({PAIR: bursts.FIRST}, {PAIR: 2e-4})
    assert found.longer(0.0, [PAIR]) == ({}, 1)
    assert found.longer(-1.0, [PAIR]) == ({}, 1)


def test_half_of_the_time_is_left_for_longer_bursts():
    """16 KiB take little of their half; the next burst has half of what is left."""
    left, took, given = 10e-3, 0.0, []

    def exchanged(sizes, repeats, expected):
        nonlocal took
        given.append(expected * repeats)
        nbytes = bursts.SHORT if sizes is None else sizes[PAIR]
        lasts = 1e-5 + nbytes * 8e-9  # 1 Gbit/s
        took += repeats * lasts
        return {PAIR: lasts}

    bursts.grown(bursts.Bursts({}), 1, lambda: left - took, exchanged)
    assert given[1:] == pytest.approx([5e-3, 4.8e-3], rel=0.1)
    assert 0.5 * left < took <= left


def test_a_short_burst_says_nothing_of_hosts_that_longer_ones_told_of():
    """By chance 16 KiB seemed to take no time from host 0 to 2, and from 3 to 1."""
    found = bursts.Bursts({(a, b): 1e-4 for a in FOUR for b in FOUR if a != b})
    long = {(0, 1): 1e-8, (1, 2): 1e-8, (2, 0): 1e-8}
    short = {(0, 2): 1e-10, (3, 1): 1e-10, (0, 3): 2e-8}
    for pairs, size in (long, 1 << 20), (short, bursts.FIRST):
        took = {pair: 1e-4 + size * byte for pair, byte in pairs.items()}
        found.add(dict.fromkeys(pairs, size), took)
    assert set(found.told()) == {*long, (3, 1), (0, 3)}
    assert found.told().items() <= found.rates.items()


@pytest.mark.parametrize("n", [2, 3, 8, 9, 32, 33, 100])
def test_small_calls_are_of_two_kinds_and_tell_both_costs(n):
    hosts = tuple(range(n))
    true = CostModel(start=70e-6, message=30e-6)
    seconds = [predict.predicted(*call, 1, hosts, 0, true) for call in small_calls(n)]
    for known in range(1 if n == 2 else 2, len(seconds) + 1):
        found = predict.per_step(hosts, seconds[:known], MODEL)
        if n == 2:
            assert sum(found) == pytest.approx(100e-6)
        else:
            assert found == pytest.approx((70e-6, 30e-6), rel=0.05)


def test_of_many_hosts_each_asks_few():
    assert [len(links._shifts(n)) for n in (2, 8, 9, 1000)] == [1, 7, 4, 10]
