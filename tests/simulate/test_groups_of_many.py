"""Groups of many ranks are simulated in part, and nearly as if it were in full."""

import numpy as np
import pytest

from unisono.simulate import groups
from unisono.simulate.groups import EqualGroups
from unisono.topology import parse

SIZES = 1 << 20, 3 << 20, 1 << 26


def both(monkeypatch, topology, split, name, collective):
    """Times in part and in full."""
    where = parse(topology)
    members = np.arange(where.n).reshape(-1, split).T.copy()
    found = []
    for many in (16, where.n):
        monkeypatch.setattr(groups, "MANY", many)
        one = EqualGroups(where, members, name)
        found.append([one.time(collective, size)[0] for size in SIZES])
    return np.array(found)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("topology", "split"), [("dgx-h100:8", 2), ("switch:40", 1)])
def test_first_steps_of_a_ring_tell_the_rest(monkeypatch, topology, split, collective):
    part, full = both(monkeypatch, topology, split, "ring", collective)
    assert part == pytest.approx(full, rel=0.02)  # of 129 ranks and more: 0.003
    assert (part != full).any()


@pytest.mark.parametrize("name", ["recursive_doubling", "circulant"])
def test_sizes_between_are_interpolated(monkeypatch, name):
    part, full = both(monkeypatch, "dgx-h100:8", 2, name, "all_gather")
    assert (part >= full * (1 - 1e-9)).all()
    assert part == pytest.approx(full, rel=0.02)


def test_one_simulation_serves_similar_sizes(monkeypatch):
    monkeypatch.setattr(groups, "MANY", 16)
    where = parse("switch:32")
    one = EqualGroups(where, np.arange(32)[None], "circulant")
    calls = []
    inner = one._at
    monkeypatch.setattr(one, "_at", lambda *a, **k: calls.append(1) or inner(*a, **k))
    for size in (1 << 20, 1 << 21, 1 << 19, 3 << 18):
        one.time("all_gather", size)
    assert len(calls) == 1
