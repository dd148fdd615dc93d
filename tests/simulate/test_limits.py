"""Two directions of a link, streams, computing meanwhile; and what is refused first."""

import numpy as np
import pytest

from unisono.errors import BadArgument, BadTopology, NotOffered
from unisono.schedule import copy_step, reduce_step
from unisono.schedule.collective import ALL_REDUCE
from unisono.schedule.schedule import from_steps
from unisono.schedule.step import together
from unisono.simulate import Compute, api, compare, limits, simulate
from unisono.simulate.candidates import schedule_for
from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.simulate.events import by_events
from unisono.topology import parse
from unisono.topology.files import loads

MIB = 1 << 20
PLAIN = "switch:{n},bandwidth=1e9,latency=0s"


def switch(n, **changes):
    return parse(PLAIN.format(n=n)).but(**{"overhead": 0.0, **changes})


@pytest.mark.parametrize("fidelity", ["steps", "events", "closed"])
def test_link_keeps_a_fraction_of_its_bandwidth_while_both_directions_are_busy(
    fidelity,
):
    where = switch(4, duplex=0.8)
    ring = simulate("ring", where, 4 * MIB, fidelity, reduce=0)
    assert ring.time == pytest.approx(6 * MIB / 0.8e9, rel=1e-6)
    one_way = simulate("naive", where, MIB, fidelity, collective="gather")
    alone = simulate("naive", switch(4), MIB, fidelity, collective="gather")
    assert one_way.time == pytest.approx(alone.time, rel=1e-9)


def test_bandwidth_is_restored_when_one_direction_ends():
    """Rank 1 sends twice as much as it gets: the second half goes at the full rate."""
    text = """
    ranks = 2
    duplex = 0.5
    [kinds.wire]
    latency = 0.0
    bandwidth = 1e9
    [[links]]
    between = [[0], [1]]
    kind = "wire"
    """
    where = loads(text)
    both = simulate("direct", where, 2 * MIB, "events", collective="all_to_all")
    assert both.time == pytest.approx(MIB / 0.5e9)
    late = simulate(
        "direct",
        where,
        2 * MIB,
        "events",
        collective="all_to_all",
        delays={1: 0.5 * MIB / 1e9},
    )
    # Half of the first is through before the second begins; they share for as long as
    # the rest of the first takes; what is left of the second has the link alone.
    assert late.time == pytest.approx((0.5 + 1.0 + 0.5) * MIB / 1e9)


def test_every_link_of_a_preset_has_its_other_direction():
    for name in ("switch:5", "ring:4", "torus:3x4", "dgx-h100:2,nics=1", "wan:3x2"):
        wiring = parse(name).wiring
        links, twins = wiring.links, wiring.twins
        assert (twins >= 0).all(), name
        assert (twins[twins] == np.arange(len(links))).all()
        assert (links.src[twins] == links.dst).all()
        assert (links.dst[twins] == links.src).all()


def test_one_way_link_has_no_reverse():
    where = loads(
        """
        ranks = 3
        [kinds.wire]
        latency = 0.0
        bandwidth = 1e9
        [[links]]
        from = [0]
        to = [1]
        kind = "wire"
        [[links]]
        from = [1]
        to = [2]
        kind = "wire"
        [[links]]
        between = [[2], [0]]
        kind = "wire"
        """
    )
    names = [where.wiring.link_name(k) for k in range(4)]
    other = {
        name: names[twin] if twin >= 0 else ""
        for name, twin in zip(names, where.wiring.twins, strict=True)
    }
    assert other == {"0>1": "", "1>2": "", "2>0": "0>2", "0>2": "2>0"}


def test_streams_send_the_messages_of_a_root_concurrently():
    seconds = MIB / 1e9
    in_steps = simulate("tree", switch(4), MIB, "events", collective="broadcast")
    assert in_steps.time == pytest.approx(2 * seconds)
    streams = switch(4, streams=True)
    found = simulate("tree", streams, MIB, collective="broadcast")
    assert found.fidelity == "events"
    # Both of the root's messages share its link, and one of them has to go on.
    assert found.time == pytest.approx(3 * seconds)


def test_streams_keep_the_order_of_messages_to_one_rank():
    found = simulate("ring", switch(5, streams=True), 5 * MIB, "events", reduce=0)
    assert found.time == pytest.approx(8 * MIB / 1e9)


def doubled(**more):
    """Four ranks by recursive doubling: in the second step each sends two chunks."""
    where = switch(4, **more)
    how = {"collective": "all_gather"}
    return simulate("recursive_doubling", where, 4 * MIB, "events", **how).time


