"""Chrome's trace format: the one writer that the simulator and the runtime share.

    sheet = Sheet()
    sent = sheet.slice(0, "sends", "to 1", 0.0, 5.0)          times in microseconds
    came = sheet.slice(1, "receives", "from 0", 4.0, 9.0)
    sheet.arrow(sent, came, nbytes=4096)
    sheet.document()                                          a dict, ready for JSON

Ranks are processes and lanes are threads, so that a model and a measurement open side
by side. What Perfetto wants beyond Chrome's rules is kept to:

- the slices of a thread nest, to the nanosecond that it counts in; those that overlap
  otherwise go to another thread of the same lane, "sends 2" and so on;
- an arrow holds on to the slice that its thread opened last, so nothing is opened
  within a slice that has an arrow;
- an arrow leads forward: one that ends in a slice that began before the one it comes
  from is turned round, so what was expected before it was sent has a slice of its own
  for its coming;
- a thread has a number that no other has, nor any process: that would be its main one.

What an arrow stands for is under way from where it leaves to the end of the slice that
receives it, and until then counts as bytes in flight. The keys at the top are Kineto's,
for PyTorch's tools.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LANES = (
    *("calls", "arrival", "sends", "receives", "encoding", "waiting", "messages"),
    *("calls on cuda", "arrival on cuda", "ranges"),
)
"""In the order they are shown; others come after them."""

IN_FLIGHT = "bytes in flight"
COMING = "coming"
"""The category of a slice for what was expected before it was sent."""
INSTANT = 1e-3
"""A nanosecond, the shortest that a slice lasts: an arrow needs something to hold."""


@dataclass(eq=False, slots=True)
class Slice:
    """Something that takes time on a lane of a rank; times in microseconds."""

    rank: int
    lane: str
    name: str
    begin: float
    end: float
    category: str
    args: Mapping[str, object]
    tid: int = -1


@dataclass(frozen=True, slots=True)
class Arrow:
    """From what sends to what receives it."""

    sent: Slice
    came: Slice
    nbytes: float

    def times(self) -> tuple[float, float]:
        """When it leaves and when it arrives, each within its slice.

        What is received while it is still being sent, piece by piece, leaves at the
        beginning of the one and has arrived at the end of the other.
        """
        leaves, arrives = self.sent.end - INSTANT, self.came.begin
        if arrives < leaves:
            leaves, arrives = self.sent.begin, self.came.end - INSTANT
        return leaves, arrives


@dataclass(eq=False)
class Sheet:
    """The slices and arrows of one file."""

    slices: list[Slice] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    def rank(self, rank: int, name: str = "") -> None:
        """A rank that is shown even if nothing happens there."""
        self.names[rank] = name or f"rank {rank}"

    def slice(
        self,
        rank: int,
        lane: str,
        name: str,
        begin: float,
        end: float,
        *,
        category: str = "unisono",
        args: Mapping[str, object] | None = None,
    ) -> Slice:
        """Add a slice; one that would end before it begins lasts an instant."""
        begin, end = _whole(begin), max(_whole(end), _whole(begin + INSTANT))
        made = Slice(rank, lane, name, begin, end, category, args or {})
        self.slices.append(made)
        return made

    def arrow(self, sent: Slice, came: Slice, nbytes: float = 0) -> None:
        """Add an arrow between two slices, or to the coming of what one waited for."""
        if came.begin < sent.begin:
            came = self.slice(
                *(came.rank, came.lane, f"from {sent.rank}", sent.begin, came.end),
                category=COMING,
                args={"bytes": nbytes, "peer": sent.rank},
            )
        self.arrows.append(Arrow(sent, came, nbytes))

    def document(self, **about: object) -> dict[str, Any]:
        """The whole file; `about` are more keys for its top."""
        for rank in sorted({s.rank for s in self.slices} - self.names.keys()):
            self.rank(rank)
        self.slices.sort(key=lambda s: (s.begin, -s.end))
        threads = self._spread()
        events = [
            *self._named(threads),
            *map(_complete, self.slices),
            *self._flows(),
            *self._counters(),
        ]
        return {
            "traceEvents": events,  # first: older readers stop at a key unknown to them
            "schemaVersion": 1,
            "deviceProperties": [],
            "displayTimeUnit": "ns",
            "baseTimeNanoseconds": 0,
            **about,
        }

    def _spread(self) -> dict[tuple[int, int], str]:
        """Give each slice a thread on which it nests; the names of the threads."""
        held = {end for arrow in self.arrows for end in (arrow.sent, arrow.came)}
        open_: dict[tuple[int, str], list[list[Slice]]] = {}
        used: dict[tuple[int, str], list[list[Slice]]] = {}
        for each in self.slices:
            stacks = open_.setdefault((each.rank, each.lane), [])
            number = _room(stacks, each, held)
            lanes = used.setdefault((each.rank, each.lane), [])
            if number == len(lanes):
                lanes.append([])
            lanes[number].append(each)
        return _numbered(used, 1 + max(self.names, default=0))

    def _named(self, threads: Mapping[tuple[int, int], str]) -> Iterator[object]:
        for rank, name in sorted(self.names.items()):
            yield _about(rank, 0, "process_name", name=name)
            yield _about(rank, 0, "process_labels", labels=f"rank {rank}")
            yield _about(rank, 0, "process_sort_index", sort_index=rank)
        for (rank, tid), name in threads.items():
            yield _about(rank, tid, "thread_name", name=name)
            yield _about(rank, tid, "thread_sort_index", sort_index=tid)

    def _flows(self) -> Iterator[object]:
        for number, arrow in enumerate(self.arrows):
            leaves, arrives = arrow.times()
            common = {"name": "transfer", "cat": "transfer", "id": number}
            ends = (("s", arrow.sent, leaves), ("f", arrow.came, arrives))
            for phase, there, at in ends:
                binds = {"bp": "e"} if phase == "f" else {}
                where = {"pid": there.rank, "tid": there.tid, "ts": _written_us(at)}
                yield {"ph": phase, **common, **where, **binds}

    def _counters(self) -> Iterator[object]:
        """For each rank that sends, how many of its bytes have not arrived yet."""
        changes: dict[int, list[tuple[float, float]]] = {}
        for arrow in self.arrows:
            if not arrow.nbytes:
                continue
            mine = changes.setdefault(arrow.sent.rank, [])
            leaves, _ = arrow.times()
            mine.append((leaves, arrow.nbytes))
            mine.append((max(leaves, arrow.came.end), -arrow.nbytes))
        for rank, times in sorted(changes.items()):
            yield from _counted(rank, sorted(times, key=lambda t: (t[0], -t[1])))


def _counted(rank: int, changes: Iterable[tuple[float, float]]) -> Iterator[object]:
    bytes_now = 0.0
    for at, change in changes:
        bytes_now = max(0.0, bytes_now + change)
        args = {"bytes": bytes_now}
        event = {"pid": rank, "ts": _written_us(at), "args": args}
        yield {"ph": "C", "name": IN_FLIGHT, **event}


def _room(stacks: list[list[Slice]], each: Slice, held: Container[Slice]) -> int:
    """The first of a lane's threads where a slice has room; what is open on them."""
    for number, within in enumerate(stacks):
        while within and within[-1].end <= each.begin:
            within.pop()
        around = within[-1] if within else None
        if around is None or (each.end <= around.end and around not in held):
            within.append(each)
            return number
    stacks.append([each])
    return len(stacks) - 1


