"""Synthesized schedules: right, and as fast as the cuts of the topology allow."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from unisono.errors import BadArgument, BadTopology, NotOffered
from unisono.schedule.collective import COLLECTIVES
from unisono.simulate import simulate
from unisono.simulate.candidates import candidates
from unisono.synthesize import OFFERED, synthesize
from unisono.topology import Topology, load, parse

KINDS = """
[kinds.fast]
latency = "1us"
bandwidth = "100GB/s"
[kinds.middle]
latency = "1us"
bandwidth = "20GB/s"
[kinds.twice]
latency = "1us"
bandwidth = "40GB/s"
[kinds.slow]
latency = "1us"
bandwidth = "10GB/s"
"""


def _link(a: list[object], b: list[object], kind: str) -> str:
    return f'[[links]]\nbetween = [{a}, {b}]\nkind = "{kind}"\n'


def _pairs(pairs: list[tuple[int, int]], kind: str = "fast") -> str:
    return "".join(_link([a], [b], kind) for a, b in pairs)


def _same_box(a: int, b: int) -> bool:
    return a // 4 == b // 4


FILES = {
    "line": 'ranks = 6\nname = "line"\n' + _pairs([(i, i + 1) for i in range(5)]),
    "hypercube": 'ranks = 8\nname = "hypercube"\n'
    + _pairs([(i, i ^ 1 << b) for i in range(8) for b in range(3) if not i >> b & 1]),
    "leaves": 'ranks = 4\nname = "leaves"\n' + _pairs([(0, 1), (0, 2), (0, 3)]),
    "islands": 'ranks = 8\nname = "islands"\n'
    + _pairs(list(combinations(range(4), 2)) + list(combinations(range(4, 8), 2)))
    + _pairs([(0, 4)], "middle")
    + _pairs([(1, 5)], "slow"),
    "one slow": 'ranks = 6\nname = "one slow"\n'
    + _pairs([pair for pair in combinations(range(6), 2) if pair != (0, 1)])
    + _pairs([(0, 1)], "middle"),
    "star": 'ranks = 4\nname = "star"\nswitches = ["hub"]\n'
    + _link(["0..1"], ["hub"], "middle")
    + _link(["2..3"], ["hub"], "fast"),
    "fat tree 2:1": 'ranks = 8\nname = "fat tree 2:1"\nswitches = ["a", "b", "top"]\n'
    + _link(["0..3"], ["a"], "middle")
    + _link(["4..7"], ["b"], "middle")
    + _link(["a"], ["top"], "twice")
    + _link(["b"], ["top"], "twice"),
    "ring of boxes": 'ranks = 16\nname = "ring of boxes"\n'
    + f"hosts = {[list(range(box, box + 4)) for box in range(0, 16, 4)]}\n"
    + _pairs([pair for pair in combinations(range(16), 2) if _same_box(*pair)])
    + _pairs([(i, (i + 2) % 16) for i in range(16) if i % 4 > 1], "middle"),
    "three tiers 2:1": 'ranks = 16\nname = "three tiers 2:1"\n'
    + 'switches = ["e0", "e1", "e2", "e3", "a0", "a1", "core"]\n'
    + "".join(_link([f"{4 * e}..{4 * e + 3}"], [f"e{e}"], "middle") for e in range(4))
    + "".join(_link([f"e{e}"], [f"a{e // 2}"], "twice") for e in range(4))
    + "".join(_link([f"a{a}"], ["core"], "twice") for a in range(2)),
    "one way": 'ranks = 4\nname = "one way"\n'
    + "".join(
        f'[[links]]\nfrom = [{i}]\nto = [{(i + 1) % 4}]\nkind = "fast"\n'
        for i in range(4)
    ),
}

NAMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "single switch": ("switch:8", ()),
    "ring": ("ring:7", ()),
    "torus, one link failed": ("torus:4x4", ("0-1",)),
    "torus": ("torus:3x4", ()),
    "dgx-h100:2": ("dgx-h100:2", ()),
    "dgx-a100:2": ("dgx-a100:2", ()),
    "fat-tree:4": ("fat-tree:4", ()),
    "cloud": ("cloud:2x4", ()),
    "dragonfly": ("dragonfly:4x2x4", ()),
    "sites": ("wan:5x3", ()),
}
PATHS = "all_to_all"
ALL = [*FILES, *NAMED]
QUICK = (
    "line",
    "leaves",
    "islands",
    "star",
    "one way",
    "torus, one link failed",
    "cloud",
)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Topology, list[str]]:
    """The topology of this name, and the links that have failed."""
    name = request.param
    if name in NAMED:
        text, failed = NAMED[name]
        return parse(text), list(failed)
    file = tmp_path / "topology.toml"
    file.write_text(FILES[name] + KINDS)
    return load(file), []


@pytest.mark.quick(place=QUICK)
@pytest.mark.parametrize("what", [one.name for one in OFFERED if one.name != PATHS])
@pytest.mark.parametrize("place", ALL, indirect=True, ids=ALL)
def test_schedule_is_right_and_within_two_percent_of_what_trees_can_reach(
    place: tuple[Topology, list[str]], what: str
) -> None:
    topology, failed = place
    made = synthesize(what, topology, failed=failed)
    made.schedule.verify()
    assert 0.98 <= made.optimum <= 1.0 + 1e-9
    assert made.schedule.collective is COLLECTIVES[what]


@pytest.mark.quick(place=QUICK)
@pytest.mark.parametrize("place", ALL, indirect=True, ids=ALL)
def test_paths_of_all_to_all_are_right_and_near_what_any_paths_can_reach(
    place: tuple[Topology, list[str]],
) -> None:
    topology, failed = place
    made = synthesize(PATHS, topology, failed=failed)
    made.schedule.verify()
    assert 0.88 <= made.optimum <= 1.0 + 1e-9
    assert made.depth == made.schedule.num_steps


def test_synthesized_all_to_all_beats_the_library_on_a_torus_with_a_failed_link() -> (
    None
):
    size, failed = 1 << 28, ["0-1"]
    made = synthesize(PATHS, "torus:4x4", failed=failed)
    broken = {"failed": failed, "fidelity": "steps"}
    ours = simulate(made.schedule, "torus:4x4", size, segments=8, **broken).time  # type: ignore[arg-type]
    times = [
        simulate(name, "torus:4x4", size, collective=PATHS, **broken).time  # type: ignore[arg-type]
        for name in candidates(PATHS, parse("torus:4x4"))
    ]
    assert min(times) > 1.3 * ours


@pytest.mark.quick(place=QUICK)
@pytest.mark.parametrize("place", ALL, indirect=True, ids=ALL)
def test_rate_of_all_gather_is_that_of_the_worst_cut(
    place: tuple[Topology, list[str]],
) -> None:
    topology, failed = place
    if topology.wiring.num_nodes > 17:
        pytest.skip("too many cuts to look at each")
    made = synthesize("all_gather", topology, failed=failed)
    assert made.least == pytest.approx(_worst_cut(topology, failed))


def _worst_cut(topology: Topology, failed: list[str]) -> float:
    """By looking at every set of nodes: seconds per byte of a buffer."""
    wiring, links = topology.wiring, topology.wiring.links
    broken = [link for name in failed for link in wiring.links_named(name)]
    works = ~np.isin(np.arange(len(links)), broken)
    sets = np.arange(1 << wiring.num_nodes)
    leaves = np.zeros(sets.size)
    for a, b, much in zip(
        links.src[works], links.dst[works], links.bandwidth[works], strict=True
    ):
        leaves += much * ((sets >> a & 1) & ~(sets >> b) & 1)
    ranks = sum(sets >> rank & 1 for rank in range(wiring.n))
    real = (ranks > 0) & (ranks < wiring.n)
    return float((ranks[real] / wiring.n / leaves[real]).max())


@pytest.mark.parametrize("place", ["star", "islands"], indirect=True)
def test_all_reduce_gives_ranks_unequal_parts_where_that_is_faster(
    place: tuple[Topology, list[str]],
) -> None:
    """An even all_reduce is twice an all_gather; with free roots it meets the bound."""
    topology, _ = place
    made = synthesize("all_reduce", topology)
    even = synthesize("all_gather", topology)
    assert made.reached <= 2 * even.reached
    if topology.name == "star":
        assert made.reached == pytest.approx(1 / 20e9)
        assert 2 * even.reached == pytest.approx(1.5 / 20e9)


@pytest.mark.parametrize("place", ["ring of boxes"], indirect=True)
def test_synthesized_all_reduce_uses_all_cables_of_a_ring_of_boxes(
    place: tuple[Topology, list[str]],
) -> None:
    """Two cables join neighbours; the library's rings and levels leave some idle."""
    (topology, _), size = place, 1 << 30
    made = synthesize("all_reduce", topology)
    assert made.optimum == pytest.approx(1.0)
    assert made.reached == pytest.approx(2 * (4 - 1) / 4 / (2 * 2 * 20e9))
    ours = simulate(made.schedule, topology, size, "steps", segments=64).time
    names = candidates("all_reduce", topology)
    times = [simulate(name, topology, size, "steps").time for name in names]
    assert min(times) > 1.5 * ours


