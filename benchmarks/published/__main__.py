"""Prints how far the simulator is from what others published; `write` keeps it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published.judging import (
    AIMS,
    Judged,
    Point,
    judged_collectives,
    judged_lines,
    judged_training,
    kind_of,
    summary,
    usual,
)
from benchmarks.published.tables import sources

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "published.md"
ROWS = ROOT / "src" / "unisono" / "view" / "web" / "truth.json"
"""All rows for the studio: what was published, and what is predicted."""
BEGIN, END = "<!-- errors: make truth -->", "<!-- end of errors -->"


def lines(kind: str, judged: Sequence[Judged]) -> list[str]:
    """A table of errors, as Markdown."""
    about = sources()[kind]
    unseen = kind == "collectives"
    head = "| source | fitted | judged | median | p90 |"
    made = [head + (" not seen: median | p90 |" if unseen else " left out |")]
    made.append("|---|---|---|---|---|" + ("---|---|" if unseen else "---|"))
    for one in judged:
        name = f"[{one.source}]({about[one.source]['url'].split()[0]})"
        row = f"| {name} | {one.fitted} | {len(one.errors)} | {_pair(one.errors)} |"
        left = f"{one.left_out} ({one.why})" if one.left_out else ""
        made.append(row + (f" {_pair(one.unseen)} |" if unseen else f" {left} |"))
    errors = [e for one in judged for e in one.errors]
    elsewhere = [e for one in judged for e in one.unseen]
    fitted = sum(one.fitted for one in judged)
    row = f"| **all** | {fitted} | {len(errors)} | {_pair(errors)} |"
    made.append(row + (f" {_pair(elsewhere)} |" if unseen else " |"))
    asked = " | ".join(f"{aim:.0%}" for aim in AIMS[kind])
    made.append(f"| asked for | | | {asked} |" + (" | |" if unseen else " |"))
    return made


def _pair(errors: Sequence[float]) -> str:
    if not errors:
        return " | "
    return " | ".join(f"{value:.1%}" for value in summary(errors))


def rows(judged: dict[str, list[Judged]]) -> str:
    """The rows as JSON, a line for each."""
    about = {
        name: {"url": one["url"], "about": one["about"]}
        for kind in judged
        for name, one in sources()[kind].items()
    }
    made = [f'"sources": {json.dumps(about)}']
    for kind, some in judged.items():
        points = [
            json.dumps([one.source, *_plain(point)])
            for one in some
            for point in one.points
        ]
        made.append(f'"{kind}": [\n' + ",\n".join(points) + "\n]")
    return "{" + ",\n".join(made) + "}\n"


def _plain(point: Point) -> list[object]:
    digits = [float(f"{x:.5g}") for x in (point.published, point.predicted)]
    return [point.what, point.nbytes, *digits, point.fitted]


def main(words: Sequence[str]) -> int:
    """Both tables, and the constants that they rest on."""
    collectives, calibrations = judged_collectives()
    training, devices = judged_training()
    text = ["**Collectives**", "", *lines("collectives", collectives), ""]
    middle, most = summary(found := judged_lines())
    text.append(
        f"By straight lines alone (`unisono fit`), {len(found)} calls of sources with "
        f"six rows to fit on and more: median {middle:.1%}, p90 {most:.1%}."
    )
    text += ["", "**Training steps**", "", *lines("training", training), ""]
    print("\n".join(text))
    for one in sorted({kind_of(name) for name in calibrations}):
        some = [c for name, c in calibrations.items() if kind_of(name) == one]
        print(f"{one[0]}, {'several hosts' if one[1] else 'one host'}: {usual(some)}")
    for name, device in devices.items():
        rates = device.matmul, device.attention, device.elementwise, device.contention
        print(f"{name}: " + ", ".join(f"{rate:.3f}" for rate in rates))
    if "write" in words:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        kept = f"{BEGIN}\n\n" + "\n".join(text) + f"\n{END}"
        PAGE.write_text(before + kept + after, "utf-8")
        ROWS.write_text(rows({"collectives": collectives, "training": training}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