def test_with_streams_what_ranks_have_leaves_before_what_they_get():
    """Ranks 1 and 3 have one of two chunks from the beginning: nobody rests."""
    assert doubled() == pytest.approx(3 * MIB / 1e9)
    assert doubled(streams=True) == pytest.approx(3 * MIB / 1e9)


def test_with_streams_a_chunk_waits_for_those_before_it_but_not_for_its_step():
    """Rank 1 gets chunk 1 first, but chunk 0 is of an earlier step, and long."""
    steps = [
        copy_step(0, src=0, dst=1),
        copy_step(1, src=2, dst=1),
        copy_step([0, 1, 2], src=1, dst=3),
    ]
    made = from_steps(ALL_REDUCE, 4, steps, num_chunks=3)
    world = SimulatedWorld.of(switch(4, streams=True), Conditions())
    line = by_events(made, world, np.array([3e9, 1e9, 2e9])).timeline
    rows = zip(line.src, line.nbytes / 1e9, line.start, line.end, strict=True)
    sent = [row[1:] for row in sorted(rows, key=lambda row: row[2]) if row[0] == 1]
    assert np.array(sent) == pytest.approx(
        np.array([[2, 0, 2], [3, 4, 7], [1, 7, 8]], float), abs=1e-6
    )


def test_chunks_of_a_step_cost_their_sender_one_message():
    """Ranks 1 and 3 have two messages one after the other, as steps have."""
    way = doubled(streams=True, overhead=1.0) - doubled(streams=True)
    assert way == pytest.approx(2.0, abs=1e-2)


def test_chunks_that_are_added_up_are_one_message_whatever_is_copied_beside_them():
    """Sums go together, each copy alone, in any order of the transfers of a step."""
    world = SimulatedWorld.of(switch(2, streams=True), Conditions())
    for order in ("rcr", "crr", "rrc", "ccr"):
        steps = [
            (reduce_step if kind == "r" else copy_step)(chunk, src=0, dst=1)
            for chunk, kind in enumerate(order)
        ]
        made = from_steps(ALL_REDUCE, 2, [together(steps)], num_chunks=3)
        line = by_events(made, world, np.array([1.0, 2.0, 4.0])).timeline
        sums = sum(1 << c for c, kind in enumerate(order) if kind == "r")
        copies = [1 << c for c, kind in enumerate(order) if kind == "c"]
        assert sorted(line.nbytes.tolist()) == sorted([sums, *copies])


def test_messages_of_streams_are_counted_before_they_are_made(monkeypatch):
    """Two chunks that are copied are two messages, two that are added are one."""
    seen = []
    monkeypatch.setattr(limits, "enough", lambda _, nbytes, __: seen.append(nbytes))
    monkeypatch.setattr(limits, "_LOOKED_AT", 1)
    copies = copy_step(np.arange(2), src=0, dst=1)
    sums = reduce_step(np.arange(2), src=0, dst=1)
    other = reduce_step(2, src=2, dst=1)
    for step, per_step in (
        (copies, {False: 1, True: 2}),
        (sums, {False: 1, True: 1}),
        (together([sums, other, copies]), {False: 2, True: 4}),
    ):
        made = from_steps(ALL_REDUCE, 4, [step], num_chunks=3)
        for streams, count in per_step.items():
            world = SimulatedWorld.of(switch(4, streams=streams), Conditions())
            limits.Load("", world).add(step)
            assert seen[-1] == count * limits.BYTES_A_MESSAGE
            assert limits.Extent.of(made, streams=streams).messages == count


def test_each_message_of_streams_changes_rates(monkeypatch):
    """Of twice as many messages from rank to rank twice as many begin and end."""
    monkeypatch.setattr(limits, "_LOOKED_AT", 1)
    src, dst = np.array([0, 1, 2]), np.array([3, 3, 3])
    changes = []
    for streams, chunks in ((False, 2), (True, 1), (True, 2)):
        world = SimulatedWorld.of(switch(4, streams=streams), Conditions())
        load = limits.Load("", world)
        load.add(copy_step(np.arange(chunks)[:, None], src=src, dst=dst))
        changes.append(load.changes)
    assert changes[0] == changes[1] > 0
    assert changes[2] == 2 * changes[1]


@pytest.mark.parametrize("duplex", [0.0, -1.0, 1.5, float("nan")])
def test_duplex_fraction_out_of_range_is_refused(duplex):
    with pytest.raises(BadTopology, match="duplex"):
        switch(4, duplex=duplex)


# Beside computing


