"""The page's text and what it tells: derived from the schedule, whole, and safe."""

import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import unisono
from unisono.algorithms import library
from unisono.errors import BadArgument, BadTopology, ScheduleError
from unisono.schedule import collective, copy_step, from_steps, reduce_step
from unisono.schedule.collective import ALL_REDUCE
from unisono.schedule.step import together
from unisono.simulate import simulate
from unisono.topology import parse
from unisono.view.assets import digest, script, text
from unisono.view.frames import frames
from unisono.view.html import to_html
from unisono.view.layout import hosts, place, route
from unisono.view.story import tell

WEB = Path(unisono.__file__).parent / "view" / "web"
LIMIT = 500 * 1024


def captions(name, algorithm, n, **more):
    return [beat.caption for beat in tell(unisono.schedule(name, algorithm, n=n)).beats]


def replayed(story):
    """Who holds what after each step, from what the page is given and nothing else."""
    held = {}
    for r, row in enumerate(story.rows):
        for rank in range(story.n):
            if row.before in (-1, rank):
                held[rank, r] = 1 << rank
    yield dict(held)
    for beat in story.beats:
        for _, dst, _, into, adds, carries, _ in beat.moves:
            held[dst, into] = carries | (held.get((dst, into), 0) if adds else 0)
        yield dict(held)


@pytest.mark.parametrize("key", library(), ids="-".join)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_story_matches_the_ledger(key, n):
    made = library()[key](n)
    story = tell(made)
    for frame, held in zip(frames(made), replayed(story), strict=True):
        for r, row in enumerate(frame.rows):
            for rank, cell in enumerate(row):
                assert held.get((rank, r), 0) == cell.ranks
    assert not story.beats or story.beats[-1].done == story.due


@pytest.mark.parametrize("key", library(), ids="-".join)
def test_sixteen_ranks_fit_into_half_a_mebibyte(key):
    page = to_html(library()[key](16))
    assert len(page.encode()) < LIMIT


def test_times_and_bytes_are_those_of_the_simulator():
    made = unisono.schedule("all_reduce", "ring", n=4)
    story = tell(made, "switch:4", "64M")
    found = simulate(made, "switch:4", "64M")
    assert story.time == pytest.approx(found.time * 1e6, rel=1e-4)
    sent = sum(m[3] for m in story.messages if m[1] == 0)
    assert sent == pytest.approx(made.cost(64 << 20).sent[0])
    assert all(leaves < arrives for *_, leaves, arrives in story.messages)


def mixed(order):
    """All_reduce of two ranks whose second step copies and adds, in this order."""
    back = {"copy": iter((0, 1)), "add": iter((2, 3))}
    kinds = {"copy": copy_step, "add": reduce_step}
    middle = [kinds[kind](next(back[kind]), src=1, dst=0) for kind in order]
    steps = [reduce_step([0, 1], src=0, dst=1), together(middle)]
    steps.append(copy_step([2, 3], src=0, dst=1))
    return from_steps(ALL_REDUCE, 2, steps, num_chunks=4)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "made",
    [
        mixed(["add", "copy", "add", "copy"]),
        mixed(["copy", "add", "add", "copy"]),
        unisono.schedule("all_reduce", "recursive_doubling", n=4),
        unisono.schedule("all_gather", "recursive_doubling", n=4),
        unisono.schedule("all_reduce", "rabenseifner", n=4),
    ],
    ids=["add first", "copy first", "all_reduce", "all_gather", "made out of order"],
)
def test_each_move_is_in_the_message_that_carries_it(made, streams):
    """With streams a copied chunk is a message, and all that are added are one.

    What was made first is sent first: the last of four ranks sends its own share, which
    has 5 bytes, before one of 6 that it was sent.
    """
    where = parse(f"switch:{made.n}").but(streams=streams)
    told = tell(made, where, 23)
    carried = [0.0] * len(told.messages)
    for number, beat in enumerate(told.beats, start=1):
        for src, dst, chunk, *_, message in beat.moves:
            assert told.messages[message][:3] == (number, src, dst)
            carried[message] += told.rows[chunk].nbytes
    assert carried == pytest.approx([m[3] for m in told.messages], abs=0.1)


