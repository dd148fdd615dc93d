"""Schedules found by search: right, never behind the library, at the known bounds."""

from itertools import combinations
from math import ceil, log2
from pathlib import Path

import pytest

import unisono
from unisono.algorithms import schedule
from unisono.errors import BadArgument, NotOffered
from unisono.simulate import simulate
from unisono.simulate.candidates import candidates
from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.synthesize import SEARCHED, Quickest, quickest, save
from unisono.synthesize.plays import Costs, Goal, played
from unisono.topology import Topology, load, parse

NAMES = [what.name for what in SEARCHED]
SMALL = 4096
FEW = 200
"""Changes tried, where the result need not be the best."""
KINDS = """
[kinds.fast]
latency = "1us"
bandwidth = "100GB/s"
[kinds.slow]
latency = "20us"
bandwidth = "1GB/s"
"""


@pytest.fixture
def islands(tmp_path: Path):
    """Full islands of ranks, and one slow cable between the first two of them."""

    def make(*groups: tuple[int, ...]) -> Topology:
        links = [(a, b, "fast") for group in groups for a, b in combinations(group, 2)]
        links.append((groups[0][0], groups[1][0], "slow"))
        n = sum(map(len, groups))
        text = f'ranks = {n}\nname = "islands"\noverhead = "1us"\n'
        for a, b, kind in links:
            text += f'[[links]]\nbetween = [[{a}], [{b}]]\nkind = "{kind}"\n'
        file = tmp_path / "islands.toml"
        file.write_text(text + KINDS)
        return load(file)

    return make


def best_of_library(what: str, where: Topology, nbytes: int = SMALL) -> float:
    names = candidates(what, where)
    return min(simulate(a, where, nbytes, collective=what).time for a in names)


@pytest.mark.cases(3)
@pytest.mark.parametrize("topology", ["switch:5", "cloud:2x3", "ring:6", "switch:1"])
@pytest.mark.parametrize("what", NAMES)
def test_it_is_right_and_not_behind_the_library(what, topology):
    where = parse(topology)
    made = quickest(what, where, SMALL, changes=FEW)
    assert made.schedule.collective.name == what
    made.schedule.verify()
    assert made.least <= made.time * (1 + 1e-9)
    found = simulate(made.schedule, where, SMALL, "steps")
    assert made.time == pytest.approx(found.time)
    assert made.time <= best_of_library(what, where) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("what", "topology"),
    [("all_reduce", "switch:5"), ("reduce", "switch:6"), ("broadcast", "switch:6")],
)
def test_what_the_library_does_quicker_is_taken_from_it(what, topology, tmp_path):
    """The search sends whole buffers; the library also parts of them."""
    where, nbytes = parse(topology), 1 << 20
    made = quickest(what, where, nbytes, changes=FEW)
    assert made.library
    assert made.time == pytest.approx(best_of_library(what, where, nbytes))
    made.schedule.verify()
    assert made.library in made.schedule.about
    assert "nothing quicker found" in made.schedule.about
    save(made, tmp_path / "mine.py")
    assert made.library in (tmp_path / "mine.py").read_text()
    unisono.schedule(what, str(tmp_path / "mine.py"), where.n).verify()


@pytest.mark.parametrize("what", NAMES)
def test_where_messages_go_in_streams_it_is_not_behind_the_library_either(what):
    where = parse("cloud:2x2").but(streams=True)
    made = quickest(what, where, SMALL, changes=FEW)
    assert made.time == pytest.approx(simulate(made.schedule, where, SMALL).time)
    assert made.least <= made.time * (1 + 1e-9)
    assert made.time <= best_of_library(what, where) * (1 + 1e-9)


def test_it_says_optimal_where_nothing_can_be_quicker():
    best = quickest("all_reduce", "switch:4", SMALL, changes=FEW)
    assert best.time == pytest.approx(best.least)
    assert best.optimal
    assert "optimal" in best.about
    other = quickest("all_reduce", "ring:6", SMALL, changes=FEW)
    assert not other.optimal
    assert "optimal" not in other.about
    assert quickest("all_reduce", "switch:1", SMALL).optimal