def _numbered(
    used: Mapping[tuple[int, str], list[list[Slice]]], first: int
) -> dict[tuple[int, int], str]:
    """Number the threads from `first` on: rank by rank, in the order of its lanes."""
    threads: dict[tuple[int, int], str] = {}
    order = {lane: place for place, lane in enumerate(LANES)}

    def place(key: tuple[int, str]) -> tuple[int, str, int, str]:
        rank, lane = key
        kind, _, group = lane.partition(" of ")
        return rank, group, order.get(kind, len(order)), lane

    for rank, lane in sorted(used, key=place):
        for more, slices in enumerate(used[rank, lane]):
            tid = first + len(threads)
            threads[rank, tid] = f"{lane} {more + 1}" if more else lane
            for each in slices:
                each.tid = tid
    return threads


def _about(rank: int, tid: int, what: str, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "ts": 0, "args": args}


def _complete(each: Slice) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": each.category,
        "name": each.name,
        "pid": each.rank,
        "tid": each.tid,
        "ts": _written_us(each.begin),
        "dur": _written_us(each.end - each.begin),
        "args": each.args,
    }


def _whole(us: float) -> float:
    """Microseconds to the nanosecond, as in the whole file."""
    return round(us * 1e3) / 1e3


def _written_us(us: float) -> float:
    """The same nanosecond for readers that round and for those that cut off.

    1.001 times 1000 is a little less than 1001, and Perfetto before its version 51 took
    that for 1000; then neighbours overlap.
    """
    us_written = _whole(us)
    cut = int(us_written * 1e3) < round(us * 1e3)
    return math.nextafter(us_written, math.inf) if cut else us_written