def test_ring_has_its_captions():
    result = captions("all_reduce", "ring", 5)
    assert result[0] == (
        "Every rank sends one chunk to the next rank, which adds it to its own: each "
        "sum just made holds 2 of 5 contributions."
    )
    assert result[3].endswith("each sum just made is complete.")
    assert result[4] == (
        "Every rank sends one finished chunk to the next rank, which keeps a copy: 10 "
        "of 25 results are in place."
    )
    assert result[7].endswith("done, every rank ends with a+b+c+d+e.")


@pytest.mark.parametrize(
    ("name", "algorithm", "n", "message"),
    [
        ("broadcast", "tree", 8, "Rank 0 sends all it has to rank 4"),
        ("all_reduce", "naive", 3, "Every rank sends all it has to every other rank"),
        ("all_reduce", "recursive_doubling", 8, "Neighbours exchange all they have"),
        ("all_reduce", "ring:both", 5, "to both its neighbours"),
        ("gather", "direct", 5, "Every other rank sends one chunk to rank 0"),
        ("scatter", "direct", 5, "Rank 0 sends one chunk to every other rank"),
        ("barrier", "dissemination", 5, "sends a sign to the next rank"),
        ("all_reduce", "parameter_server", 4, "which adds them to its own"),
        ("reduce", "tree", 6, "rank 3 to rank 2, rank 5 to rank 4; each adds it"),
        ("all_reduce", "hierarchical", 9, "In 3 rings at once (0→1→2→0, ...) every"),
        ("all_to_all", "direct", 4, "to every other rank; each keeps a copy: done"),
    ],
)
def test_patterns_are_recognised(name, algorithm, n, message):
    assert message in captions(name, algorithm, n)[0]


@pytest.mark.sweep
def test_every_caption_is_one_sentence():
    for (name, algorithm), made in library().items():
        for n in (2, 3, 6):
            for beat in tell(made(n)).beats:
                assert re.fullmatch(r"[A-Z0-9][^.]*(\.\.\.[^.]*)?\.", beat.caption), (
                    name,
                    algorithm,
                    beat.caption,
                )


def test_nothing_is_loaded_and_nothing_else_may_run():
    page = to_html(unisono.schedule("all_reduce", "ring", n=3))
    markup = re.sub(r"(?s)(<(script|style)[^>]*>).*?</", r"\1</", page)
    assert not re.search(r"(src|href)\s*=", markup)
    assert not re.search(r"url\((?!#)|@import|\bimport\(|fetch\(", page)
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name space
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])
    code = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)[1]
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src {digest(code)};" in policy
    assert f"style-src {digest(style)};" in policy
    assert "unsafe" not in policy


