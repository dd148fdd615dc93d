"""Hierarchies on ranks that live anywhere: right, and every byte crosses once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import Schedule, UnsupportedWorld, schedule
from unisono.algorithms.hierarchical import groups, led_by, telling
from unisono.errors import BadArgument
from unisono.schedule import COLLECTIVES
from unisono.schedule.placement import numbered
from unisono.schedule.traffic import Traffic, traffic

law = settings(max_examples=60)
placements = st.lists(st.integers(0, 4), min_size=1, max_size=16).map(numbered)
BY = {
    "all_reduce": ["", "direct", "naive", "direct/ring", "naive/recursive_doubling"],
    "broadcast": ["", "naive", "naive/chain:segments=1"],
    "reduce": ["", "naive", "naive/chain:segments=1"],
    "all_gather": ["", "direct", "direct/recursive_doubling"],
    "reduce_scatter": ["", "direct", "direct/halving_doubling"],
}
NAMED = {
    "2 x 4": (0, 0, 0, 0, 1, 1, 1, 1),
    "2 x 4 in turn": (0, 1, 0, 1, 0, 1, 0, 1),
    "5 + 4 + 4": (0,) * 5 + (1,) * 4 + (2,) * 4,
    "5 + 4 + 4 in turn": (0, 1, 2) * 4 + (0,),
    "4 + 1": (0, 0, 0, 0, 1),
    "1 + 4": (0, 1, 1, 1, 1),
    "mixed up": (0, 1, 1, 0, 2, 0, 1, 0),
    "1 + 1 + 1": (0, 1, 2),
}
every_placement = pytest.mark.parametrize("hosts", NAMED.values(), ids=NAMED)


def made_for(
    what: str, hosts: tuple[int, ...], by: str, segments: int = 1, root: int = 0
) -> Schedule:
    name = f"hierarchical:{telling(hosts)},by={by},segments={segments}"
    return schedule(what, name, len(hosts), root=root)


def crossing(what: str, hosts: tuple[int, ...], by: str, root: int = 0) -> Traffic:
    return traffic(made_for(what, hosts, by, root=root), hosts)


@pytest.mark.parametrize("what", COLLECTIVES)
@law
@given(hosts=placements, segments=st.integers(1, 4), data=st.data())
def test_hierarchical_keeps_its_contract_for_any_placement(what, hosts, segments, data):
    by = data.draw(st.sampled_from(BY.get(what, [""])))
    rooted = COLLECTIVES[what].rooted
    root = data.draw(st.integers(0, len(hosts) - 1)) if rooted else 0
    made = made_for(what, hosts, by, segments, root)
    assert (made.n, made.root) == (len(hosts), root)
    made.verify()
    if what == "all_reduce":
        assert made.consistency().same_bits_on_all_ranks


@law
@given(placements)
def test_equal_groups_get_the_shortest_name(hosts):
    result = telling(hosts)
    sizes = list(Counter(hosts).values())
    contiguous = list(hosts) == sorted(hosts)
    assert result.startswith("levels=" if contiguous else "hosts=")
    if contiguous and len(set(sizes)) > 1:
        assert result == "levels=" + "+".join(map(str, sizes))


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ((0, 0, 1, 1), "levels=2x2"),
        ((1, 1, 0, 0), "levels=2x2"),
        ((7, 7, 3), "levels=2+1"),
        ((0, 1, 0, 1), "hosts=0-1x2"),
        ((1, 0, 1, 0), "hosts=0-1x2"),
    ],
)
def test_hosts_may_have_any_numbers(hosts, message):
    assert telling(hosts) == message


@every_placement
@pytest.mark.parametrize("by", ["direct", "ring", "direct/ring"])
def test_all_reduce_loads_every_host_with_the_lower_bound(hosts, by):
    counted, num_hosts = crossing("all_reduce", hosts, by), len(set(hosts))
    least = 2 * (num_hosts - 1) / num_hosts
    assert counted.leaving == pytest.approx([least] * num_hosts)
    assert counted.entering == pytest.approx([least] * num_hosts)


@every_placement
def test_each_host_receives_only_chunks_it_lacks(hosts):
    n, sizes = len(hosts), np.bincount(hosts)
    elsewhere = (n - sizes) / n
    assert crossing("all_gather", hosts, "direct").entering == pytest.approx(elsewhere)
    back = crossing("reduce_scatter", hosts, "direct").leaving
    assert back == pytest.approx(elsewhere)
    to_all = crossing("all_to_all", hosts, "direct")
    assert to_all.entering == pytest.approx(sizes * elsewhere)
    assert to_all.leaving == pytest.approx(sizes * elsewhere)


@pytest.mark.cases(2)
@every_placement
def test_one_copy_enters_each_other_host_for_every_root(hosts):
    n, sizes = len(hosts), np.bincount(hosts)
    for root in range(n):
        others = np.arange(sizes.size) != hosts[root]
        for by in ("naive", "tree", "naive/chain"):
            down = crossing("broadcast", hosts, by, root).entering
            assert down == pytest.approx(others.astype(float))
            up = crossing("reduce", hosts, by, root).leaving
            assert up == pytest.approx(others.astype(float))
        shares = np.where(others, sizes / n, 0)
        down = crossing("scatter", hosts, "direct", root).entering
        assert down == pytest.approx(shares)
        up = crossing("gather", hosts, "direct", root).leaving
        assert up == pytest.approx(shares)


def test_rotating_ranks_to_the_root_would_split_hosts():
    """Why the root's host leads: the same schedule, turned, sends in vain."""
    hosts = NAMED["2 x 4"]
    turned = made_for("broadcast", hosts, "naive").rooted_at(2)
    assert turned.verify()
    assert traffic(turned, hosts).entering.sum() > 1
    assert crossing("broadcast", hosts, "naive", 2).entering.sum() == 1


