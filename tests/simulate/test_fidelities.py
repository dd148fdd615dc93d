"""The three fidelities against each other, against arithmetic and the bound."""

import json
import math

import numpy as np
import pytest

import unisono
from unisono.errors import BadArgument, BadTopology, NotOffered, ScheduleError
from unisono.runtime.plan.select import choose
from unisono.schedule import copy_step
from unisono.schedule.collective import COLLECTIVES
from unisono.simulate import (
    CodecModel,
    candidates,
    compare,
    fitted,
    least_time,
    simulate,
    sweep,
    to_chrome,
)
from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.simulate.events import loaded
from unisono.simulate.messages import chunk_bytes, messages
from unisono.simulate.steps import by_steps
from unisono.topology import parse

ALPHA, BETA, OVERHEAD = 2e-6, 1 / 25e9, 0.5e-6  # of the preset "switch"
MB = 1 << 20


def alone(fidelity, **more):
    return simulate("ring", "switch:8", MB, fidelity, **more).time


@pytest.mark.parametrize("fidelity", ["closed", "steps", "events"])
@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_ring_on_a_switch_matches_the_hand_calculation(fidelity, n):
    hop = OVERHEAD + ALPHA + MB / n * BETA
    found = simulate("ring", f"switch:{n}", MB, fidelity)
    assert found.time == pytest.approx(2 * (n - 1) * hop, rel=1e-5)
    assert found.exact


SYMMETRIC = [
    "ring",
    "recursive_doubling",
    "rabenseifner",
    "circulant",
    "swing",
    "chain",
]


@pytest.mark.parametrize("algorithm", SYMMETRIC)
@pytest.mark.parametrize("topology", ["switch:8", "switch:16", "full:8", "ring:8"])
def test_three_fidelities_agree_where_ranks_step_together(algorithm, topology):
    times = [
        simulate(algorithm, topology, MB, fidelity).time
        for fidelity in ("closed", "steps", "events")
    ]
    assert times == pytest.approx([times[1]] * 3, rel=1e-6)


@pytest.mark.parametrize(
    "topology", ["switch:6", "dgx-h100:2", "cloud:3x2", "torus:3x3"]
)
@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "barrier"])
def test_nothing_is_faster_than_the_cut_bound(collective, topology):
    where = parse(topology)
    for algorithm in candidates(collective, where):
        for fidelity in ("steps", "events"):
            found = simulate(algorithm, where, MB, fidelity, collective=collective)
            assert found.time >= found.bound * (1 - 1e-5), algorithm
            assert 0 < found.optimum <= 1


def test_bound_is_reached_where_theory_says_so():
    large = 1 << 34
    for collective, algorithm in (
        ("all_reduce", "circulant"),
        ("all_gather", "ring"),
        ("reduce_scatter", "circulant"),
        ("all_to_all", "direct"),
        ("scatter", "direct"),
    ):
        found = simulate(algorithm, "switch:8", large, "steps", collective=collective)
        assert found.optimum > 0.999, collective
    torus = simulate("torus", "torus:4x4", large, "steps")
    assert torus.optimum > 0.99


def test_bound_by_hosts_is_tighter_than_one_by_ranks():
    where = parse("dgx-h100:4,nics=1")
    bound = least_time(COLLECTIVES["all_reduce"], where, 1 << 30)
    card = where.wiring.links.bandwidth.min()
    assert bound == pytest.approx(2 * 3 / 4 * (1 << 30) / card, rel=1e-3)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("broadcast", 1), ("scatter", 3 / 4), ("gather", 3 / 4), ("all_to_all", 3 / 4)],
)
def test_bounds_of_rooted_and_other_collectives(collective, factor):
    bound = least_time(COLLECTIVES[collective], parse("switch:4"), 1e12)
    assert bound == pytest.approx(factor * 1e12 * BETA, rel=1e-6)


