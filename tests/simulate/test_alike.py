"""Of groups that are alike one is simulated, and the quickest algorithm is the same."""

import numpy as np
import pytest

from unisono.search import search
from unisono.simulate import alike
from unisono.simulate import groups as module
from unisono.simulate.alike import representatives
from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.simulate.groups import EqualGroups
from unisono.topology import parse


def cut(n, size, stride):
    """Groups of `size` ranks that lie `stride` apart."""
    first = [rank for rank in range(n) if rank // stride % size == 0]
    return np.array([[rank + k * stride for k in range(size)] for rank in first])


def world_of(name, **conditions):
    where = parse(name)
    return where, SimulatedWorld.of(where, Conditions(**conditions))


@pytest.mark.parametrize(
    ("name", "size", "stride", "left"),
    [
        ("dgx-h100:4", 8, 1, 1),  # inside hosts
        ("dgx-h100:4", 4, 8, 1),  # across hosts, a card for each rank
        ("dgx-h100:4", 2, 4, 1),
        ("cloud:4x4", 4, 1, 1),
        ("cloud:4x4", 4, 4, 4),  # across hosts, by the same card
        ("cloud:4x4", 2, 4, 4),  # two pairs of hosts
        ("torus:4x4", 4, 1, 1),
        ("ring:8", 4, 1, 1),
        ("ring:8", 4, 2, 2),  # both go all the way round
        ("switch:8", 2, 1, 1),
    ],
)
def test_groups_that_share_no_link_are_represented_by_one(name, size, stride, left):
    where, world = world_of(name)
    members = cut(where.n, size, stride)
    found = representatives(members, world)
    assert len(found) == left
    assert np.array_equal(found, members[np.isin(members[:, 0], found[:, 0])])


def test_groups_with_other_links_or_a_later_start_are_all_simulated():
    where, world = world_of("dgx-h100:2", slow={"9>nvswitch1": 0.5})
    members = cut(where.n, 8, 1)
    assert len(representatives(members, world)) == 2
    _, late = world_of("dgx-h100:2", delays={9: 1e-3})
    assert len(representatives(members, late)) == 2


def plain(groups, collective, nbytes):
    """All groups, all algorithms, to their ends: the definition."""
    groups.__dict__["_simulated_of"] = groups.members
    times = [
        (groups._simulated(collective, name, nbytes, float("inf")), name)
        for name in groups.names(collective)
    ]
    return min(times)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("name", "size", "stride"),
    [
        ("dgx-h100:2", 8, 1),
        ("dgx-h100:4", 4, 8),
        ("dgx-h100:2", 16, 1),
        ("cloud:4x4", 4, 4),
        ("cloud:4x4", 8, 1),
        ("wan:6", 3, 2),
        ("torus:4x4", 4, 4),
    ],
)
def test_time_and_algorithm_are_those_of_all_groups_and_whole_simulations(
    name, size, stride, collective
):
    where = parse(name)
    members = cut(where.n, size, stride)
    quick = EqualGroups(where, members)
    for nbytes in (4096, 1 << 20, 100_001, 1 << 26):
        right = plain(EqualGroups(where, members), collective, nbytes)
        assert quick.time(collective, nbytes) == right


@pytest.mark.sweep
def test_search_finds_the_same_as_with_all_groups_and_whole_simulations(monkeypatch):
    asked = {"batch": 64, "sequence": 2048}
    quick = search("7B", "dgx-h100:2", **asked)
    monkeypatch.setattr(alike, "MOST_PAIRS", 0)
    every = module.by_steps

    def whole(*args, **options):
        return every(*args, **options | {"until": np.inf})

    monkeypatch.setattr(module, "by_steps", whole)
    assert repr(search("7B", "dgx-h100:2", **asked)) == repr(quick)