@pytest.mark.parametrize("what", ["all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("hosts", [NAMED["4 + 1"], (0, 1, 0, 0, 0)])
def test_traffic_between_hosts_is_shared_by_all_ranks_of_a_host(what, hosts):
    made = made_for(what, hosts, "direct")
    table = made.cost().pairs
    alone = next(r for r, h in enumerate(hosts) if hosts.count(h) == 1)
    others = [r for r in range(5) if r != alone]
    assert table[alone, others] == pytest.approx([table[alone].sum() / 4] * 4)
    assert table[others, alone] == pytest.approx([table[:, alone].sum() / 4] * 4)


@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "all_to_all"])
def test_ranks_of_uneven_hosts_send_nearly_the_same(what):
    hosts = np.array(NAMED["5 + 4 + 4"])
    table = made_for(what, tuple(hosts.tolist()), "direct").cost().pairs
    table[hosts[:, None] == hosts] = 0
    for host in range(3):
        sent, received = table.sum(axis=1), table.sum(axis=0)
        for carried in (sent[hosts == host], received[hosts == host]):
            assert carried.max() < 2 * carried.mean()


@pytest.mark.parametrize("segments", [1, 2, 3, 8])
@every_placement
def test_segments_overlap_within_and_between_hosts(hosts, segments):
    """Segment j is in its phase t - j: all four phases go on at once."""
    made = made_for("all_reduce", hosts, "direct", segments)
    host, uneven = np.array(hosts), len(set(hosts)) < len(hosts)
    phases = [(False, True), (True, True), (True, False), (False, False)]
    phases = [p for p in phases if p[0] or uneven]
    steps = list(made)
    assert len(steps) == len(phases) + segments - 1
    for t, step in enumerate(steps):
        src, dst, chunk, adds, _ = step.flat()
        across = host[src] != host[dst]
        found = set(
            zip(
                (chunk % segments).tolist(), across.tolist(), adds.tolist(), strict=True
            )
        )
        due = {(j, *phases[t - j]) for j in range(segments) if 0 <= t - j < len(phases)}
        assert found == due