def test_schedule_with_temporaries_is_not_saved_as_an_algorithm_file(tmp_path):
    where = parse("switch:5")
    name = "dissemination:carry"
    made = Quickest(schedule("all_reduce", name, 5), where, SMALL, 1.0, 1.0, name)
    with pytest.raises(NotOffered, match=r"library's dissemination:carry uses temp"):
        save(made, tmp_path / "mine.py")
    save(made, tmp_path / "mine.json")


@pytest.mark.parametrize(
    ("groups", "what", "ratio"),
    [
        (((0, 1, 2), (3, 4)), "all_reduce", 1.15),
        (((0, 2, 4), (1, 3, 5)), "all_reduce", 1.15),
        (((0, 2, 4), (1, 3, 5)), "broadcast", 1.25),
    ],
)
def test_it_beats_the_library_on_islands_with_a_slow_cable(
    islands, groups, what, ratio
):
    where = islands(*groups)
    made = quickest(what, where, SMALL, changes=600)
    made.schedule.verify()
    assert best_of_library(what, where) > ratio * made.time


@pytest.mark.cases(3)
@pytest.mark.parametrize("n", range(2, 9))
def test_where_sending_is_all_that_costs_rounds_are_the_fewest(n):
    """Each rank has one message at a time: what one knows, 2^k know after k rounds."""
    where = parse(f"switch:{n}").but(overhead=1e-3)
    made = quickest("broadcast", where, 0, changes=FEW)
    assert made.depth == ceil(log2(n))
    assert made.optimum > 0.99
    if n in (2, 4, 8):
        summed = quickest("all_reduce", where, 0, changes=FEW)
        assert summed.depth == ceil(log2(n))
        assert summed.optimum > 0.99


def test_where_latency_is_all_that_costs_one_round_is_enough():
    made = quickest("all_reduce", parse("wan:5").but(overhead=0.0), 8, changes=FEW)
    assert made.schedule.num_steps == 1
    assert made.optimum > 0.999


@pytest.mark.parametrize(
    ("what", "sums"), [("all_gather", False), ("all_reduce", True)]
)
def test_the_time_of_a_plan_is_that_of_the_simulator(what, sums):
    """Plans of algorithms that send all they know; shared links and cards as well."""
    for name in ("switch:6", "cloud:2x3", "ring:5"):
        where = parse(name)
        n, nbytes = where.n, 6000
        made = schedule(what, "naive" if sums else "direct", n)
        plan = tuple(tuple((t.src, t.dst) for t in step) for step in made)
        each = tuple(1 << rank for rank in range(n))
        part = nbytes if sums else nbytes / n
        costs = Costs.of(SimulatedWorld.of(where, Conditions()))
        found = played(plan, costs, Goal(each, (1 << n) - 1, part, sums=sums))
        told = simulate(made, where, nbytes, "steps").time
        assert found.missing == 0
        assert found.seconds == pytest.approx(told, rel=1e-3)


def test_the_result_is_always_the_same():
    one, two = (quickest("all_reduce", "cloud:2x2", 64, changes=FEW) for _ in "ab")
    assert [list(s) for s in one.schedule] == [list(s) for s in two.schedule]


def test_roots_and_failed_links_are_kept():
    made = quickest("broadcast", "ring:5", 64, root=3, failed=["3-4"], changes=FEW)
    made.schedule.verify()
    assert made.schedule.root == 3
    whole = quickest("broadcast", "ring:5", 64, root=3, changes=FEW)
    assert made.time > whole.time


def test_a_file_of_it_is_an_algorithm(tmp_path):
    """Also one whose steps have both copies and reductions."""
    where = parse("ring:6")
    made = quickest("all_reduce", where, SMALL, changes=FEW)
    save(made, tmp_path / "mine.py")
    again = unisono.schedule("all_reduce", str(tmp_path / "mine.py"), 6)
    again.verify()
    assert [sorted(s) for s in again] == [sorted(s) for s in made.schedule]
    assert "Found by search for ring:6" in (tmp_path / "mine.py").read_text()


def test_what_cannot_be_searched_for_is_refused():
    with pytest.raises(NotOffered, match="all_to_all cannot be searched for"):
        quickest("all_to_all", "switch:4", 8)
    with pytest.raises(BadArgument, match="9 ranks; a schedule is searched for up to"):
        quickest("broadcast", "switch:9", 8)
    with pytest.raises(BadArgument, match="expected 0 or more"):
        quickest("broadcast", "switch:3", -1)