def test_dependencies_of_events_are_those_of_the_schedule():
    for collective, algorithm, n in (
        ("all_reduce", "ring", 5),
        ("all_reduce", "direct", 4),
        ("all_reduce", "dissemination:carry", 7),
        ("all_reduce", "double_tree", 9),
        ("all_reduce", "hierarchical", 12),
        ("all_to_all", "bruck", 6),
        ("reduce", "tree:radix=4", 11),
    ):
        schedule = unisono.schedule(collective, algorithm, n=n)
        world = SimulatedWorld.of(parse(f"switch:{n}"), Conditions())
        simulator = loaded(schedule, world, chunk_bytes(schedule, 1000))
        step, src, dst, *_ = simulator.messages()
        number = {
            key: i
            for i, key in enumerate(
                zip(step.tolist(), src.tolist(), dst.tolist(), strict=True)
            )
        }
        owner = [number[i, t.src, t.dst] for i, s in enumerate(schedule) for t in s]
        due = schedule.dependencies()
        wanted = {
            (owner[a], owner[b])
            for a, b in zip(due.before.tolist(), due.after.tolist(), strict=True)
        }
        edges = simulator.edges()
        found = {(int(e) // step.size, int(e) % step.size) for e in edges}
        assert found == wanted, algorithm


def test_flows_on_one_link_get_fair_shares():
    """Two flows share a link, one of them has a narrow link of its own besides."""
    gather = unisono.schedule("gather", "naive", n=3)
    found = simulate(gather, "switch:3", 3 * MB, "events", slow={"1>switch": 0.25})
    slow = MB / (0.25 / BETA)
    assert found.time == pytest.approx(slow + OVERHEAD + ALPHA, rel=1e-3)
    end = found.timeline.end[found.timeline.src == 2][0]
    assert end == pytest.approx(MB / (0.75 / BETA) + OVERHEAD + ALPHA, rel=1e-3)


def test_flows_that_end_leave_their_share_to_others():
    gather = unisono.schedule("gather", "naive", n=3)
    late = simulate(gather, "switch:3", 3 * MB, "events", delays={1: 20e-6})
    alone_until = 20e-6
    left = MB - alone_until / BETA  # of the one that began first
    first = alone_until + 2 * left * BETA
    whole = 2 * MB * BETA
    end = late.timeline.end[late.timeline.src == 2][0]
    assert end == pytest.approx(first + OVERHEAD + ALPHA, rel=1e-3)
    assert late.time == pytest.approx(whole + OVERHEAD + ALPHA, rel=1e-3)


def test_carried_bytes_equal_those_of_the_cost():
    schedule = unisono.schedule("all_reduce", "rabenseifner", n=13)
    sent = schedule.cost(13 * 1000).sent
    for fidelity in ("steps", "events"):
        found = simulate(schedule, "switch:13", 13 * 1000, fidelity)
        assert found.carried[:13] == pytest.approx(sent)
        assert found.utilisation.max() <= 1
        assert found.busiest(1)[0][1] == pytest.approx(found.utilisation.max())


@pytest.mark.parametrize("fidelity", ["steps", "events"])
def test_straggler_is_on_the_critical_path(fidelity):
    found = simulate("ring", "switch:8", MB, fidelity, delays={5: 1e-3})
    assert found.path[0].src == 5
    assert found.path[0].start >= 1e-3
    assert found.time > 1e-3 + alone(fidelity) / 2
    assert found.path[-1].end == pytest.approx(found.time)


@pytest.mark.parametrize("fidelity", ["steps", "events"])
def test_slow_link_decides_and_is_named(fidelity):
    found = simulate("ring", "ring:8", MB, fidelity, slow={"2>3": 0.01})
    assert found.time > 10 * simulate("ring", "ring:8", MB, fidelity).time
    assert "2>3" in {hop.link for hop in found.path}


@pytest.mark.parametrize("fidelity", ["steps", "events"])
def test_failed_link_is_routed_around(fidelity):
    whole = simulate("ring", "ring:6", MB, fidelity)
    found = simulate("ring", "ring:6", MB, fidelity, failed=["2>3"])
    assert found.time > whole.time
    link = parse("ring:6").wiring.links_named("2>3")
    assert found.carried[link].sum() == 0
    assert whole.carried[link].sum() > 0


def test_ranks_that_cannot_be_reached_are_named():
    with pytest.raises(BadTopology, match="no path from rank 2"):
        simulate("ring", "switch:4", MB, failed=["2>switch"])


@pytest.mark.parametrize("fidelity", ["closed", "steps", "events"])
def test_codec_saves_bytes_and_costs_time(fidelity):
    half = alone(fidelity, codec=CodecModel(0.5))
    hops = 14
    saved = hops * MB / 8 * BETA / 2
    assert alone(fidelity) - half == pytest.approx(saved, rel=1e-6)
    costly = alone(fidelity, codec=CodecModel(0.5, encode=1e-10, decode=2e-10))
    assert costly - half == pytest.approx(hops * MB / 8 * 3e-10, rel=1e-6)


@pytest.mark.parametrize("fidelity", ["closed", "steps", "events"])
def test_reduction_cost_is_added_as_given(fidelity):
    more = alone(fidelity, reduce=1e-9) - alone(fidelity, reduce=0.0)
    assert more == pytest.approx(7 * MB / 8 * 1e-9, rel=1e-6)


@pytest.mark.parametrize("fidelity", ["steps", "events"])
def test_chain_with_segments_is_a_pipeline(fidelity):
    def time(segments):
        return simulate(
            "chain:segments=1",
            "switch:8",
            64 * MB,
            fidelity,
            collective="broadcast",
            segments=segments,
        ).time

    assert time(1) == pytest.approx(7 * (64 * MB * BETA + ALPHA + OVERHEAD), rel=1e-6)
    steps = 7 + 32 - 1
    expected = steps * (2 * MB * BETA + ALPHA + OVERHEAD)
    assert time(32) == pytest.approx(expected, rel=0.05)


def test_many_sizes_at_once_equal_one_by_one():
    where, sizes = parse("dgx-h100:2"), [16 << 10, MB, 64 * MB]
    for algorithm in ("ring", "direct", "hierarchical", "tree"):
        together = [r.time for r in sweep(algorithm, where, sizes)]
        single = [simulate(algorithm, where, b, "steps").time for b in sizes]
        assert together == pytest.approx(single, rel=1e-6)


def test_long_steps_in_parts_give_the_same_result(monkeypatch):
    from unisono.simulate import messages as module

    schedule = unisono.schedule("all_reduce", "hierarchical:levels=4x4", n=16)
    sizes = chunk_bytes(schedule, 1003)
    whole = [messages(s, 16, sizes, None) for s in schedule]
    monkeypatch.setattr(module, "BLOCK", 20)
    for step, other in zip(schedule, whole, strict=True):
        parts = messages(step, 16, sizes, None)
        assert parts.pair.tolist() == other.pair.tolist()
        assert parts.nbytes == pytest.approx(other.nbytes)
        if other.reduced is not None:
            assert parts.reduced == pytest.approx(other.reduced)


def test_million_ranks_have_a_closed_form():
    found = simulate("circulant", "switch:1000000", 1 << 30)
    assert found.fidelity == "closed"
    n, rounds = 1_000_000, 40
    expected = rounds * (OVERHEAD + ALPHA) + 2 * (n - 1) / n * (1 << 30) * BETA
    assert found.time == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda: simulate("double_tree", "switch:1001", 8, "closed"),
            "no closed form was found",
        ),
        (lambda: simulate("ring", "fat-tree:4", 8, "closed"), "not one of a family"),
        (lambda: simulate("ring", "switch:4", 8, "closed", delays=[1]), "symmetry"),
        (
            lambda: simulate(
                unisono.schedule("all_reduce", "ring", n=4), "switch:4", 8, "closed"
            ),
            "needs the name",
        ),
    ],
)
def test_missing_closed_form_is_reported(call, why):
    with pytest.raises(NotOffered, match=why):
        call()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fidelity": "exact"}, "nearest"),
        ({"nbytes": -1}, "expected 0 or more"),
        ({"nbytes": "lots"}, "size 'lots'"),
        ({"delays": {9: 1.0}}, "ranks are 0..7"),
        ({"delays": {1: -1.0}}, "expected 0 or more"),
        ({"slow": {"0>switch": 0.0}}, "expected above 0"),
        ({"slow": {"0>1": 0.5}}, "no such link"),
        ({"failed": ["nothing"]}, "no such link"),
        ({"reduce": -1.0}, "expected 0 or more"),
        ({"segments": 0.5}, "whole number"),
        ({"segments": 0}, "1 or more"),
        ({"collective": "all_reduec"}, "nearest: all_reduce"),
    ],
)
def test_bad_options_are_refused(options, why):
    call = {"what": "ring", "topology": "switch:8", "nbytes": 8} | options
    with pytest.raises(BadArgument, match=why):
        simulate(**call)