def test_synthesized_all_reduce_beats_the_library_on_a_torus_with_a_failed_link() -> (
    None
):
    size, failed = 1 << 30, ["0-1"]
    made = synthesize("all_reduce", "torus:4x4", failed=failed)
    names = candidates("all_reduce", parse("torus:4x4"))
    broken = {"failed": failed, "fidelity": "steps"}
    ours = simulate(made.schedule, "torus:4x4", size, segments=32, **broken).time  # type: ignore[arg-type]
    times = [simulate(name, "torus:4x4", size, **broken).time for name in names]  # type: ignore[arg-type]
    assert min(times) > 1.3 * ours


@pytest.mark.parametrize("fidelity", ["steps", "events"])
def test_simulated_time_approaches_the_load_of_the_busiest_link(fidelity: str) -> None:
    made, size = synthesize("all_gather", "torus:3x3"), 8 << 30
    found = simulate(made.schedule, "torus:3x3", size, fidelity, segments=64)
    assert made.reached * size <= found.time <= 1.06 * made.reached * size


def test_broadcast_from_another_root() -> None:
    made = synthesize("broadcast", "ring:5", root=3)
    assert made.schedule.root == 3
    made.schedule.verify()
    assert made.least == pytest.approx(1 / 50e9)


def test_one_rank_has_nothing_to_do() -> None:
    made = synthesize("all_reduce", "ring:1")
    assert made.schedule.num_steps == 0
    assert made.optimum == 1.0


def test_collective_that_is_not_made_of_trees_is_refused() -> None:
    with pytest.raises(NotOffered, match="gather cannot be made of trees or paths"):
        synthesize("gather", "ring:4")


def test_unknown_collective_is_refused() -> None:
    with pytest.raises(BadArgument, match="all_redcue"):
        synthesize("all_redcue", "ring:4")


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(NotOffered, match="at most 256"):
        synthesize("all_reduce", "ring:300")


def test_ranks_that_do_not_reach_each_other_are_refused() -> None:
    with pytest.raises(BadTopology, match="no path"):
        synthesize("all_reduce", "ring:4", failed=["0-1", "2-3"])


def test_root_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadArgument, match="root = 9"):
        synthesize("broadcast", "ring:4", root=9)


@pytest.mark.sweep
def test_switches_of_a_fat_tree_of_128_ranks_are_removed() -> None:
    """With links between all its ranks at once it would take hours."""
    made = synthesize("all_reduce", "fat-tree:8")
    made.schedule.verify()
    assert made.optimum == pytest.approx(1.0)
