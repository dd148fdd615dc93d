"""The tutorial does what it says: every snippet runs and prints what stands there."""

import re
import tomllib
from pathlib import Path

import pytest
from snippets import FENCE, Page, snippets

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial"
PAGES = sorted(f for f in TUTORIAL.glob("*.md") if not f.name.endswith(".zh.md"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of its own for what a page writes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def slow_ones_as_sweeps(pages):
    """Those whose processes import torch again and again."""
    return [
        pytest.param(page, marks=[pytest.mark.sweep] * (page.stem == "gpus"))
        for page in pages
    ]


@pytest.mark.cases(3)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", slow_ones_as_sweeps(PAGES), ids=lambda page: page.stem)
def test_every_snippet_runs(page, here):
    assert Page(page).run() > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_has_a_picture_of_a_schedule_or_simulation(page):
    assert re.search(r"!\[[^\]]+\]\(\.\./pictures/", page.read_text(encoding="utf-8"))


def test_pages_are_numbered_without_gaps():
    titles = [p.read_text(encoding="utf-8").partition("\n")[0] for p in PAGES]
    numbers = sorted(int(re.match(r"# (\d+)\. ", title)[1]) for title in titles)
    assert numbers == list(range(1, len(PAGES) + 1))


def test_section_on_saved_options_is_true(here):
    text = (TUTORIAL.parent / "running.md").read_text(encoding="utf-8")
    section = text.partition("### Saved options\n")[2].partition("\n## ")[0]
    assert write(here, section).run() == 1
    [file] = [s.text for s in snippets(section) if s.kind == "toml"]
    kept = tomllib.loads((here / "unisono.toml").read_text(encoding="utf-8"))
    assert kept == tomllib.loads(file)


def write(folder, text):
    file = folder / "page.md"
    file.write_text(text, encoding="utf-8")
    return Page(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```pycon\n>>> 1 + 1\n3\n```\n", "Expected:\n    3"),
        ("```python\nassert 1 == 2\n```\n", ""),
        ("```python title='x'\n1 / 0\n```\n", "division"),
        ('```python title="a.py"\n1\n```\n', "nobody runs {'a.py'}"),
        ("```console\n$ unisono explain all_reduce none -n 2\n```\n", "exit code 2"),
        ("```console\n$ unisono env\nnothing of it\n```\n", "expected:\nnothing"),
        ("```console\n$ rm -r here\n```\n", "cannot run 'rm -r here'"),
        ("```console\nunisono env\n```\n", "no $ in it"),
        ("```pycon\n1 + 1\n```\n", "no >>> in it"),
    ],
)
def test_page_with_wrong_output_is_detected(text, message, here):
    with pytest.raises((AssertionError, ZeroDivisionError)) as wrong:
        write(here, text).run()
    assert message in str(wrong.value)


def test_exit_code_can_be_expected(here):
    page = "```console\n$ unisono explain all_reduce none -n 2; echo $?\n...\n2\n```\n"
    assert write(here, page).run() == 1


def uncommented(snippet):
    """Code without its comments, which are translated."""
    return re.sub(r" *# .*", "", snippet.text)


def in_chinese(page):
    return page.with_suffix(".zh.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_in_chinese_has_the_same_snippets(page):
    one, other = (
        [(s.kind, s.title, uncommented(s)) for s in snippets(f.read_text("utf-8"))]
        for f in (page, in_chinese(page))
    )
    assert one == other
    assert one


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_in_chinese_has_the_same_parts(page):
    """The same number, pictures, and headings of each level."""
    one, other = (FENCE.sub("", f.read_text("utf-8")) for f in (page, in_chinese(page)))
    for part in (r"^# \d+\. ", r"\]\((\.\./pictures/[^)]+)\)", r"^(#+) "):
        found = re.findall(part, one, re.MULTILINE)
        assert found
        assert found == re.findall(part, other, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_both_languages_link_to_each_other_and_stay_in_their_own(page):
    there = in_chinese(page)
    english, chinese = page.read_text("utf-8"), there.read_text("utf-8")
    assert f"\n[中文]({there.name})\n" in english
    assert f"\n[English]({page.name})\n" in chinese
    link = re.compile(r"\]\((\w+)(\.zh)?\.md[#)]")
    assert {(n, z) for n, z in link.findall(english) if z} == {(page.stem, ".zh")}
    assert {(n, z) for n, z in link.findall(chinese) if not z} == {(page.stem, "")}