def test_names_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script>"
    steps = [copy_step(0, 0, 1).named(evil)]
    made = from_steps(collective("broadcast"), 2, steps, num_chunks=1).but(
        name=evil, about=evil, paper=evil
    )
    page = to_html(made)
    assert "alert(1)</script>" not in page
    data = re.search(r'id="stories">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(data)[0]["about"] == evil


def test_page_without_scripts_has_the_whole_story():
    page = to_html(unisono.schedule("all_reduce", "ring", n=5))
    body = page.partition("<main")[2].partition("</main>")[0]
    assert body.count("<li>") == 9


def test_too_many_transfers_for_a_page_are_refused(monkeypatch):
    monkeypatch.setattr("unisono.view.story.MOST_MOVES", 10)
    with pytest.raises(BadArgument, match="more than 10 transfers are too many"):
        to_html(unisono.schedule("all_reduce", "ring", n=4))


def test_bad_input_is_refused_with_the_reason():
    ring = unisono.schedule("all_reduce", "ring", n=4)
    with pytest.raises(BadTopology, match="switch:5 has 5 ranks"):
        to_html(ring, topology="switch:5")
    with pytest.raises(BadArgument, match="up to 16 ranks"):
        to_html(unisono.schedule("all_reduce", "ring", n=17))
    with pytest.raises(BadArgument, match="size 'lots'"):
        to_html(ring, nbytes="lots")
    wrong = from_steps(
        collective("all_reduce"), 2, [reduce_step(0, 0, 1)], num_chunks=1
    )
    with pytest.raises(ScheduleError, match="rank 0 lacks rank 1"):
        to_html(wrong)


@pytest.mark.parametrize("name", ["ring:5", "dgx-h100:2", "fat-tree:4", "torus:4x4"])
def test_nodes_have_distinct_positions_and_routes_follow_links(name):
    topology = parse(name)
    wiring = topology.wiring
    places = place(topology)
    assert abs(places).max() < 1.2
    assert len({tuple(p) for p in places.round(2).tolist()}) == wiring.num_nodes
    linked = set(zip(wiring.links.src.tolist(), wiring.links.dst.tolist(), strict=True))
    way = route(wiring, 0, topology.n - 1)
    assert (way[0], way[-1]) == (0, topology.n - 1)
    assert set(pairwise(way)) <= linked


@pytest.mark.parametrize("name", ["cloud:2x4", "cloud:4x4", "cloud:5x3", "dgx-h100:2"])
def test_ranks_of_a_host_are_drawn_together(name):
    topology = parse(name)
    of = hosts(topology.wiring)
    places = place(topology)[: topology.n]
    assert np.abs(places).max() <= 1
    boxes = [
        (places[mine].min(axis=0), places[mine].max(axis=0))
        for mine in (np.array(of) == host for host in sorted(set(of)))
    ]
    for i, (low, high) in enumerate(boxes):
        for other_low, other_high in boxes[:i]:
            assert (low > other_high).any() or (other_low > high).any()


def test_fat_tree_is_drawn_in_levels():
    topology = parse("fat-tree:4")
    places = place(topology)
    n = topology.n
    assert len({tuple(p) for p in places.tolist()}) == len(places)
    assert places[:n, 1].tolist() == [1.0] * n
    assert np.all(np.diff(places[:n, 0]) > 0)
    assert sorted(set(places[n:, 1].round(3).tolist())) == [-1.0, -0.333, 0.333]


def test_hosts_of_one_rank_and_one_host_need_no_frames():
    assert hosts(parse("full:5").wiring) == []
    assert hosts(parse("wan:5").wiring) == []


@pytest.mark.parametrize(("collective", "root"), [("broadcast", 0), ("reduce", 3)])
def test_trees_are_drawn_as_trees(collective, root):
    made = unisono.schedule(collective, "tree", n=12, root=root)
    story = tell(made)
    places = np.array(story.map.places)
    assert places[root][1] == -1
    assert len(story.map.links) == 11
    parent_of = {}
    for src, dst in {(move[0], move[1]) for beat in story.beats for move in beat.moves}:
        up, down = (src, dst) if collective == "broadcast" else (dst, src)
        assert places[up][1] < places[down][1]
        parent_of[down] = up
    assert len(parent_of) == 11
    assert len({tuple(p) for p in places}) == 12


@pytest.mark.parametrize("algorithm", ["ring", "chain", "double_tree"])
def test_what_is_no_tree_is_drawn_on_a_circle(algorithm):
    story = tell(unisono.schedule("all_reduce", algorithm, n=12))
    radii = np.hypot(*np.array(story.map.places).T)
    assert radii == pytest.approx(np.ones(12), abs=1e-3)


def test_joined_modules_import_nothing():
    joined = script("start")
    assert not re.search(r"^\s*(import|export)\b", joined, re.MULTILINE)
    for module in WEB.glob("*.js"):
        lines = text(module.name).splitlines()
        assert lines[0].startswith("// "), f"{module.name}: says nothing about itself"
        assert len(lines) <= 400, f"{module.name}: too long"
