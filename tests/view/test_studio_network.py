"""The studio's pages of links, trees and published rows: data, and in a browser."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from test_studio import choose, enter

import unisono
from unisono.errors import BadArgument, NotOffered
from unisono.simulate import CodecModel, simulate
from unisono.synthesize import synthesize
from unisono.topology import parse
from unisono.view import studio_answers
from unisono.view.assets import text
from unisono.view.loads import carried_over_time, loads

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "published"


@pytest.mark.parametrize("topology", ["switch:8", "cloud:2x4", "torus:2x4"])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "rabenseifner"])
def test_links_carry_over_time_what_they_carry_in_all(topology, algorithm):
    schedule = unisono.schedule("all_reduce", algorithm, n=8)
    for codec in (None, CodecModel(ratio=0.25)):
        result = simulate(schedule, topology, "1M", codec=codec)
        carried = carried_over_time(result, 50)
        assert carried.sum(axis=1) == pytest.approx(result.carried)
        used = {one.name: one.used for one in loads(result)}
        busiest = dict(result.busiest(3))
        assert {name: used[name] for name in busiest} == pytest.approx(
            busiest, abs=1e-4
        )
        assert max(max(one.use) for one in loads(result)) <= 1.001


def test_link_is_in_use_only_while_a_message_leaves():
    result = simulate(unisono.schedule("broadcast", "chain", n=3), "ring:3", "64M")
    first, second = (
        np.array(next(one.use for one in loads(result) if one.name == name))
        for name in ("0>1", "1>2")
    )
    assert first[0] > 0.9
    assert first[-1] == 0
    assert second[0] == 0
    assert second[-2] > 0.9


def test_loads_need_messages_that_were_kept():
    result = simulate("ring", "switch:8", "1M", "closed")
    with pytest.raises(NotOffered, match="steps"):
        carried_over_time(result)


def test_links_are_those_of_the_simulation():
    asked = {"n": "8", "topology": "dgx-h100:1", "algorithm": "ring", "size": "16M"}
    found = studio_answers.links(asked)
    result = simulate(unisono.schedule("all_reduce", "ring", n=8), "dgx-h100:1", "16M")
    assert found["time"] == pytest.approx(result.time * 1e6)
    assert "16 MiB" in found["title"]
    assert found["map"].labels[8:]
    assert studio_answers.links({"n": "1"})["links"] == []
    with pytest.raises(BadArgument, match="not files"):
        studio_answers.links({"algorithm": "mine.py"})


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce"])
def test_trees_are_those_of_the_synthesis(collective):
    asked = {"collective": collective, "n": "6", "topology": "torus:2x3"}
    found = studio_answers.trees(asked)
    made = synthesize(collective, "torus:2x3")
    assert [tuple(tree["links"]) for tree in found["trees"]] == [
        tree.links for tree in made.trees
    ]
    assert sum(tree["share"] for tree in found["trees"]) == pytest.approx(1)
    for tree in found["trees"]:
        assert {tree["root"], *(b for _, b in tree["links"])} == set(range(6))
        for a, b in tree["links"]:
            first, *_, last = found["map"].routes[f"{a}>{b}"]
            assert (first, last) == (a, b)
    assert found["up"] == (collective == "reduce")


@pytest.mark.parametrize(
    ("collective", "topology", "why"),
    [
        ("barrier", "full:4", "cannot be made of trees"),
        ("all_to_all", "full:4", "paths, not of trees"),
        ("all_reduce", "dragonfly:5x3x1", "switches cannot be replaced"),
        ("all_reduce", "full:1", "nothing to send"),
    ],
)
def test_where_there_are_no_trees_the_answer_says_why(collective, topology, why):
    n = str(parse(topology).n)
    asked = {"collective": collective, "n": n, "topology": topology}
    found = studio_answers.trees(asked)
    assert found["trees"] == []
    assert why in found["why"]


def test_published_rows_are_those_of_the_tables_and_of_the_page():
    truth = json.loads(text("truth.json"))
    with (PUBLISHED / "collectives.csv").open(newline="") as file:
        given = list(csv.DictReader(file))
    calls = truth["collectives"]
    assert len(calls) == 496
    assert len(truth["training"]) == 306
    rows = {(r["source"], r["collective"], int(r["nbytes"])) for r in given}
    assert {(row[0], row[1], row[2]) for row in calls} <= rows
    micro = {
        (r["source"], r["collective"], int(r["nbytes"])): float(r["value"]) * 1e-6
        for r in given
        if r["unit"] == "us"
    }
    for source, what, nbytes, published, _, _ in calls:
        if (source, what, nbytes) in micro:
            assert published == pytest.approx(micro[source, what, nbytes], rel=1e-4)
    assert {row[0] for row in calls + truth["training"]} <= set(truth["sources"])
    page = (PUBLISHED.parents[1] / "docs" / "published.md").read_text("utf-8")
    for kind in ("collectives", "training"):
        errors = [abs(row[4] / row[3] - 1) for row in truth[kind] if not row[5]]
        middle, most = np.quantile(errors, [0.5, 0.9])
        fitted = len(truth[kind]) - len(errors)
        words = (
            rf"\| \*\*all\*\* \| {fitted} \| {len(errors)} \| ([\d.]+)% \| ([\d.]+)%"
        )
        found = re.search(words, page)
        assert found
        # the page is of all digits, the file has five
        shown = [float(part) / 100 for part in found.groups()]
        assert shown == pytest.approx([middle, most], abs=0.001)


# --- in a browser


def test_links_have_lanes_and_a_moment(desk_page):
    enter(desk_page, "Links")
    choose(desk_page, n=8, topology="cloud:2x4", size="16M")
    asked = {"n": "8", "topology": "cloud:2x4", "size": "16M", "algorithm": "ring"}
    found = studio_answers.links(asked)
    names = desk_page.run(
        "[...document.querySelectorAll('.links .heat title')]"
        ".map((e) => e.textContent.split(':')[0])"
    )
    assert set(names) == {one.name for one in found["links"]}
    assert desk_page.run("document.querySelectorAll('.links .home').length") == 2
    assert desk_page.run("document.querySelectorAll('.links .switch').length") > 0
    words = "document.querySelector('.links .sentence').textContent"
    at = 60
    desk_page.run(
        "(() => { const s = document.querySelector('.links .scrub');"
        f"s.value = {at}; s.dispatchEvent(new Event('input')); }})()"
    )
    busy = sum(one.use[at] > 0.005 for one in found["links"])
    assert f"{busy} of {found['all']} links are in use" in desk_page.run(words)
    before = desk_page.run(words)
    desk_page.run(
        "(() => { const p = document.querySelectorAll('.links svg')[1];"
        "const b = p.getBoundingClientRect(); p.dispatchEvent(new PointerEvent("
        "'pointerdown', {clientX: b.left + b.width / 3, clientY: b.top + 20})); })()"
    )
    assert desk_page.run(words) != before


def test_trees_can_be_chosen_by_root_and_number(desk_page):
    enter(desk_page, "Trees")
    choose(desk_page, n=6, topology="torus:2x3", collective="all_gather")
    found = studio_answers.trees(
        {"n": "6", "topology": "torus:2x3", "collective": "all_gather"}
    )
    arrows = "document.querySelectorAll('.trees path.arrow').length"
    assert desk_page.run(arrows) == 5
    for name, value in (("root", 4), ("tree", "")):
        desk_page.run(
            f"(() => {{ const f = document.querySelector('[name=trees-{name}]');"
            f"f.value = '{value}'; f.dispatchEvent(new Event('change')); }})()"
        )
    mine = [tree for tree in found["trees"] if tree["root"] == 4]
    words = desk_page.run("document.querySelector('.trees .sentence').textContent")
    assert words.startswith(f"{len(mine)} tree" if len(mine) > 1 else "tree")
    ways = {link for tree in mine for link in tree["links"]}
    assert desk_page.run("document.querySelectorAll('.trees .curve').length") == len(
        ways
    )
    choose(desk_page, collective="barrier")
    assert "cannot be made of trees" in desk_page.run(
        "document.querySelector('.trees').textContent"
    )


def test_published_points_say_their_source_and_error(desk_page):
    enter(desk_page, "Truth")
    rows = [row for row in json.loads(text("truth.json"))["collectives"] if not row[5]]
    points = "document.querySelectorAll('.truth .point').length"
    words = "document.querySelector('.truth .sentence').textContent"
    assert desk_page.run(points) == len(rows)
    worst = max(rows, key=lambda row: abs(row[4] / row[3] - 1))
    assert worst[0] in desk_page.run(words)
    desk_page.run("document.querySelector('.truth svg').focus()")
    desk_page.press("ArrowRight")
    first = min(rows, key=lambda row: row[3])
    assert f"{100 * (first[4] / first[3] - 1):.1f} %" in desk_page.run(words)
    assert desk_page.run(
        "document.querySelector('.truth .sentence a').href"
    ).startswith("https://")
    desk_page.run(
        "(() => { const f = document.querySelector('[name=truth-what]');"
        "f.value = 'training'; f.dispatchEvent(new Event('change')); })()"
    )
    assert "tokens/s" in desk_page.run(words)
    cells = "[...document.querySelectorAll('.truth tbody tr')].at(-1).innerText"
    steps = [row for row in json.loads(text("truth.json"))["training"] if not row[5]]
    middle = np.median([abs(row[4] / row[3] - 1) for row in steps])
    shown = desk_page.run(cells).split()[:4]
    assert shown == ["all", str(len(steps)), f"{100 * middle:.1f}", "%"]
