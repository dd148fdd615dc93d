"""A trace in a few numbers: where the time went, who was late, and what differs.

Everything is counted from the slices of the file, so a trace that was measured long
ago, or on another machine, can be summed up as well.

    time       of a call, from the arrival of its last rank to the end of its last
    late       of a rank: how long all others waited for it alone
    exposed    while the caller could do nothing else: blocking calls, and waits for
               others; on a device, while its stream could; the rest of the time of
               calls is overlapped
    floor      the time for which the busiest rank of a call copied and added; with
               no waiting, it would have taken that long; not known on a device
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

from unisono.schedule.collective import COLLECTIVES
from unisono.simulate.result import bus_factor
from unisono.trace.document import Document
from unisono.trace.draw import COLLECTIVE
from unisono.units import format_bandwidth, format_bytes, format_seconds, format_table

Interval = tuple[float, float]


@dataclass(frozen=True)
class CallStats:
    """All calls of one kind; times in seconds."""

    group: str
    collective: str
    algorithm: str
    nbytes: int
    calls: int
    time: float
    total: float
    floor: float
    busbw: float
    on_device: bool = False

    @property
    def kind(self) -> tuple[str, str, int, bool]:
        """What makes rows of two traces comparable."""
        return self.group, self.collective, self.nbytes, self.on_device

    @property
    def share(self) -> float:
        """The share of its time that a call would take without waiting."""
        return self.floor / self.time if self.time else 0.0


@dataclass(frozen=True)
class Straggler:
    """How often a rank came last, and how long the others waited, in seconds."""

    rank: int
    last: int
    cost: float
    worst: float
    at: str


@dataclass(frozen=True)
class TraceSummary:
    """A trace in numbers; times in seconds."""

    ranks: int
    span: float
    calls: int
    busy: float
    exposed: float
    rows: tuple[CallStats, ...]
    late: tuple[Straggler, ...]
    lost: int = 0

    @property
    def overlap(self) -> float:
        """Which part of the time of calls was hidden behind other work."""
        return 1 - self.exposed / self.busy if self.busy else 0.0

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "overlap": self.overlap}

    def __str__(self) -> str:
        """A few lines and two tables."""
        lines = [
            f"{self.ranks} ranks, {format_seconds(self.span)}, {self.calls} calls",
            f"  in calls   {format_seconds(self.busy)} a rank",
            f"  exposed    {format_seconds(self.exposed)} of that; "
            f"{self.overlap:.0%} overlapped with other work",
        ]
        if self.lost:
            lines.append(
                f"  lost       {self.lost} events were overwritten; figures of "
                "steps are of the rest (UNISONO_TRACE_EVENTS raises the limit)"
            )
        lines += ["", *format_table(_HEADS, [_cells(row) for row in self.rows])]
        if self.late:
            lines += ["", *format_table(_LATE, [_late_cells(who) for who in self.late])]
        return "\n".join(lines)


_HEADS = ["collective", "size", "calls", "time", "total", "busbw", "floor", "share"]
_LATE = ["late", "last in", "cost the others", "worst", "where"]


def _where(row: CallStats | CallChange) -> str:
    group = "" if row.group == "world" else f" on {row.group}"
    return f"{group} on cuda" if row.on_device else group


def _cells(row: CallStats) -> list[str]:
    floor = row.busbw / row.share if row.share else 0.0
    return [
        f"{row.collective}{_where(row)} by {row.algorithm}",
        format_bytes(row.nbytes),
        str(row.calls),
        format_seconds(row.time),
        format_seconds(row.total),
        format_bandwidth(row.busbw),
        "-" if row.on_device else format_bandwidth(floor),
        "-" if row.on_device else f"{row.share:.0%}",
    ]


def _late_cells(who: Straggler) -> list[str]:
    times = (format_seconds(who.cost), format_seconds(who.worst))
    return [f"rank {who.rank}", f"{who.last} calls", *times, who.at]


@dataclass(eq=False)
class _CollectiveCall:
    """One call of a communicator, as all its ranks saw it; times in microseconds."""

    about: Mapping[str, Any]
    ends: dict[int, Interval] = field(default_factory=dict)
    came: dict[int, float] = field(default_factory=dict)
    worked: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    lines: dict[int, str] = field(default_factory=dict)

    @property
    def time(self) -> float:
        begun = max(self.came.values(), default=0.0)
        begun = begun or max(b for b, _ in self.ends.values())
        return max(0.0, max(e for _, e in self.ends.values()) - begun) / 1e6

    @property
    def floor(self) -> float:
        return max(self.worked.values(), default=0.0) / 1e6

    def last(self) -> tuple[int, float] | None:
        """The rank that came last, and how long after all others."""
        came = sorted((at, rank) for rank, at in self.came.items())
        if len(came) < 2 or len(came) < len(self.ends):
            return None
        return came[-1][1], (came[-1][0] - came[-2][0]) / 1e6


def summarise(doc: Document) -> TraceSummary:
    """The numbers of a trace."""
    slices = [e for e in doc["traceEvents"] if e["ph"] == "X"]
    lanes = {
        (e["pid"], e["tid"]): str(e["args"]["name"])
        for e in doc["traceEvents"]
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    calls = _calls(slices, lanes)
    ranks = {e["pid"] for e in slices}
    busy, exposed = _exposed(slices)
    ends = [(e["ts"], e["ts"] + e["dur"]) for e in slices]
    span = max((e for _, e in ends), default=0) - min((b for b, _ in ends), default=0)
    other = doc.get("otherData", {})
    lost = sum(
        count
        for kind in ("lost_moments", "lost_calls")
        for count in other.get(kind, {}).values()
    )
    return TraceSummary(
        ranks=len(ranks),
        span=span / 1e6,
        calls=len(calls),
        busy=mean(busy[r] for r in ranks) / 1e6 if ranks else 0.0,
        exposed=mean(exposed[r] for r in ranks) / 1e6 if ranks else 0.0,
        rows=tuple(_rows(calls.values())),
        late=tuple(_late(calls.values())),
        lost=lost,
    )


def _group(lane: str) -> str:
    return lane.partition(" of ")[2].rstrip("0123456789 ") or "world"


def _calls(
    slices: Sequence[dict[str, Any]], lanes: Mapping[tuple[int, int], str]
) -> dict[tuple[str, int, bool], _CollectiveCall]:
    """The calls, by communicator and number, with what was done inside them.

    Those on a device are counted apart.
    """
    calls: dict[tuple[str, int, bool], _CollectiveCall] = {}
    for each in slices:
        if each["cat"] == COLLECTIVE:
            args, rank = each["args"], each["pid"]
            group = args["Process Group Description"]
            key = group, args["Seq"], "device" in args
            call = calls.setdefault(key, _CollectiveCall(args))
            call.ends[rank] = each["ts"], each["ts"] + each["dur"]
            call.lines[rank] = args["line"]
    for each in slices:
        rank, args = each["pid"], each.get("args", {})
        group = _group(lanes.get((rank, each["tid"]), ""))
        key = group, args.get("seq", 0), "device" in args
        if key not in calls:
            continue
        if each["cat"] in ("arrival", "arrival on cuda"):
            calls[key].came[rank] = each["ts"]
        elif args.get("kind") in ("copy", "reduce"):
            calls[key].worked[rank] += each["dur"]
    return calls


def _rows(calls: Iterable[_CollectiveCall]) -> list[CallStats]:
    kinds: dict[tuple[str, str, str, int, bool], list[_CollectiveCall]]
    kinds = defaultdict(list)
    for call in calls:
        about = call.about
        group = about["Process Group Description"]
        key = group, about["collective"], about["algorithm"], about["bytes"]
        kinds[*key, "device" in about].append(call)
    rows = []
    for (group, name, algorithm, nbytes, on_device), alike in kinds.items():
        time = median(call.time for call in alike)
        factor = bus_factor(COLLECTIVES[name], alike[0].about["Group size"])
        rows.append(
            CallStats(
                *(group, name, algorithm, nbytes, len(alike), time),
                total=sum(call.time for call in alike),
                floor=median(call.floor for call in alike),
                busbw=nbytes * factor / time if time else 0.0,
                on_device=on_device,
            )
        )
    return sorted(rows, key=lambda row: -row.total)


def _late(calls: Iterable[_CollectiveCall]) -> list[Straggler]:
    """Those who came last, the costliest first."""
    cost: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for call in calls:
        last = call.last()
        if last is not None:
            rank, seconds = last
            cost[rank].append((seconds, call.lines.get(rank, "")))
    late = [
        Straggler(rank, len(times), sum(t for t, _ in times), *max(times))
        for rank, times in cost.items()
    ]
    return sorted(late, key=lambda who: -who.cost)


def _exposed(
    slices: Sequence[dict[str, Any]],
) -> tuple[dict[int, float], dict[int, float]]:
    """For each rank, the time in calls, and the part in which its caller waited."""
    busy: dict[int, list[Interval]] = defaultdict(list)
    held: dict[int, list[Interval]] = defaultdict(list)
    for each in slices:
        span, args = (each["ts"], each["ts"] + each["dur"]), each.get("args", {})
        if each["cat"] in (COLLECTIVE, "message"):
            busy[each["pid"]].append(span)
            if not args.get("async"):
                held[each["pid"]].append(span)
        elif args.get("kind") == "block":
            held[each["pid"]].append(span)
    ranks = {e["pid"] for e in slices}
    return (
        {rank: _union(busy[rank]) for rank in ranks},
        {rank: _union(_within(held[rank], busy[rank])) for rank in ranks},
    )


def _within(spans: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The parts of the spans that lie in one of the others, both by time."""
    found, others, at = [], sorted(others), 0
    for begin, end in sorted(spans):
        while at < len(others) and others[at][1] <= begin:
            at += 1
        for other in others[at:]:
            if other[0] >= end:
                break
            found.append((max(begin, other[0]), min(end, other[1])))
    return found


