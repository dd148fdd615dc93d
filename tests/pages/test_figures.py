"""The figures of the pages: current, small, shown, and moving where they shall."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from docs.make_figures import FOLDER, figures, main

from unisono.schedule.collective import COLLECTIVES

ROOT = Path(__file__).parents[2]
FIGURES = figures()


@pytest.mark.parametrize("name", FIGURES)
def test_figure_is_current_and_small(name):
    """If not: `python -m docs.make_figures`, and look at what it has drawn."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text == FIGURES[name]()
    assert len(text) < 40_000
    assert text.count("href") == text.count('href="#')
    tree = ET.fromstring(text)
    assert tree.find("{http://www.w3.org/2000/svg}title").text


def test_every_figure_is_shown_and_none_is_left_over():
    assert {file.name for file in FOLDER.iterdir()} == set(FIGURES)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert set(re.findall(r"!\[[^\]]+\]\((?:docs/)?figures/([^)]+)\)", text)) == set(
        FIGURES
    )


def test_every_collective_has_a_figure():
    assert {f"{name}.svg" for name in COLLECTIVES} <= set(FIGURES)
    text = (FOLDER / "reduce_scatter.svg").read_text(encoding="utf-8")
    tree = ET.fromstring(text)
    cells = [
        node.text
        for node in tree.iter("{http://www.w3.org/2000/svg}text")
        if node.get("class") == "k"
    ]
    assert cells == ["abcd"] * 8  # four rows before, four after


def test_figures_are_written_anew(tmp_path):
    main(tmp_path / "figures")
    assert len(list((tmp_path / "figures").iterdir())) == len(FIGURES)


def test_first_picture_of_the_readme_moves():
    first = re.search(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    text = (ROOT / first[1]).read_text(encoding="utf-8")
    scenes = re.findall(r'<g class="s" style="animation-delay:(-[0-9.]+)s">', text)
    assert len(scenes) == 1 + 2 * 6
    assert sorted(map(float, scenes)) == [float(delay) for delay in scenes]
    assert text.count('<g class="t"') == 6 * 4
    assert "prefers-reduced-motion:reduce" in text
    assert "<script" not in text
