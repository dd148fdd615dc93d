"""Schedules as GOAL, the text that LogGOPSim and ATLAHS simulate.

    num_ranks 2
    rank 0 {
    l1: send 512b to 1 tag 0
    l2: recv 512b from 1 tag 1
    l2 requires l1
    }

Each message is a send and a receive with a tag of their own; what is added up is a
`calc` of so many nanoseconds after the receive. What waits for what follows from the
schedule's dependencies, each written on the rank where it can be: a send after the
receive of what it sends, a receive after the send of what it overwrites.

Hoefler, Siebert and Lumsdaine, "Group operation assembly language: a flexible way to
express collective communication", ICPP 2009.
"""

from __future__ import annotations

from pathlib import Path

from unisono.errors import BadArgument, whole_number
from unisono.schedule.schedule import Schedule

Message = tuple[int, int, int]
"""A step, a source and a destination."""


def dumps(schedule: Schedule, nbytes: int, *, reduce: float = 0.0) -> str:
    """The schedule, once verified, for buffers of `nbytes`, as GOAL text.

    `reduce` is the time to add up a byte, in seconds.
    """
    nbytes = whole_number("nbytes", nbytes)
    if nbytes < 0 or not 0 <= reduce < float("inf"):
        raise BadArgument(f"nbytes = {nbytes}, reduce = {reduce}: cannot be negative")
    schedule.verify()
    size = schedule.contract.chunk_sizes(nbytes).tolist()
    number: dict[Message, int] = {}
    sent: list[int] = []
    added: list[int] = []
    owner: list[int] = []  # of each transfer, its message
    for at, step in enumerate(schedule):
        for t in step:
            message = number.setdefault((at, t.src, t.dst), len(number))
            if message == len(sent):
                sent.append(0)
                added.append(0)
            weight = size[t.chunk % len(size)]
            sent[message] += weight
            added[message] += weight if t.reduces else 0
            owner.append(message)
    ranks = _Ranks(schedule.n)
    for (_, src, dst), message in number.items():
        calc = round(added[message] * reduce * 1e9)
        ranks.message(message, src, dst, sent[message], calc)
    due = schedule.dependencies()
    edges = {
        (owner[a], owner[b])
        for a, b in zip(due.before.tolist(), due.after.tolist(), strict=True)
    }
    for before, after in sorted(edges):
        ranks.wait(before, after)
    return ranks.text()


def save(schedule: Schedule, path: Path, nbytes: int, *, reduce: float = 0.0) -> None:
    """Write the schedule to a file."""
    path.write_text(dumps(schedule, nbytes, reduce=reduce), encoding="utf-8")


class _Ranks:
    """The lines of every rank, and the labels of what messages do there."""

    def __init__(self, n: int) -> None:
        """Nothing is done yet."""
        self.lines: list[list[str]] = [[] for _ in range(n)]
        self.count = [0] * n
        self.where: dict[int, tuple[int, ...]] = {}
        self.begins: dict[tuple[int, int], str] = {}
        self.ends: dict[tuple[int, int], str] = {}

    def message(self, number: int, src: int, dst: int, nbytes: int, calc: int) -> None:
        """A send here, a receive there, and the time to add it up."""
        self.where[number] = (src,) if src == dst else (src, dst)
        if src == dst:
            label = self._line(src, f"calc {calc}")
            self.begins[number, src] = self.ends[number, src] = label
            return
        send = self._line(src, f"send {nbytes}b to {dst} tag {number}")
        self.begins[number, src] = self.ends[number, src] = send
        recv = self._line(dst, f"recv {nbytes}b from {src} tag {number}")
        self.begins[number, dst] = self.ends[number, dst] = recv
        if calc:
            work = self._line(dst, f"calc {calc}")
            self.lines[dst].append(f"{work} requires {recv}")
            self.ends[number, dst] = work

    def wait(self, before: int, after: int) -> None:
        """What `after` does on a rank waits for what `before` did there."""
        for rank in self.where[after]:
            if (before, rank) in self.ends:
                label = self.begins[after, rank]
                line = f"{label} requires {self.ends[before, rank]}"
                self.lines[rank].append(line)

    def _line(self, rank: int, what: str) -> str:
        self.count[rank] += 1
        label = f"l{self.count[rank]}"
        self.lines[rank].append(f"{label}: {what}")
        return label

    def text(self) -> str:
        """The whole file."""
        parts = [f"num_ranks {len(self.lines)}\n"]
        for rank, lines in enumerate(self.lines):
            parts.append("\n".join([f"rank {rank} {{", *lines, "}\n"]))
        return "\n".join(parts)