def _union(spans: Sequence[Interval]) -> float:
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


@dataclass(frozen=True)
class CallChange:
    """Calls of one kind in two traces; None where one has none."""

    group: str
    collective: str
    nbytes: int
    on_device: bool
    before: CallStats | None
    after: CallStats | None

    @property
    def ratio(self) -> float | None:
        """How many times as long it takes in the second."""
        if self.before is None or self.after is None or not self.before.time:
            return None
        return self.after.time / self.before.time


def differences(one: TraceSummary, other: TraceSummary) -> list[CallChange]:
    """What each kind of call takes in the one trace and in the other."""
    before = {row.kind: row for row in one.rows}
    after = {row.kind: row for row in other.rows}
    changes = [
        CallChange(*kind, before.get(kind), after.get(kind)) for kind in before | after
    ]

    def weight(change: CallChange) -> float:
        sides = [row.total for row in (change.before, change.after) if row]
        return -max(sides)

    return sorted(changes, key=weight)


def differences_text(changes: Sequence[CallChange]) -> str:
    """The same as a table."""
    heads = ["collective", "size", "calls", "before", "after", "times"]
    rows = []
    for change in changes:
        sides = (change.before, change.after)
        times = [format_seconds(s.time) if s else "-" for s in sides]
        calls = " → ".join(str(s.calls) if s else "0" for s in sides)
        by = " → ".join(dict.fromkeys(s.algorithm for s in sides if s))
        rows.append(
            [
                f"{change.collective}{_where(change)} by {by}",
                format_bytes(change.nbytes),
                calls,
                *times,
                f"{change.ratio:.2f}" if change.ratio is not None else "",
            ]
        )
    return "\n".join(format_table(heads, rows))