@law
@given(placements, st.data())
def test_group_of_the_leader_comes_first_and_no_group_is_split(hosts, data):
    sizes = list(Counter(hosts).values())
    leader = data.draw(st.integers(0, len(hosts) - 1))
    (turned,), order = led_by(len(hosts), [sizes], leader)
    group = np.repeat(np.arange(len(sizes)), sizes)
    assert order[0] == leader
    assert sorted(order.tolist()) == list(range(len(hosts)))
    assert [sizes[g] for g in dict.fromkeys(group[order].tolist())] == turned
    assert np.count_nonzero(np.diff(group[order])) == len(sizes) - 1


@pytest.mark.parametrize("root", range(26))
def test_root_is_the_leader_on_every_level(root):
    rack = np.repeat([0, 1, 2], [10, 8, 8])
    for what in ("broadcast", "gather"):
        made = schedule(what, "hierarchical:levels=2x5+4+4,by=naive", 26, root=root)
        made.verify()
        counted = traffic(made, rack)
        crossed = counted.entering if what == "broadcast" else counted.leaving
        wanted = np.array([10, 8, 8]) / (1 if what == "gather" else [10, 8, 8])
        wanted = wanted / (26 if what == "gather" else 1)
        wanted[rack[root]] = 0
        assert crossed == pytest.approx(wanted)


def test_bytes_between_two_hosts_of_four_match_for_each_schedule():
    """In buffers of 8 ranks: only a hierarchy does not mind where the ranks live."""
    good, bad = NAMED["2 x 4"], NAMED["2 x 4 in turn"]
    ring, direct = (schedule("all_reduce", name, 8) for name in ("ring", "direct"))
    found = {
        "ring, hosts in a row": (traffic(ring, good), ring.num_steps),
        "ring, hosts in turn": (traffic(ring, bad), ring.num_steps),
        "direct": (traffic(direct, good), direct.num_steps),
    }
    for placement in (good, bad):
        made = made_for("all_reduce", placement, "direct")
        link = traffic(made, placement)
        assert (link.entering.tolist(), made.num_steps) == ([1, 1], 4)
    link = {how: float(t.entering.max()) for how, (t, _) in found.items()}
    assert link == {
        "ring, hosts in a row": 1.75,
        "ring, hosts in turn": 7.0,
        "direct": 4.0,
    }
    assert [steps for _, steps in found.values()] == [14, 14, 2]


REFUSED = {
    "hosts=0.1.a.1": r"0\.1\.0\.1",
    "hosts=0.1.0.1,levels=2x2": "give one of them",
    "hosts=0.1.0.1,segments=0": "at least 1",
    "hosts=0.1.0.1,root=1": "nearest: ",
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_placement_is_refused_with_the_expected_form(message):
    with pytest.raises(BadArgument, match=REFUSED[message]):
        schedule("broadcast", f"hierarchical:{message}", 4)


def test_placement_with_another_number_of_ranks_is_refused():
    with pytest.raises(UnsupportedWorld, match="places 4 ranks, but there are 5"):
        schedule("broadcast", "hierarchical:hosts=0.1.0.1", 5)


@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (1, [1]),
        (2, [2]),
        (3, [2, 1]),
        (8, [4, 4]),
        (12, [4, 4, 4]),
        (13, [4, 3, 3, 3]),
        (22, [5, 5, 4, 4, 4]),
        (32, [8, 8, 8, 8]),
    ],
)
def test_default_groups_are_of_one_size_where_a_divisor_is_near_the_root(n, sizes):
    assert groups(n, "") == [sizes]


def test_default_groups_of_8_ranks_take_fewer_rounds_than_uneven_ones():
    uneven = schedule("all_reduce", "hierarchical:levels=3+3+2", 8).cost()
    assert schedule("all_reduce", "hierarchical", 8).cost().rounds < uneven.rounds