@pytest.mark.parametrize("codec", [(0,), (math.nan,), (1, -1.0), (1, 0, math.inf)])
def test_invalid_codecs_are_refused(codec):
    with pytest.raises(BadArgument, match="codec"):
        CodecModel(*codec)


def test_schedule_of_another_world_size_is_refused():
    with pytest.raises(BadTopology, match="has 8 ranks"):
        simulate(unisono.schedule("all_reduce", "ring", n=4), "switch:8", 8)


@pytest.mark.parametrize("fidelity", ["steps", "events"])
@pytest.mark.parametrize(("src", "dst", "chunk"), [(0, 4, 0), (-1, 0, 0), (0, 1, 9)])
def test_schedule_with_ranks_outside_its_world_is_refused(fidelity, src, dst, chunk):
    wrong = unisono.schedule("broadcast", "tree", n=4).but(
        make=lambda: [copy_step(chunk, src, dst)]
    )
    with pytest.raises(ScheduleError, match="step 1"):
        simulate(wrong, "switch:4", 8, fidelity)


def test_auto_fidelity_depends_on_the_topology_alone():
    """Another model must not come with a delay: it may change the time by half."""
    assert simulate("ring", "switch:4", 8).fidelity == "steps"
    assert simulate("ring", "switch:4", 8, delays=[1e-3]).fidelity == "steps"
    streams = parse("switch:4").but(streams=True)
    assert simulate("ring", streams, 8).fidelity == "events"


