"""Write the pages and pictures that are made from the code, into docs/.

    python -m docs.make_pages        (`make docs` does, and then builds the site)

One page for each algorithm: the idea, the picture, the cost, when it wins, the paper.
The pictures that the tutorial names. The API reference (docs/make_reference.py). The
pages that stand beside the code (README and others), with their links turned. Costs,
pictures, proofs and winners are computed here and now, never typed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from docs import make_reference
from docs.drawings import DRAWINGS
from docs.winning import CLOSE, MACHINES, overview, where_it_wins
from unisono.algorithms import Algorithm, library
from unisono.algorithms import schedule as make
from unisono.errors import UnsupportedWorld
from unisono.schedule import Schedule
from unisono.schedule.collective import COLLECTIVES
from unisono.view import to_svg
from unisono.view.html import to_html

ROOT = Path(__file__).parents[1]
SMALL, ODD = 5, 13
BESIDE = {
    "README.md": "index.md",
    "README.zh.md": "zh/index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
"""Pages that stand beside the code, and where they are on the site."""

NAMED = re.compile(r"\]\(\.\./pictures/([^)]+)\)")
_PICTURE = re.compile(r"([a-z_]+)-([a-z_]+)-([0-9]+)\.svg")


def main(docs: Path = ROOT / "docs") -> None:
    """All pages and pictures, afresh."""
    for name in ("algorithms", "pictures", "zh"):
        shutil.rmtree(docs / name, ignore_errors=True)
        (docs / name).mkdir()
    for page in sorted((docs / "tutorial").glob("*.md")):
        for name in NAMED.findall(page.read_text(encoding="utf-8")):
            picture(docs / "pictures" / name)
    by_name = sorted(library().values(), key=lambda a: a.name)
    for name, group in groupby(by_name, key=lambda a: a.name):
        write(docs / "algorithms" / f"{name}.md", page_of(name, list(group), docs))
    write(docs / "algorithms" / "index.md", index())
    make_reference.main(docs)
    for name, place in BESIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        write(docs / place, relinked(text, place))


def write(file: Path, text: str) -> None:
    """A file, as everywhere here in UTF-8."""
    file.write_text(text, encoding="utf-8")


def picture(file: Path) -> None:
    """What the name of a picture says, as drawings.svg or all_reduce-ring-5.svg."""
    if file.name in DRAWINGS:
        write(file, DRAWINGS[file.name]())
        return
    found = _PICTURE.fullmatch(file.name)
    if found is None:
        raise SystemExit(f"docs: nobody can draw {file.name}")
    draw(make(found[1], found[2], int(found[3])), file)


def draw(schedule: Schedule, file: Path) -> None:
    """A schedule as a picture, and beside it as a page that plays it."""
    write(file, to_svg(schedule))
    write(file.with_suffix(".html"), to_html(schedule))


def relinked(text: str, place: str) -> str:
    """Links as they are from that place in docs/; those to code become plain words."""
    text = re.sub(r"\[([^\]]+)\]\((?:examples|src)/[^)]+\)", r"`\1`", text)
    up = "../" * place.count("/")
    for name, other in BESIDE.items():
        text = text.replace(f"]({name})", f"]({up}{other})")
    return re.sub(r"\]\(docs/", f"]({up}", text)


# --- a page for each algorithm


def page_of(name: str, algorithms: list[Algorithm], docs: Path) -> str:
    """The idea, a picture for each collective, the cost, when it wins, the paper."""
    parts = [f"# {name}", *idea(algorithms[0])]
    for algorithm in algorithms:
        made = algorithm(SMALL)
        file = f"{name}-{algorithm.collective.name}.svg"
        draw(made, docs / "algorithms" / file)
        parts += [f"## {algorithm.collective.name}", algorithm.about]
        parts.append(f"![{made.title}]({file}){{ .schedule }}")
    parts += advised(algorithms[0])
    parts += [f"## Cost at n = {ODD}", COLUMNS, table(algorithms)]
    parts += ["## When it wins", WINNING]
    parts += [where_it_wins(name, a.collective.name) for a in algorithms]
    paper = algorithms[0].paper
    parts += ["## Paper", paper or NO_PAPER]
    return "\n\n".join(parts) + "\n"


NO_PAPER = "None: it is the collective's own promise, carried out to the letter."
COLUMNS = (
    "Rounds are messages one after the other; span is what passes through the busiest "
    "rank of each step, work what it adds up, summed, in buffers."
)
WINNING = (
    "As simulated against every other algorithm here, on "
    f"{len(MACHINES)} machines, from 64 B to 1 GiB; who comes within "
    f"{CLOSE - 1:.0%} of the fastest has won as well. "
    "[What is simulated](../simulation.md), and what is not."
)


WINNERS = (
    "As simulated ([what is, and what is not](../simulation.md)). Ranks of a host that "
    "share memory are another matter: what wins there is [measured](../tuning.md)."
)


def advised(algorithm: Algorithm) -> Iterator[str]:
    """When it is good and when not, in its file's words."""
    if algorithm.advice is None:
        return
    yield "## When to use it"
    words = algorithm.advice.en
    yield f"- Good: {words.good}\n- Not good: {words.bad}\n- Memory: {words.memory}"


def idea(algorithm: Algorithm) -> Iterator[str]:
    """The file's own words without the paper; what is indented there keeps its form."""
    head, *rest = algorithm.story.split("\n\n")
    yield head
    for part in rest:
        if " ".join(part.split()) == algorithm.paper:
            continue
        lines = part.splitlines()
        indented = all(line.startswith(" ") for line in lines)
        yield f"```text\n{part}\n```" if indented else part


def table(algorithms: list[Algorithm]) -> str:
    """A line for each variant of each algorithm."""
    rows = ["| collective | algorithm | steps | rounds | span | work | same bits |"]
    rows.append("|---|---|---|---|---|---|---|")
    for algorithm in algorithms:
        for variant in algorithm.variants:
            try:
                made = algorithm(ODD, **variant)
            except UnsupportedWorld:
                continue
            made.verify()
            cost, bits = made.cost(), made.consistency()
            rows.append(
                f"| {algorithm.collective.name} | [{made.name}]({algorithm.name}.md) "
                f"| {cost.steps} | {cost.rounds} | {cost.span:.4g} | {cost.work:.4g} "
                f"| {'yes' if bits.same_bits_on_all_ranks else 'no'} |"
            )
    return "\n".join(rows)


def index() -> str:
    """The table of everything."""
    head = f"# Algorithms\n\nEverything there is, verified and costed at n = {ODD}. "
    parts = [head + COLUMNS, table(list(library().values())), "## Who wins where"]
    parts += [WINNERS, *map(overview, COLLECTIVES)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
