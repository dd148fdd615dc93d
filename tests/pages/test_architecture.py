"""The architecture pages name files, folders and functions that exist."""

import re
from pathlib import Path

import pytest
from snippets import FENCE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PARTS = sorted((DOCS / "architecture").glob("*.md"))
PAGES = [DOCS / "architecture.md", *PARTS]
CODE = re.compile(r"`([^`\n]+)`")
ENDINGS = (".py", ".cpp", ".hpp", ".inl", ".toml", "/")
NAMED = re.compile(r"`([^`\n]+\.(?:py|cpp|hpp|inl))`\s+\(((?:`[^`\n]+`(?:,\s+)?)+)\)")
"""A file, and in brackets the names that it defines or uses."""
OLD_WORDS = re.compile(
    r"\b(house|rooms?|floors?|doors?|letters?|meet|meets|meeting|lend(?:s|ing)?|lent|"
    r"crowd|verdicts?|told|knock\w*|buried|condemn\w*|overseer|warden)\b",
    re.IGNORECASE,
)


def found(path):
    """A path from the root or from the package; None if there is none."""
    places = (ROOT / path, ROOT / "src" / "unisono" / path)
    return next((place for place in places if place.exists()), None)


def paths(text):
    """What is in backticks and is a path: of a source file, or of a folder."""
    return [p for p in CODE.findall(FENCE.sub("", text)) if p.endswith(ENDINGS)]


def wrong_paths(text):
    return [path for path in paths(text) if "*" not in path and found(path) is None]


def wrong_names(text):
    """Names in brackets after a file in which they do not occur."""
    for path, names in NAMED.findall(FENCE.sub("", text)):
        source = found(path).read_text(encoding="utf-8") if found(path) else ""
        for name in CODE.findall(names):
            last = re.split(r"::|\.", name)[-1]
            if not re.search(rf"\b{re.escape(last)}\b", source):
                yield f"{path}: {name}"


def page_text(page):
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page):
    assert paths(page_text(page))
    assert wrong_paths(page_text(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_occur_in_their_files(page):
    assert list(wrong_names(page_text(page))) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_old_words_are_not_used(page):
    assert OLD_WORDS.findall(CODE.sub("", page_text(page))) == []


def test_wrong_paths_and_names_are_found():
    right = "`runtime/core.py` (`Core.run`), `schedule/`, `native/engine/comm.cpp`, `n`"
    assert wrong_paths(right) == []
    assert list(wrong_names(right)) == []
    wrong = "`runtime/kernel.py`, `native/motor/`, `errors.py` (`UsageError`, `Nope`)"
    assert wrong_paths(wrong) == ["runtime/kernel.py", "native/motor/"]
    assert list(wrong_names(wrong)) == ["errors.py: Nope"]


def test_diagram_names_existing_paths():
    diagrams = "".join(match[0] for match in FENCE.finditer(page_text(PAGES[0])))
    named = re.findall(r"[a-z0-9_]+(?:/[a-z0-9_]+)*(?:/|\.py)(?![\w/])", diagrams)
    assert len(named) > 10
    assert [path for path in named if found(path) is None] == []


def test_every_package_is_in_the_tables():
    package = ROOT / "src" / "unisono"
    tops = [f.parent for f in package.glob("*/__init__.py")]
    below = [f.parent for n in ("runtime", "parallel") for f in package.glob(f"{n}/*/")]
    folders = {f"{f.relative_to(package)}/" for f in [*tops, *below]}
    folders |= {f"native/{f.name}/" for f in (ROOT / "native").glob("*/")}
    kept = {name for name in folders if "__" not in name} - {"parallel/", "interop/"}
    tables = {path for path in paths(page_text(PAGES[0])) if path.endswith("/")}
    assert kept - tables == set()


def test_every_part_is_linked_from_the_first_page():
    text = page_text(PAGES[0])
    assert PARTS
    assert [p.name for p in PARTS if f"(architecture/{p.name}" not in text] == []
