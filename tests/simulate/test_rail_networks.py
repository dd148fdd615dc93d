"""Rails: what changes rails is charged on NVLink, and the rest is as without."""

import numpy as np
import pytest

from unisono.simulate import simulate
from unisono.simulate.groups import EqualGroups
from unisono.synthesize import synthesize
from unisono.topology import parse
from unisono.topology.files import loads

MB = 1 << 20
NVLINK_HOP = 1.2e-6
TWO_HOSTS = """
ranks = 4
hosts = [[0, 1], [2, 3]]
switches = ["left", "right", "rail0", "rail1"]

[kinds.nvlink]
latency = "1us"
bandwidth = "400GB/s"

[kinds.card]
latency = "4us"
bandwidth = "50GB/s"

[[links]]
between = [[0, 1], ["left"]]
kind = "nvlink"

[[links]]
between = [[2, 3], ["right"]]
kind = "nvlink"

[[links]]
between = [[0, 2], ["rail0"]]
kind = "card"

[[links]]
between = [[1, 3], ["rail1"]]
kind = "card"
"""


def both(algorithm, collective, fidelity):
    return [
        simulate(algorithm, f"dgx-h100:4{on}", 32 * MB, fidelity, collective=collective)
        for on in ("", ",rails=1")
    ]


def on_nvlink(found):
    links = found.topology.wiring.links
    return found.carried[links.kind == links.kinds.index("nvlink")]


@pytest.mark.parametrize("fidelity", ["steps", "events"])
def test_all_to_all_is_charged_on_nvlink(fidelity):
    plain, rails = both("direct", "all_to_all", fidelity)
    share = 32 * MB / 32
    assert on_nvlink(plain) == pytest.approx(np.full(64, 7 * share))
    # to or through each neighbour: what is for its rail on any of the four hosts
    assert on_nvlink(rails) == pytest.approx(np.full(64, 4 * 7 * share))
    assert rails.carried.sum() - plain.carried.sum() == pytest.approx(
        on_nvlink(rails).sum() - on_nvlink(plain).sum()
    )


@pytest.mark.parametrize("fidelity", ["steps", "events"])
def test_what_keeps_to_rails_takes_as_long_as_without(fidelity):
    plain, rails = both("hierarchical", "all_reduce", fidelity)
    assert rails.time == plain.time
    assert np.array_equal(on_nvlink(rails), on_nvlink(plain))


def test_rings_of_one_rail_each_take_as_long_as_without():
    across = np.arange(4 * 8).reshape(4, 8).T
    times = [
        EqualGroups(parse(text), across, "ring").time("all_reduce", 32 * MB)
        for text in ("dgx-h100:4", "dgx-h100:4,rails=1")
    ]
    assert times[0] == times[1]


def test_flat_ring_changes_rails_once_a_host_on_links_that_it_left_idle():
    plain, rails = both("ring", "all_reduce", "steps")
    assert rails.time > plain.time
    crossings = 2 * NVLINK_HOP * 62 / 8
    assert rails.time - plain.time < 2 * crossings
    assert on_nvlink(rails).max() == pytest.approx(on_nvlink(plain).max())
    assert np.count_nonzero(on_nvlink(plain)) == 4 * 14
    assert np.count_nonzero(on_nvlink(rails)) == 4 * 16


def test_closed_form_knows_rails():
    whole = simulate("hierarchical", "dgx-h100:4,rails=1", 32 * MB, "closed")
    steps = simulate("hierarchical", "dgx-h100:4,rails=1", 32 * MB, "steps")
    assert whole.time == pytest.approx(steps.time, rel=1e-6)
    plain, rails = (
        simulate("ring", f"dgx-h100:1024{on}", 0, "closed").time
        for on in ("", ",rails=1")
    )
    assert rails > plain


def test_schedules_are_made_for_rails():
    where = parse("dgx-a100:2,rails=1")
    made = synthesize("all_gather", where)
    assert made.schedule.verify()


def test_file_with_a_switch_for_each_rail_has_such_routes_by_itself():
    own = loads(TWO_HOSTS)
    (row,) = own.route(np.array([0]), np.array([3]))
    names = [own.wiring.link_name(k) for k in row[row >= 0]]
    assert ">".join(names) in (
        "0>left>left>1>1>rail1>rail1>3",
        "0>rail0>rail0>2>2>right>right>3",
    )
