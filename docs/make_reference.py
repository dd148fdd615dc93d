"""Write the pages of the API reference, docs/reference/*.md but for its index.

Names are read from the sources by griffe, without importing them: what a module lists
in `__all__`, or else what is public in it. A page names each once; mkdocstrings puts
the signature and the docstring in its place when the site is built. What the package
`unisono` itself exports is in one table, with the page that each name is on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Page:
    """A page: its file, its title, and the module or the names of `unisono` on it."""

    file: str
    title: str
    module: str
    names: tuple[str, ...] = ()


PAGES = (
    Page("communicator", "Communicator", "unisono", ("Communicator", "Work")),
    Page("errors", "Errors", "unisono.errors"),
    Page("schedule", "The schedule language", "unisono.schedule"),
    Page("algorithms", "Algorithms", "unisono.algorithms"),
    Page("codecs", "Codecs", "unisono.codecs"),
    Page("parallel", "Training strategies", "unisono.parallel"),
    Page("torch", "PyTorch", "unisono.interop.torch"),
    Page("ray", "Ray", "unisono.interop.ray"),
    Page("msccl", "MSCCL", "unisono.interop.msccl"),
    Page("goal", "GOAL", "unisono.interop.goal"),
    Page("chakra", "Chakra", "unisono.interop.chakra"),
    Page("what_if", "Traces of others", "unisono.interop.what_if"),
    Page("topology", "Topologies", "unisono.topology"),
    Page("simulate", "Simulation", "unisono.simulate"),
    Page("synthesize", "Synthesis", "unisono.synthesize"),
    Page("search", "Searching for a plan", "unisono.search"),
    Page("tune", "Tuning", "unisono.tune"),
    Page("trace", "Traces", "unisono.trace"),
    Page("testing", "Testing", "unisono.testing"),
)
"""All pages but `unisono`, which has what the others leave."""


def main(docs: Path = ROOT / "docs") -> None:
    """All pages, afresh."""
    for file, text in pages().items():
        (docs / "reference" / f"{file}.md").write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """The text of each page."""
    made = {page.file: text_of(page) for page in PAGES}
    made["unisono"] = package_page()
    return made


def text_of(page: Page) -> str:
    """What the module says of itself, if it is all of it, and each of its names."""
    parts = [f"# {page.title}"]
    if not page.names:
        parts.append(f"::: {page.module}\n    options:\n      members: false")
    parts += [f"::: {path}" for path in entries(page)]
    return "\n\n".join(parts) + "\n"


def entries(page: Page) -> list[str]:
    """The paths on a page, as one would import them."""
    return [f"{page.module}.{name}" for name in page.names or public(page.module)]


def package_page() -> str:
    """What `unisono` exports: the page of each name, and those that no page has."""
    rows = ["| name | page |", "|---|---|"]
    own = []
    for name in public("unisono"):
        path = path_of(name)
        page = place_of(path)
        if page is None:
            own.append(path)
        link = f"[{page.title}]({page.file}.md)" if page else "this one"
        rows.append(f"| `unisono.{name}` | {link} |")
    parts = ["# unisono", "\n".join(rows), *(f"::: {path}" for path in own)]
    return "\n\n".join(parts) + "\n"


def path_of(name: str) -> str:
    """The path that documents a name of the package.

    `unisono.schedule` is a package in the sources, and as an attribute a function.
    """
    return "unisono.algorithms.schedule" if name == "schedule" else f"unisono.{name}"


def place_of(path: str) -> Page | None:
    """The page that has what is at this path, under any name."""
    wanted = target(path)
    for page in PAGES:
        if any(target(other) == wanted for other in entries(page)):
            return page
    return None


@cache
def package() -> griffe.Module:
    """The sources, as griffe reads them."""
    loaded = griffe.load("unisono", search_paths=[str(ROOT / "src")])
    assert isinstance(loaded, griffe.Module)
    return loaded


@cache
def found(path: str) -> griffe.Object | griffe.Alias:
    """What is at a path."""
    inside = path.removeprefix("unisono").removeprefix(".")
    return package()[inside] if inside else package()


@cache
def target(path: str) -> str:
    """Where it is defined."""
    return str(found(path).canonical_path)


@cache
def public(module: str) -> tuple[str, ...]:
    """What a module lists in `__all__`; or else what is defined there and public."""
    there = found(module)
    if there.exports is not None:
        return tuple(sorted(str(name) for name in there.exports))
    return tuple(
        name
        for name, member in there.members.items()
        if member.is_public and not member.is_alias and not member.is_module
    )


if __name__ == "__main__":
    main()
