"""Write the pages that are made from the code: one for each algorithm, and their table.

    make docs

Costs, pictures and proofs on these pages are computed here and now, never typed.
"""

from __future__ import annotations

import re
import shutil
from itertools import groupby
from pathlib import Path

from unisono.algorithms import Algorithm, library
from unisono.errors import UnsupportedWorld
from unisono.view import to_svg

DOCS = Path(__file__).parent
PAGES = DOCS / "algorithms"
SMALL, ODD = 5, 13


def main() -> None:
    """All pages, afresh."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir()
    by_name = sorted(library().values(), key=lambda a: a.name)
    for name, group in groupby(by_name, key=lambda a: a.name):
        text = page(name, list(group))
        (PAGES / f"{name}.md").write_text(text, encoding="utf-8")
    (PAGES / "index.md").write_text(index(), encoding="utf-8")
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (DOCS / "index.md").write_text(relinked(readme), encoding="utf-8")
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        text = (DOCS.parent / name).read_text(encoding="utf-8")
        (DOCS / name).write_text(relinked(text), encoding="utf-8")


def relinked(text: str) -> str:
    """Links as they are inside docs/; those to code become plain words."""
    text = re.sub(r"\[([^\]]+)\]\((?:examples|src)/[^)]+\)", r"`\1`", text)
    return re.sub(r"\]\(docs/", "](", text)


def page(name: str, algorithms: list[Algorithm]) -> str:
    """The story of one algorithm, its costs, and a picture for each collective."""
    parts = [f"# {name}", f"```text\n{algorithms[0].story}\n```"]
    parts += [f"## Cost at n = {ODD}", table(algorithms)]
    for algorithm in algorithms:
        made = algorithm(SMALL)
        picture = f"{name}-{algorithm.collective.name}.svg"
        (PAGES / picture).write_text(to_svg(made), encoding="utf-8")
        parts += [f"## {algorithm.collective.name}", algorithm.about]
        parts.append(f"![{made.title}]({picture})")
    return "\n\n".join(parts) + "\n"


def table(algorithms: list[Algorithm]) -> str:
    """A line for each variant of each algorithm."""
    rows = ["| collective | algorithm | steps | rounds | buffers | added | same bits |"]
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
    head = f"# Algorithms\n\nEverything there is, verified and costed at n = {ODD}.\n\n"
    return head + table(list(library().values())) + "\n"


if __name__ == "__main__":
    main()
