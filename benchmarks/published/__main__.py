"""Prints how far the simulator is from what others published; `write` keeps it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published.judging import (
    AIMS,
    Judged,
    judged_collectives,
    judged_lines,
    judged_training,
    summary,
    usual,
)
from benchmarks.published.tables import fabric, sources

PAGE = Path(__file__).parents[2] / "docs" / "published.md"
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
    for several in (False, True):
        some = [c for n, c in calibrations.items() if (fabric(n).hosts > 1) is several]
        print(f"{'several hosts' if several else 'one host'}: {usual(some)}")
    for name, device in devices.items():
        rates = device.matmul, device.attention, device.elementwise, device.contention
        print(f"{name}: " + ", ".join(f"{rate:.3f}" for rate in rates))
    if "write" in words:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        kept = f"{BEGIN}\n\n" + "\n".join(text) + f"\n{END}"
        PAGE.write_text(before + kept + after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
