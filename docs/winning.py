"""When does an algorithm win? The simulator says, on a few machines and many sizes.

An algorithm wins at a size where no other of the library is faster; who comes within
one percent has won as well, since the model is no better than that. What has won
nowhere is shown with the place where it came closest: some are here because others are
made of them, or to show what they cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from unisono.simulate import Comparison, compare
from unisono.simulate.candidates import candidates
from unisono.topology import parse
from unisono.units import format_bytes

MACHINES: Mapping[str, str] = {
    "switch:8": "8 ranks on a switch",
    "switch:13": "13 ranks on a switch",
    "ring:8": "8 ranks in a ring",
    "torus:4x4": "a torus of 4 x 4",
    "cloud:4x8": "4 hosts of 8 ranks that share a card",
    "dgx-h100:16": "16 DGX H100, a card for each GPU",
}
SIZES = [1 << k for k in range(6, 31, 2)]
CLOSE = 1.01


@dataclass(frozen=True)
class Best:
    """How near an algorithm came to the winner: where, at which size, who won."""

    slower: float
    machine: str
    nbytes: int
    winner: str


@cache
def compared(collective: str, machine: str) -> Comparison:
    """Everything there is for a collective on a machine, at all sizes."""
    topology = parse(machine)
    names = candidates(collective, topology)
    return compare(collective, names, topology, SIZES)


def idea(name: str) -> str:
    """The file that a spelled name belongs to."""
    return name.partition(":")[0]


def linked(name: str) -> str:
    """The name with a link to its page; in a pair each half has its own."""
    if "+" in idea(name):
        first, _, second = name.partition("+")
        return f"{linked(first)}+{linked(second)}"
    return f"[{name}]({idea(name)}.md)"


def times(name: str, comparison: Comparison) -> list[float]:
    """The best time of any variant of an algorithm, by size; none if it has none."""
    mine = [rows for key, rows in comparison.results.items() if idea(key) == name]
    return [min(row.time for row in rows) for rows in zip(*mine, strict=True)]


def won(name: str, collective: str, machine: str) -> list[bool]:
    """At which sizes it wins."""
    comparison = compared(collective, machine)
    return [
        mine <= comparison.ranking(at)[0].time * CLOSE
        for at, mine in enumerate(times(name, comparison))
    ]


def closest(name: str, collective: str) -> Best | None:
    """Where it came closest to the winner."""
    found = []
    for machine in MACHINES:
        comparison = compared(collective, machine)
        for at, mine in enumerate(times(name, comparison)):
            first = comparison.ranking(at)[0]
            slower = mine / first.time if first.time else 1.0
            found.append(Best(slower, machine, SIZES[at], first.algorithm))
    return min(found, key=lambda b: b.slower) if found else None


def overview(collective: str) -> str:
    """Who is fastest where: a line for each machine, a column for each of some sizes.

    Only the first is named, though others may be as good.
    """
    places = [0] if collective == "barrier" else range(2, len(SIZES), 3)
    sizes = (
        "any"
        if collective == "barrier"
        else " | ".join(format_bytes(SIZES[at]) for at in places)
    )
    rows = [f"| {collective} | {sizes} |", "|---" * (len(places) + 1) + "|"]
    for machine, words in MACHINES.items():
        comparison = compared(collective, machine)
        first = (comparison.ranking(at)[0].algorithm for at in places)
        cells = " | ".join(map(linked, first))
        rows.append(f"| {words} | {cells} |")
    return "\n".join(rows)


def ranges(flags: list[bool]) -> Iterator[str]:
    """Runs of sizes, in words: "up to 4 KiB", "64 KiB to 1 MiB", "from 16 MiB on"."""
    at = 0
    while at < len(flags):
        end = at
        while end < len(flags) and flags[end]:
            end += 1
        if end > at:
            yield _run(at, end - 1)
        at = end + 1


def _run(first: int, last: int) -> str:
    low, high = format_bytes(SIZES[first]), format_bytes(SIZES[last])
    if first == 0:
        return "all sizes" if last == len(SIZES) - 1 else f"up to {high}"
    if last == len(SIZES) - 1:
        return f"from {low} on"
    return low if first == last else f"{low} to {high}"


def where_it_wins(name: str, collective: str) -> str:
    """The text on the page: a list of where it wins, or how near it came."""
    lines = []
    for machine, words in MACHINES.items():
        where = ", ".join(ranges(won(name, collective, machine)))
        if where and collective == "barrier":
            lines.append(f"- {words} (`{machine}`)")
        elif where:
            lines.append(f"- {words} (`{machine}`): {where}")
    if lines:
        return f"**{collective}** wins on\n\n" + "\n".join(lines)
    best = closest(name, collective)
    if best is None:
        return f"**{collective}**: no machine here has a number of ranks that suits it."
    size = "" if collective == "barrier" else f" at {format_bytes(best.nbytes)}"
    return (
        f"**{collective}** wins nowhere here; it comes closest on "
        f"{MACHINES[best.machine]} (`{best.machine}`){size}: {best.slower:.2f} times "
        f"what `{best.winner}` takes."
    )