@pytest.mark.sweep
@pytest.mark.parametrize("collective", ["all_gather", "all_reduce", "all_to_all"])
def test_tiny_changes_change_a_time_by_what_they_cost(collective):
    where = parse("dgx-h100:2")
    link = where.wiring.link_name(0)
    for name in candidates(collective, where):
        for nbytes in (4096, 1 << 24):
            ask = {"collective": collective}
            usual = simulate(name, where, nbytes, **ask).time
            late = simulate(name, where, nbytes, **ask, delays={0: 1e-9}).time
            assert usual - 1e-15 <= late <= usual + 2e-9, name
            slow = simulate(name, where, nbytes, **ask, slow={link: 0.999999}).time
            assert slow == pytest.approx(usual, rel=1e-5), name


def test_one_rank_takes_no_time():
    for fidelity in ("closed", "steps", "events"):
        found = simulate("ring", "switch:1", MB, fidelity)
        assert (found.time, found.busbw, found.optimum) == (0, 0, 1)


def test_zero_bytes_cost_latency_alone():
    for fidelity in ("closed", "steps", "events"):
        found = simulate("ring", "switch:4", 0, fidelity)
        assert found.time == pytest.approx(6 * (ALPHA + OVERHEAD))


def test_names_are_fitted_to_hosts_and_shapes():
    assert fitted("hierarchical", parse("dgx-h100:4")) == "hierarchical:levels=8x4"
    assert fitted("hierarchical:by=direct/ring", parse("cloud:3x2")) == (
        "hierarchical:levels=2x3,by=direct/ring"
    )
    assert fitted("hierarchical", parse("switch:8")) == "hierarchical"
    assert fitted("torus", parse("torus:4x2")) == "torus:shape=4x2"
    assert fitted("ring", parse("dgx-h100:4")) == "ring"


def test_results_have_text_and_json():
    found = simulate("ring", "dgx-h100:1", "256M")
    assert "256 MiB on dgx-h100:1 (steps)" in str(found)
    assert "of the optimum" in str(found)
    result = json.loads(json.dumps(found.as_dict()))
    assert result["critical_path"][0]["step"] == 1
    assert result["busbw"] == pytest.approx(found.algbw * 2 * 7 / 8)


