"""The bound: no schedule is below it, whatever happens to links and bytes."""

import pytest

from unisono.schedule.collective import COLLECTIVES
from unisono.simulate import CodecModel, simulate
from unisono.simulate.candidates import candidates
from unisono.topology import parse
from unisono.topology.files import loads

CHANGES = {
    "as it is": {},
    "codec": {"codec": CodecModel(0.25)},
    "faster": {"slow": {"0>switch": 4.0, "switch>0": 4.0}},
    "slower": {"slow": {"0>switch": 0.1}},
    "late": {"delays": {1: 1e-3}},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_no_algorithm_is_below_the_bound(collective, change):
    where = parse("switch:4")
    for fidelity in ("steps", "events"):
        for name in candidates(collective, where):
            for size in (3, 1 << 20):
                found = simulate(
                    *(name, where, size, fidelity),
                    **{"collective": collective, **CHANGES[change]},
                )
                assert found.bound <= found.time * (1 + 1e-9), (name, size, fidelity)


def test_codec_lowers_the_bound_by_its_ratio():
    whole = simulate("ring", "switch:8", "64M")
    coded = simulate("ring", "switch:8", "64M", codec=CodecModel(0.25))
    assert coded.bound < 0.26 * whole.bound
    assert coded.optimum == pytest.approx(whole.optimum, abs=0.05)
    laws = [simulate("ring", "switch:8", "64M", "closed", codec=CodecModel(0.25))]
    assert laws[0].bound == pytest.approx(coded.bound, rel=1e-2)


def test_slow_link_is_in_the_bound_and_in_the_utilisation():
    found = simulate("ring", "switch:8", "64M", slow={"0>switch": 0.1})
    assert found.bound >= (64 << 20) / (0.1 * 25e9)
    assert found.busiest(1) == [("0>switch", pytest.approx(1.0, abs=0.01))]


def test_failed_link_does_not_count():
    """Each corner of a torus of two by two has two links: with one, half is left."""
    whole = simulate("ring", "torus:2x2", "64M", collective="all_gather")
    found = simulate(
        "ring", "torus:2x2", "64M", collective="all_gather", failed=["0-1"]
    )
    assert found.bound == pytest.approx(2 * whole.bound, rel=1e-3)
    assert found.bound <= found.time


@pytest.mark.parametrize("name", ["ring:2", "torus:2x2", "torus:2x3", "torus:3x2x2"])
def test_a_side_of_two_has_one_link(name):
    wiring = parse(name).wiring
    assert all(len(links) == 1 for links in wiring.by_name.values())
    found = simulate("direct", name, "1M", collective="all_gather")
    assert (found.carried > 0).all()


CABLES = """
ranks = 2
[kinds.fast]
latency = 1e-6
bandwidth = 2e9
[kinds.slow]
latency = 1e-6
bandwidth = 1e9
"""
FAST = '[[links]]\nbetween = [[0], [1]]\nkind = "fast"\n'
SLOW = FAST.replace("fast", "slow")


def test_parallel_links_of_a_file_are_used_together():
    one, two = (loads(CABLES + times * FAST) for times in (1, 2))
    alone, both = (simulate("ring", where, 100_000_000) for where in (one, two))
    assert len(two.wiring.links) == 2
    assert both.time == pytest.approx(alone.time / 2, rel=1e-2)
    assert both.bound == pytest.approx(alone.bound / 2, rel=1e-2)


def test_slower_links_beside_quicker_ones_are_not_counted():
    alone = loads(CABLES + FAST)
    for text in (FAST + SLOW, SLOW + FAST):
        mixed = loads(CABLES + text)
        assert "2 links beside quicker ones are not used" in mixed.about
        for key in ("time", "bound"):
            found = [getattr(simulate("ring", w, 10_000), key) for w in (alone, mixed)]
            assert found[0] == found[1]
