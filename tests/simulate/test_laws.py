"""Closed forms against steps, of members that their laws were not found from.

Laws are found from at most 128 hosts; here they are compared with 256, or with a number
of hosts that is no power of two and above those that they were fitted to.
"""

import pytest

from unisono.errors import NotOffered
from unisono.simulate import simulate
from unisono.simulate.candidates import candidates, fitted, unfitted
from unisono.topology import parse

MB = 1 << 20

LAWFUL = [
    ("switch:100", "ring"),
    ("switch:128", "recursive_doubling"),
    ("switch:100", "circulant"),
    ("switch:100", "rabenseifner"),
    ("dgx-h100:48", "hierarchical"),
    ("dgx-h100:64", "rabenseifner"),
    ("cloud:50x4", "ring"),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("topology", "algorithm"), LAWFUL)
def test_closed_forms_hold_for_sizes_they_were_not_fitted_to(topology, algorithm):
    where = parse(topology)
    if where.n > 512:
        where = parse(topology.replace("64", "48"))
    for nbytes in (1024, 64 * MB):
        closed = simulate(algorithm, where, nbytes, "closed")
        steps = simulate(algorithm, where, nbytes, "steps")
        if closed.exact:
            assert closed.time == pytest.approx(steps.time, rel=1e-3)
        assert steps.time <= closed.time * (1 + 1e-3)
        assert closed.time <= 2 * steps.time
        assert closed.bound == pytest.approx(steps.bound, rel=0.05) or nbytes < MB


EXACT = [
    ("dgx-h100:256", "hierarchical:levels=8x256,by=direct/rabenseifner"),
    ("dgx-h100:256", "tree:radix=4"),
    ("dgx-h100:512", "tree:radix=4"),
    ("dgx-h100:256", "butterfly:radix=4"),
    ("switch:512", "butterfly:radix=4"),
    ("switch:256", "tree:radix=4"),
    ("dgx-h100:100", "hierarchical:levels=8x100,by=naive/naive,segments=8"),
]
IN_SEGMENTS = [
    ("dgx-h100:100", "hierarchical:levels=8x100,by=direct/ring,segments=4"),
    ("dgx-h100:256", "hierarchical:levels=8x256,by=direct/rabenseifner,segments=2"),
    ("dgx-h100:256", "hierarchical:levels=8x256,by=direct/rabenseifner,segments=4"),
    ("dgx-h100:256", "hierarchical:levels=8x256,by=direct/ring,segments=8"),
]


@pytest.mark.parametrize("nbytes", [1024, 64 * MB])
@pytest.mark.parametrize(("topology", "algorithm"), EXACT)
def test_laws_hold_beyond_the_members_that_they_are_from(topology, algorithm, nbytes):
    law = simulate(algorithm, topology, nbytes, "closed")
    steps = simulate(algorithm, topology, nbytes, "steps")
    assert law.exact
    assert law.time == pytest.approx(steps.time, rel=1e-3)


@pytest.mark.quick(topology=["dgx-h100:100"])
@pytest.mark.parametrize(("topology", "algorithm"), IN_SEGMENTS)
def test_laws_of_pipelines_are_bounds_that_are_close(topology, algorithm):
    """Latency and slope are of different paths: at most their sum, and each is met."""
    for nbytes, close in ((8, 1e-3), (64 * MB, 0.1), (1 << 40, 1e-3)):
        law = simulate(algorithm, topology, nbytes, "closed")
        steps = simulate(algorithm, topology, nbytes, "steps")
        assert not law.exact
        assert steps.time <= law.time * (1 + 1e-3)
        assert law.time == pytest.approx(steps.time, rel=close)


@pytest.mark.parametrize(
    "algorithm",
    ["hierarchical:by=direct/ring,segments=4", "hierarchical", "ring", "tree:radix=4"],
)
def test_names_can_be_had_at_other_sizes(algorithm):
    where = parse("dgx-h100:16384")
    assert unfitted(fitted(algorithm, where), where) == algorithm
    assert unfitted(algorithm, where) == algorithm


@pytest.mark.parametrize(
    "algorithm", ["hierarchical:levels=16x8192", "torus:shape=512x256", "mine.py", "a:"]
)
def test_names_that_say_something_else_stay_as_they_are(algorithm):
    assert unfitted(algorithm, parse("dgx-h100:16384")) == algorithm


def test_shape_of_a_torus_is_completed_at_other_sizes():
    where = parse("torus:8x4x2")
    assert unfitted("torus:shape=8x4x2", where) == "torus"
    assert unfitted("torus:shape=64", where) == "torus:shape=64"


@pytest.mark.parametrize("algorithm", ["torus", "ring"])
def test_a_family_without_small_members_has_no_law_and_says_so(algorithm):
    with pytest.raises(NotOffered, match=r"torus:64x64x2, has 8192"):
        simulate(algorithm, "torus:64x64x32", MB)


@pytest.mark.sweep
def test_what_has_no_law_at_131072_ranks():
    """As docs/simulation.md says."""
    where, without = parse("dgx-h100:16384"), []
    for name in candidates("all_reduce", where):
        try:
            simulate(name, where, MB)
        except NotOffered:
            without.append(name.removeprefix("hierarchical:levels=8x16384,"))
    cuts = [f"by=direct/direct,segments={k}" for k in (2, 4, 8)]
    assert without == [*cuts, "by=direct/rabenseifner,segments=8", "torus"]
