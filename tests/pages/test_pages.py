"""Pages and pictures that are made from the code."""

import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from unisono.algorithms import library

NAMES = sorted({algorithm.name for algorithm in library().values()})


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_has_its_page(docs, name):
    text = (docs / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
    mine = [a for a in library().values() if a.name == name]
    for part in ("## Cost at n = 13", "## When it wins", "## Paper"):
        assert text.count(part) == 1
    for algorithm in mine:
        collective = algorithm.collective.name
        assert f"\n## {collective}\n\n{algorithm.about}\n" in text
        assert f"**{collective}** wins" in text
        assert (docs / "algorithms" / f"{name}-{collective}.svg").is_file()
        if algorithm.paper:
            assert text.rstrip().endswith(algorithm.paper)


def test_table_of_algorithms_shows_where_each_wins(docs):
    text = (docs / "algorithms" / "index.md").read_text(encoding="utf-8")
    for collective, name in library():
        assert re.search(rf"^\| {collective} \| \[{name}\b", text, re.MULTILINE)
        table = (
            text.partition(f"| {collective} | 1 KiB |")[2]
            or text.partition(f"| {collective} | any |")[2]
        )
        assert re.search(r"^\| two hosts of two \| \[[a-z_]+", table, re.MULTILINE)


def test_both_halves_of_a_pair_are_linked():
    from docs.winning import linked

    assert linked("tree:radix=4") == "[tree:radix=4](tree.md)"
    assert linked("ring+tree:radix=4") == "[ring](ring.md)+[tree:radix=4](tree.md)"
    uneven = "hierarchical:levels=5+4"
    assert linked(uneven) == f"[{uneven}](hierarchical.md)"


def test_pictures_are_drawings_with_a_title(docs):
    pictures = sorted((docs / "pictures").glob("*.svg"))
    assert {"costs.svg", "overlap.svg", "memory.svg"} <= {p.name for p in pictures}
    for file in pictures:
        root = ElementTree.parse(file).getroot()
        assert root.tag.endswith("svg")
        assert root[0].tag.endswith("title")
        assert root[0].text


def test_drawn_schedules_have_a_player(docs):
    drawn = re.compile(r"!\[[^\]]+\]\(([^)]+)\.svg\)\{ \.schedule \}")
    for page in sorted(docs.rglob("*.md")):
        for picture in drawn.findall(page.read_text(encoding="utf-8")):
            moving = (page.parent / f"{picture}.html").read_text(encoding="utf-8")
            assert moving.startswith("<!doctype html>")
            assert len(moving) < 500_000


def test_picture_that_cannot_be_drawn_fails_the_build(tmp_path):
    from docs.make_pages import picture

    with pytest.raises(SystemExit, match=r"nobody can draw sketch\.svg"):
        picture(tmp_path / "sketch.svg")


def test_every_size_has_a_winner():
    from docs import winning

    wins = {name: winning.won(name, "all_reduce", "switch:4") for name in NAMES}
    at_each_size = zip(*(flags for flags in wins.values() if flags), strict=True)
    assert all(any(flags) for flags in at_each_size)
    assert not all(wins["tree"])


def test_ranges_of_sizes_are_written_in_words():
    from docs.winning import SIZES, ranges

    def said(*places):
        return list(ranges([at in places for at in range(len(SIZES))]))

    last = len(SIZES) - 1
    assert said() == []
    assert said(*range(len(SIZES))) == ["all sizes"]
    assert said(0, 1) == ["up to 256 B"]
    assert said(2) == ["1 KiB"]
    assert said(0, 2, 3, last) == ["up to 64 B", "1 KiB to 4 KiB", "from 1 GiB on"]


def shown(html, page):
    from docs.live import on_page_content

    return on_page_content(html, page=page)


def test_picture_is_animated_where_a_page_exists(tmp_path):
    page = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(tmp_path / "a.md")))
    image = '<p><img alt="A ring" class="schedule" src="ring.svg" /></p>'
    other = '<p><img alt="A map" src="ring.svg" /></p>'
    assert shown(image, page) == image
    (tmp_path / "ring.html").touch()
    assert '<iframe class="schedule" src="ring.html" title="A ring"' in shown(
        image, page
    )
    assert shown(other, page) == other


def test_options_in_the_text_stay_on_one_line(tmp_path):
    page = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(tmp_path / "a.md")))
    kept = "<pre><span></span><code>unisono run -n 4\n</code></pre><code>a-b - 1</code>"
    assert shown(kept, page) == kept
    named = shown("<p>or <code>studio [--log-dir D] -x</code> --not</p>", page)
    whole = '<span class="option">{}</span>'.format
    assert named == (
        f"<p>or <code>studio [{whole('--log-dir')} D] {whole('-x')}</code> --not</p>"
    )


def test_page_that_loads_from_elsewhere_fails_the_build():
    from docs.live import on_post_page

    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    fine = '<a href="https://example.org">there</a><script src="a.js"></script>'
    assert on_post_page(fine, page=page) == fine
    for wrong in (
        '<script async src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="//example.org/a.css">',
        "<img src=http://example.org/a.png>",
    ):
        with pytest.raises(SystemExit, match=r"a\.md would fetch <"):
            on_post_page(wrong, page=page)
