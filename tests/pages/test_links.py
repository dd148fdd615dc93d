"""Every link inside the project leads somewhere, headings included."""

import re
from pathlib import Path

import pytest
from snippets import FENCE

ROOT = Path(__file__).parents[2]
BESIDE = sorted(ROOT.glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(text):
    """Without code, in which brackets mean other things."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def slug(heading):
    """The name that a heading is linked by, as mkdocs and others make it."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def headings(file):
    text = FENCE.sub("", file.read_text(encoding="utf-8"))
    plain = text.replace("`", "").replace("*", "")
    return {slug(found) for found in re.findall(r"^#+ (.*)$", plain, re.MULTILINE)}


def broken(file):
    """Links of a page that lead nowhere."""
    for target in LINK.findall(prose(file.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        if not there.exists() or (anchor and anchor not in headings(there)):
            yield target


@pytest.mark.sweep
def test_all_links_of_the_site_have_targets(docs):
    pages = sorted(docs.rglob("*.md"))
    assert {"index.md", "glossary.md", "ring.md"} <= {page.name for page in pages}
    found = {str(p.relative_to(docs)): list(broken(p)) for p in pages}
    assert {page: links for page, links in found.items() if links} == {}


@pytest.mark.parametrize("page", BESIDE, ids=lambda page: page.name)
def test_links_outside_the_site_have_targets(page):
    assert list(broken(page)) == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Here, and `there`\n[a](none.md) [b](#here-and-there) [c](#nowhere)\n"
        "[d](page.md#here-and-there) [e](page.md#other) [f](https://example.org)\n"
        "`[g](code)`\n```text\n[h](code)\n```\n",
        encoding="utf-8",
    )
    assert list(broken(page)) == ["none.md", "#nowhere", "page.md#other"]


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    docs = ROOT / "docs"
    kept = [docs, docs / "tutorial", docs / "architecture"]
    for page in (page for folder in kept for page in folder.glob("*.md")):
        assert f" {page.relative_to(docs)}\n" in nav
