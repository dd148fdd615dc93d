"""The SVG picture: well formed, self-contained, and the same as before."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import unisono
from unisono.algorithms import library
from unisono.errors import ScheduleError
from unisono.schedule import collective, from_steps, reduce_step
from unisono.view import to_svg

NS = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).parents[2]


def parse(s):
    return ET.fromstring(to_svg(s))


@pytest.mark.parametrize("key", library(), ids="-".join)
@pytest.mark.parametrize("n", [1, 4])
def test_every_algorithm_has_a_well_formed_picture(key, n):
    made = library()[key](n)
    tree = parse(made)
    assert tree.find(f"{NS}title").text == made.title
    assert "chance of error" in tree.find(f"{NS}desc").text


def test_picture_in_the_readme_is_current():
    drawn = to_svg(unisono.schedule("all_reduce", "ring", n=5))
    assert (ROOT / "docs" / "ring.svg").read_text(encoding="utf-8") == drawn


def test_svg_has_one_panel_per_step_and_one_arrow_per_transfer():
    s = unisono.schedule("all_reduce", "ring", n=5)
    tree = parse(s)
    arrows = [p for p in tree.iter(f"{NS}path") if p.get("class") == "a"]
    heads = [p.get("marker-end").rpartition("-")[2] for p in arrows]
    assert heads.count("add)") == heads.count("copy)") == 20
    captions = [t.text for t in tree.iter(f"{NS}text") if t.get("class") == "p"]
    assert captions == ["start", *(f"step {i}" for i in range(1, 9))]


def test_changed_cells_are_ringed():
    s = unisono.schedule("all_gather", "direct", n=4)
    rings = [p for p in parse(s).iter(f"{NS}path") if p.get("class") == "r"]
    assert sum(p.get("d").count("M") for p in rings) == 12


@pytest.mark.parametrize("key", library(), ids="-".join)
def test_picture_of_sixteen_ranks_is_small(key):
    made = library()[key](16)
    assert len(to_svg(made)) < 300_000


def test_beyond_eight_ranks_steps_that_do_the_same_are_one_panel():
    tree = parse(unisono.schedule("all_reduce", "ring", n=16))
    texts = {"p": [], "l": [], "m": [], "m n": []}
    for node in tree.iter(f"{NS}text"):
        texts.setdefault(node.get("class"), []).append(node.text)
    assert texts["p"] == ["start", "steps 1-15", "steps 16-30"]
    said = "Every rank sends one chunk to the next rank, which adds it to its own."
    assert said in texts["l"]
    assert texts["m n"][16] == "123456789101112131415"  # chunk 0 beside the whole sum
    assert texts["m"][-1] == "16" * 16
    for node in tree.iter(f"{NS}text"):
        if node.get("class") in ("m", "m n"):
            assert len(node.get("x").split()) == len(node.text)


def test_beyond_eight_ranks_cells_name_the_rank_they_came_from():
    tree = parse(unisono.schedule("all_gather", "ring", n=11))
    numbers = [t.text for t in tree.iter(f"{NS}text") if t.get("class") == "m"]
    assert numbers[10] == "10"
    assert numbers[-1] == "10" * 11


def test_large_worlds_have_one_table_per_phase():
    s = unisono.schedule("all_reduce", "hierarchical", n=100)
    captions = [t.text for t in parse(s).iter(f"{NS}text") if t.get("class") == "p"]
    assert captions == [
        "reduce_scatter inside",
        "all_reduce across",
        "all_gather inside",
    ]
    assert len(to_svg(s)) < 100_000


def test_svg_loads_nothing_from_elsewhere():
    text = to_svg(unisono.schedule("all_to_all", "bruck", n=4))
    assert text.count("href") == text.count('href="#')  # parts of its own
    assert text.count("http") == 1  # the name space


def test_wrong_schedule_is_not_drawn():
    wrong = from_steps(
        collective("all_reduce"), 2, [reduce_step(0, 0, 1)], num_chunks=1
    )
    with pytest.raises(ScheduleError, match="rank 0 lacks rank 1"):
        to_svg(wrong)