def test_trace_has_two_slices_and_an_arrow_per_message():
    found = simulate("ring", "switch:4", MB, "events")
    result = json.loads(to_chrome(found))
    slices = [e for e in result["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 2 * found.messages == 2 * 24
    assert {e["ph"] for e in result["traceEvents"]} == {"M", "X", "s", "f", "C"}
    last = max(e["ts"] + e["dur"] for e in slices)
    assert last == pytest.approx(found.time * 1e6, abs=1e-3)  # a nanosecond
    sends = [e for e in slices if e["name"].startswith("to ")]
    assert len(sends) == found.messages
    assert all(e["name"] == f"to {e['args']['peer']}" for e in sends)


def test_closed_form_has_no_trace():
    with pytest.raises(BadArgument, match="no messages"):
        to_chrome(simulate("ring", "switch:4", MB, "closed"))


def test_crossovers_lie_between_the_sizes_where_the_winner_changes():
    where = parse("switch:16")
    result = compare("all_reduce", ["recursive_doubling", "ring"], where, [8, 1 << 30])
    (cross,) = result.crossovers()
    assert (cross.loser, cross.winner) == ("recursive_doubling", "ring")
    latency = (30 - 4) * (ALPHA + OVERHEAD)
    slope = (4 - 2 * 15 / 16) * BETA
    assert cross.nbytes == pytest.approx(latency / slope, rel=1e-3)


# What is known to win where.


def winner(topology, nbytes, *names, collective="all_reduce"):
    where = parse(topology)
    return [simulate(a, where, nbytes, collective=collective).time for a in names]


@pytest.mark.sweep
def test_hierarchy_beats_flat_ring_beats_naive_rabenseifner_with_one_card_a_host():
    times = winner(
        "dgx-h100:256,nics=1", 256 * MB, "hierarchical", "ring", "rabenseifner"
    )
    assert times == sorted(times)
    assert times[2] > 3 * times[1]


@pytest.mark.parametrize("topology", ["switch:64", "dgx-h100:8", "cloud:4x8"])
def test_recursive_doubling_wins_at_one_kilobyte_of_those_without_levels(topology):
    where = parse(topology)
    names = [a for a in candidates("all_reduce", where) if "hier" not in a]
    names = [a for a in names if "radix=" not in a]
    result = compare("all_reduce", names, where, [1024])
    best = result.ranking(0)[0].time
    assert result.results["recursive_doubling"][0].time <= best * (1 + 1e-9)


def test_circulant_beats_folded_rabenseifner_at_thirteen():
    for nbytes in (64 << 10, MB, 256 * MB):
        circulant, folded = winner("switch:13", nbytes, "circulant", "rabenseifner")
        assert circulant < folded


def test_ring_is_fastest_on_a_ring_and_torus_on_a_torus():
    ring, halving = winner("ring:16", 256 * MB, "ring:both", "rabenseifner")
    assert ring < halving
    torus, ring = winner("torus:4x4", 256 * MB, "torus", "ring")
    assert torus < ring


def test_swing_beats_halving_and_doubling_on_a_ring():
    swing, halving = winner("ring:16", MB, "swing", "halving_doubling")
    assert swing < halving


def test_steps_are_deterministic():
    world = SimulatedWorld.of(parse("dgx-h100:2"), Conditions())
    schedule = unisono.schedule("all_reduce", "direct", n=16)
    sizes = chunk_bytes(schedule, 12345)
    one, two = (by_steps(schedule, world, sizes).clock for _ in range(2))
    assert np.array_equal(one, two)


CHOSEN_ON = ["dgx-h100:2", "cloud:3x2", "wan:3", "dgx-h100:32", "switch:200"]


@pytest.mark.cases(9)
@pytest.mark.quick(name=["dgx-h100:32"])
@pytest.mark.parametrize("name", CHOSEN_ON)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_the_runtime_chooses_is_simulated(collective, name):
    where = parse(name)
    known = candidates(collective, where)
    ask = {"n": where.n, "named": None, "hosts": where.wiring.host.tolist()}
    for nbytes in (8, 64 << 10, 64 << 20):
        for reproducible in (True, False):  # by rules; by the model between hosts
            found = choose(collective, nbytes, **ask, reproducible=reproducible)
            assert found.algorithm in known
            assert not found.runner_up or found.runner_up in known
