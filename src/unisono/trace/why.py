"""What went wrong with a job, from the flight records of its ranks.

What is looked at, in this order: ranks that called different things; ranks that others
wait for, or waited for in vain; and if nothing failed, a rank that always came late. A
rank that skipped a call shows as one of the first two. It is distinguished by the
lines of its calls: they are those of the others, with one left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from statistics import median

from unisono.trace.flights import FlightRecord, GroupInfo, RecordedCall, groups

LATE_NS = 1_000_000
"""Below this no rank is called late."""


@dataclass(frozen=True)
class RankEvidence:
    """One rank's side of it: what it called or where it stands, and the line."""

    rank: int
    what: str
    line: str
    file: str = ""
    number: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong, and who is the cause. `kind` is one word for tools."""

    kind: str
    summary: str
    ranks: tuple[int, ...] = ()
    group: str = ""
    members: tuple[int, ...] = ()
    collective: str = ""
    seq: int = 0
    sides: tuple[RankEvidence, ...] = field(default=())

    def __str__(self) -> str:
        """Summary, group, collective, ranks; then both sides with their lines."""
        lines = [self.summary]
        if self.group:
            members = ", ".join(map(str, self.members))
            lines.append(f"  group       {self.group!r}, ranks {members}")
        if self.collective:
            lines.append(f"  collective  {self.collective}, call {self.seq}")
        if self.ranks:
            lines.append(f"  ranks       {', '.join(map(str, self.ranks))}")
        lines += [f"  rank {s.rank:<6} {s.what}, {s.line}" for s in self.sides]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _GroupRecords:
    """A communicator and what its ranks recorded there, on the host or on devices."""

    group: GroupInfo
    on_device: bool
    flights: Mapping[int, FlightRecord]
    calls: Mapping[int, Mapping[int, RecordedCall]]  # by rank in the world, and seq

    def diagnosis(
        self,
        kind: str,
        text: str,
        ranks: Sequence[int],
        call: RecordedCall,
        sides: list[RankEvidence],
    ) -> Diagnosis:
        """A diagnosis for this communicator and call."""
        return Diagnosis(
            kind,
            text,
            tuple(ranks),
            self.group.name,
            self.group.ranks,
            call.what,
            call.collective_seq_id,
            tuple(sides),
        )


def why(flights: Mapping[int, FlightRecord]) -> Diagnosis:
    """The diagnosis of a job."""
    per_group = list(_group_records(flights))
    for look in (_differs, _missing):
        for records in per_group:
            diagnosis = look(records)
            if diagnosis is not None:
                return diagnosis
    if (reported := _reported(flights)) is not None:
        return reported
    late = [slow for records in per_group if (slow := _late(records)) is not None]
    if late:
        return max(late, key=lambda pair: pair[0])[1]
    lacking = sorted(set(range(_world(flights))) - flights.keys())
    if lacking:
        return _silent(lacking)
    return Diagnosis("nothing", "nothing is wrong in these records: no call failed")


def _world(flights: Mapping[int, FlightRecord]) -> int:
    return max(flight.world_size for flight in flights.values())


def _reported(flights: Mapping[int, FlightRecord]) -> Diagnosis | None:
    """A call on a device that failed and has no record: a graph has made it."""
    for rank, flight in sorted(flights.items()):
        error = flight.error
        if error.on_device:
            text = f"rank {rank}: {flight.reason}"
            ranks = tuple(error.ranks)
            where = error.communicator, tuple(range(flight.world_size))
            return Diagnosis("failed", text, ranks, *where, error.call, error.seq)
    return None


def _silent(ranks: Sequence[int]) -> Diagnosis:
    text = f"{_who(ranks)} left no record: killed, or never started"
    return Diagnosis("silent", text, tuple(ranks))


def _group_records(flights: Mapping[int, FlightRecord]) -> Iterator[_GroupRecords]:
    """Where something failed first, then by the number of ranks."""
    broken = {(f.error.communicator, f.error.on_device) for f in flights.values()}
    named = [
        (number, group, on_device)
        for number, group in groups(flights.values()).items()
        for on_device in (False, True)
    ]
    for number, group, on_device in sorted(
        named, key=lambda g: ((g[1].name, g[2]) not in broken, -len(g[1].ranks), g[2])
    ):
        calls = {
            rank: flights[rank].calls.get((number, on_device), {})
            for rank in group.ranks
            if rank in flights
        }
        if not on_device or any(calls.values()):
            yield _GroupRecords(group, on_device, flights, calls)


def _who(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _side(rank: int, entry: RecordedCall) -> RankEvidence:
    line = entry.line
    place = (line.filename, line.line) if line else ("", 0)
    return RankEvidence(rank, entry.what, entry.at, *place)


def _differs(records: _GroupRecords) -> Diagnosis | None:
    """The first call in which ranks called different things."""
    every = sorted({seq for calls in records.calls.values() for seq in calls})
    for seq in every:
        entries = {r: c[seq] for r, c in records.calls.items() if seq in c}
        alike: dict[str, list[int]] = {}
        for rank, entry in entries.items():
            alike.setdefault(entry.what, []).append(rank)
        ways = _ways(entries)
        if len(alike) < 2 and len(set(ways.values())) < 2:
            continue
        if len(alike) < 2:  # the same call, but by other ways
            alike = {}
            for rank, entry in entries.items():
                alike.setdefault(f"{entry.what} by {ways[rank]}", []).append(rank)
        return _disagreement(records, seq, entries, alike)
    return None


def _disagreement(
    records: _GroupRecords,
    seq: int,
    entries: Mapping[int, RecordedCall],
    alike: dict[str, list[int]],
) -> Diagnosis:
    """Who is the odd one, and both sides.

    Who came to the call when it had failed already was refused and has no record of it,
    but says what it would have called: that counts, too. Who was still in the call
    before says nothing. Where as many say the one as the other, lines may tell.
    """
    refused = {
        rank: flight.error.call
        for rank, flight in records.flights.items()
        if rank in records.calls
        and rank not in entries
        and flight.error.on_device == records.on_device
    }
    votes = Counter(refused.values())

    def weight(description: str) -> tuple[int, int]:
        return len(alike[description]) + votes[description], -min(alike[description])

    def against(description: str) -> list[int]:
        return sorted(set(entries) - set(alike[description]))

    usual = max(alike, key=weight)
    as_many = [
        description
        for description in alike
        if weight(description)[0] == weight(usual)[0]
    ]
    for description in sorted(as_many, key=weight, reverse=True):
        skipped = _skipped(records, against(description)[0], alike[description][0], seq)
        if skipped is not None:
            return skipped
    most, odd = alike[usual], against(usual)
    one, other = entries[odd[0]], entries[most[0]]
    hows, ways = ("", ""), _ways(entries)
    if one.what == other.what:
        hows = ways[odd[0]], ways[most[0]]
    by = [f" by {how}" if how else "" for how in hows]
    most = sorted([*most, *(rank for rank in refused if refused[rank] == usual)])
    text = (
        f"{_who(odd)} called {one.what}{by[0]} at {one.at}, "
        f"where {_who(most)} called {other.what}{by[1]} at {other.at}"
    )
    sides = [_side(rank, entry) for rank, entry in sorted(entries.items())]
    sides += [
        RankEvidence(rank, f"{call}, refused", records.flights[rank].failed_at)
        for rank, call in sorted(refused.items())
        if call
    ]
    return records.diagnosis("mismatch", text, odd, other, sides)


def _ways(entries: Mapping[int, RecordedCall]) -> dict[int, str]:
    """The algorithms of one call, by rank; with their steps if the names hide them."""
    contents: dict[str, set[str]] = {}
    for entry in entries.values():
        contents.setdefault(entry.algorithm, set()).add(entry.content)
    return {
        rank: f"{entry.algorithm} (steps {entry.content})"
        if len(contents[entry.algorithm]) > 1
        else entry.algorithm
        for rank, entry in entries.items()
    }


def _key(entry: RecordedCall, *, lines: bool) -> tuple[object, ...]:
    line = entry.line
    where = (line.filename, line.line) if line and lines else ()
    return (entry.what, *where)


def _skipped(
    records: _GroupRecords, rank: int, other: int, seq: int
) -> Diagnosis | None:
    """Whether a rank skipped one call of another, all other calls being the same."""
    left_out = _left_out(records, rank, other, seq)
    if left_out is None:
        return None
    missed, went_on = left_out
    text = (
        f"rank {rank} skipped {missed.what} at {missed.at}, call "
        f"{missed.collective_seq_id} of the others"
    )
    if went_on is not None:
        text += f", and went on to {went_on.what} at {went_on.at}"
    number = missed.collective_seq_id
    sides = [
        _side(r, calls[number])
        for r, calls in sorted(records.calls.items())
        if number in calls
    ]
    return records.diagnosis("skipped", text, [rank], missed, sides)


def _left_out(
    records: _GroupRecords, rank: int, other: int, until: int
) -> tuple[RecordedCall, RecordedCall | None] | None:
    """The call that a rank left out, and what it called in its place."""
    theirs, mine = records.calls[other], records.calls[rank]
    first = max(min(theirs, default=0), min(mine, default=0))
    a = [theirs[s] for s in sorted(theirs) if s >= first]
    b = [mine[s] for s in sorted(mine) if s >= first]
    keys_a, keys_b = ([_key(e, lines=True) for e in side] for side in (a, b))
    steps = SequenceMatcher(None, keys_a, keys_b, autojunk=False).get_opcodes()
    odd = [step for step in steps if step[0] != "equal"]
    if not odd:
        return None
    kind, a1, _, b1, _ = odd[0]
    if kind == "delete" and b1 < len(b):
        return a[a1], b[b1]
    if kind == "delete" or a1 == len(a) or a[a1].collective_seq_id > until:
        return None
    further = _is_further(a[a1], b[b1])
    if further or _follows(keys_a[:a1], keys_a[a1], keys_b[b1]):
        return a[a1], b[b1]
    return None


def _follows(before: Sequence[object], missed: object, went_on: object) -> bool:
    """Whether the one call has been followed by the other until now."""
    return (missed, went_on) in pairwise(before)


def _is_further(missed: RecordedCall, went_on: RecordedCall) -> bool:
    """Whether a call stands further down in the same function than another."""
    one, other = missed.line, went_on.line
    if one is None or other is None:
        return False
    same = (one.filename, one.name) == (other.filename, other.name)
    return same and other.line > one.line


def _missing(records: _GroupRecords) -> Diagnosis | None:
    """A call that some have made and do not end, and others have not made."""
    open_ = {
        rank: entry
        for rank, calls in records.calls.items()
        for entry in list(calls.values())[-1:]
        if entry.state != "completed"
    }
    if not open_:
        return None
    seq = min(entry.collective_seq_id for entry in open_.values())
    waiting = [r for r, e in open_.items() if e.collective_seq_id == seq]
    absent = [
        rank
        for rank in records.group.ranks
        if rank not in records.calls or max(records.calls[rank], default=0) < seq
    ]
    if not absent:
        return None
    for rank in absent:
        if rank in records.calls:
            skipped = _skipped(records, rank, waiting[0], seq)
            if skipped is not None:
                return skipped
    entry = open_[waiting[0]]
    sides = [_absentee(records, rank) for rank in absent]
    stands = "; ".join(f"rank {s.rank}: {s.what}, {s.line}" for s in sides)
    text = (
        f"{_who(absent)} did not call {entry.what} at {entry.at}, where "
        f"{_who(waiting)} waited; {stands}"
    )
    sides += [_side(rank, open_[rank]) for rank in waiting]
    return records.diagnosis("missing", text, absent, entry, sides)


def _absentee(records: _GroupRecords, rank: int) -> RankEvidence:
    """Where a rank that others wait for stood."""
    flight = records.flights.get(rank)
    if flight is None:
        return RankEvidence(
            rank, "it left no record", "so it was killed, or cannot be reached"
        )
    calls = records.calls[rank]
    last = calls[max(calls)] if calls else None
    before = f", after call {last.collective_seq_id}" if last else ", before any call"
    if flight.reason == "it left":
        where = last.at if last else "no line"
        return RankEvidence(
            rank, f"it had left{before}", f"made at {where}", *_at(last)
        )
    stands = flight.stands
    if stands is None:
        return RankEvidence(
            rank, f"in no Python code{before}", "as far as its record shows"
        )
    text = f"it was at {stands}"
    return RankEvidence(rank, text, before[2:], stands.filename, stands.line)


def _at(entry: RecordedCall | None) -> tuple[str, int]:
    line = entry.line if entry else None
    return (line.filename, line.line) if line else ("", 0)


def _late(records: _GroupRecords) -> tuple[tuple[int, int], Diagnosis] | None:
    """The rank that has cost the others most by coming late to one line.

    Once is chance: who is late again and again goes before who was late for long.
    """
    behind: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for seq, rank, ns in _last_ones(records):
        if ns >= LATE_NS:
            key = rank, records.calls[rank][seq].at
            behind.setdefault(key, []).append((ns, seq))
    if not behind:
        return None

    def weight(times: Sequence[tuple[int, int]]) -> tuple[int, int]:
        longest = max(times)[0]
        return sum(ns for ns, _ in times) - longest, longest

    (rank, at), times = max(behind.items(), key=lambda item: weight(item[1]))
    seq = max(times)[1]
    calls = records.calls[rank]
    text = (
        f"no call failed, but rank {rank} came late to {calls[seq].what} at {at}: last "
        f"in {len(times)} of {sum(e.at == at for e in calls.values())} calls there, "
        f"typically {median(ns for ns, _ in times) / 1e6:.0f} ms after everybody else"
    )
    if seq - 1 in calls:
        text += f"; it was slow after {calls[seq - 1].what} at {calls[seq - 1].at}"
    sides = [_side(r, made[seq]) for r, made in sorted(records.calls.items())]
    return weight(times), records.diagnosis("late", text, [rank], calls[seq], sides)


def _last_ones(records: _GroupRecords) -> Iterator[tuple[int, int, int]]:
    """Of each call that all have made: who came last, and how long after the rest."""
    if len(records.calls) < 2:
        return
    for seq in sorted(set.intersection(*map(set, records.calls.values()))):
        times = {rank: calls[seq].came_ns for rank, calls in records.calls.items()}
        came = sorted(
            (at + records.flights[rank].clock_ns, rank)
            for rank, at in times.items()
            if at is not None
        )
        if len(came) == len(times):
            (before, _), (last, rank) = came[-2:]
            yield seq, rank, last - before