def test_time_after_the_computation_is_exposed():
    alone = simulate("ring", switch(4), MIB)
    half = simulate("ring", switch(4), MIB, compute=alone.time / 2)
    assert half.time == pytest.approx(alone.time)
    assert half.exposed == pytest.approx(alone.time / 2)
    assert simulate("ring", switch(4), MIB, compute=1.0).exposed == 0.0
    assert alone.exposed == alone.time


def test_computing_slows_a_collective_for_as_long_as_it_lasts():
    alone = simulate("ring", switch(4), MIB, "events")
    beside = simulate(
        "ring", switch(4), MIB, "events", compute=Compute(alone.time, share=0.25)
    )
    assert beside.time == pytest.approx(alone.time * 1.75)
    assert beside.exposed == pytest.approx(alone.time * 0.75)
    assert beside.path[-1].end == pytest.approx(beside.time)
    assert beside.timeline.end.max() == pytest.approx(beside.time)
    assert (np.diff(np.sort(beside.timeline.start)) >= 0).all()
    assert "exposed" in str(beside)
    assert beside.as_dict()["exposed"] == pytest.approx(beside.exposed)
    slow = Compute(10.0, share=0.5)
    assert simulate("ring", switch(4), MIB, compute=slow).time == 2 * alone.time


@pytest.mark.parametrize("wrong", [{"seconds": -1.0}, {"share": 0.0}, {"share": 1.1}])
def test_computation_out_of_range_is_refused(wrong):
    with pytest.raises(BadArgument, match="compute"):
        Compute(**wrong)


# Before it takes minutes


def test_slow_event_simulation_is_refused_and_names_the_alternative(monkeypatch):
    monkeypatch.setattr(limits, "MOST_CHANGES", 10_000)
    with pytest.raises(NotOffered, match="fidelity='steps'"):
        simulate("direct", "switch:80", MIB, "events")
    unequal = simulate("direct", "switch:80", MIB, delays={3: 1e-3})
    assert unequal.fidelity == "steps"
    nobody_shares = simulate("direct", "full:80", MIB, "events")
    assert nobody_shares.fidelity == "events"


def test_simulation_that_exceeds_memory_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(limits, "memory_free", lambda: 1 << 30)
    with pytest.raises(NotOffered, match="of memory, and 1 GiB are free"):
        simulate("direct", "switch:16384", MIB, "steps")
    names = ["recursive_doubling", "direct"]
    both = compare("all_reduce", names, parse("switch:4096"), [1024])
    assert list(both.results) == names[:1]
    assert "of memory" in both.left_out["direct"]


def test_events_beyond_memory_are_refused(monkeypatch):
    monkeypatch.setattr(limits, "memory_free", lambda: 1 << 20)
    with pytest.raises(NotOffered, match="of memory"):
        simulate("ring", "switch:64", MIB, "events")


@pytest.mark.parametrize(
    ("algorithm", "where", "reason"),
    [
        ("ring", "switch:16384", "of memory"),
        ("ring", "dgx-h100:4096", "of memory"),
        ("hierarchical", "dgx-h100:1024", "million transfers"),
    ],
)
def test_events_that_would_be_too_many_are_refused_before_any_step_is_made(
    monkeypatch, algorithm, where, reason
):
    """None of the steps of the large schedule is made, nor is it given to anything."""
    monkeypatch.setattr(limits, "memory_free", lambda: 16 << 30)
    monkeypatch.setattr(api, "by_events", None)
    with pytest.raises(NotOffered, match=reason):
        simulate(algorithm, where, MIB, "events")


@pytest.mark.parametrize("algorithm", ["ring", "direct", "recursive_doubling"])
def test_extent_of_a_large_schedule_is_foreseen(algorithm):
    small, larger, large = (
        limits.Extent.of(schedule_for("all_reduce", algorithm, parse(f"switch:{n}")))
        for n in (16, 32, 256)
    )
    foreseen = small.grown(larger, 8)
    assert foreseen.largest == pytest.approx(large.largest, rel=0.3)
    assert foreseen.messages == pytest.approx(large.messages, rel=0.3)


def test_merging_close_events_changes_little():
    """Of 9,120 flows at once, those that end within 1e-5 of each other end together."""
    result = {"fidelity": "events", "collective": "all_gather"}
    uneven = simulate("direct", "switch:96", 96 * 10_417 + 5, **result)
    even = simulate("direct", "switch:96", 96 * 10_417, **result)
    assert uneven.time > even.time
    assert uneven.time == pytest.approx(even.time, rel=2e-4)


def test_steps_that_would_take_too_long_are_refused_before_any_is_made():
    with pytest.raises(NotOffered, match=r"billion transfers.*fidelity='closed'"):
        simulate("ring", "switch:131072", "64M", "steps")
    assert simulate("ring", "switch:131072", "64M", "closed").time > 0
