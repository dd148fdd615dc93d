"""A snapshot of a running job: where each rank is, who waits for whom, what has failed,
traffic by link.

    before = look(sockets); ...; print(look(sockets, before))

The ranks answer queries (`ask`); rates are differences between two snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.trace import ask
from unisono.trace.links import TrafficTable, links_of

SILENT = "does not answer"


@dataclass(frozen=True)
class RankStatus:
    """A rank in one of its communicators; `seconds` since its last call began or ended.

    `behind` is by how many calls it is behind the furthest; `rate` is in bytes and
    `calls_rate` in calls per second. `waits_for` are ranks of this host that have not
    come to the call it is in; those of other hosts are not asked.
    """

    rank: int
    pid: int
    group: str
    seq: int
    behind: int
    doing: str
    seconds: float
    sent: int
    rate: float | None
    host: str = ""
    calls_rate: float | None = None
    waits_for: tuple[int, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class Snapshot:
    """All ranks that can be asked here, at one time."""

    time: float
    job: str
    world_size: int
    rows: tuple[RankStatus, ...]
    traffic: TrafficTable

    @property
    def late(self) -> list[int]:
        """The ranks that others wait for: they are behind, and some are in a call."""
        waiting = {row.group for row in self.rows if row.doing.startswith("in ")}
        return sorted(
            {row.rank for row in self.rows if row.behind and row.group in waiting}
        )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        plain = asdict(self)
        traffic = plain.pop("traffic")
        traffic.pop("counters")  # only the next look needs them
        failures = [
            {"rank": row.rank, "group": row.group, "failure": row.failure}
            for row in self.rows
            if row.failure
        ]
        return {**plain, "late": self.late, "failures": failures, **traffic}


def look(
    sockets: Sequence[ask.MonitorSocket], before: Snapshot | None = None
) -> Snapshot:
    """Ask all ranks."""
    now = time.monotonic()
    states = {socket: ask.ask(socket, "state") for socket in sockets}
    answered = [state for state in states.values() if state is not None]
    rows = [
        row
        for socket, state in states.items()
        for row in _rows(socket, state, answered, now, before)
    ]
    first: dict[str, Any] = answered[0] if answered else {"job": "", "world_size": 0}
    return Snapshot(
        now,
        first["job"],
        first["world_size"],
        tuple(sorted(rows, key=_key)),
        _traffic(states, before),
    )


def _traffic(
    states: dict[ask.MonitorSocket, dict[str, Any] | None], before: Snapshot | None
) -> TrafficTable:
    """Ask the ranks that answer for their traffic."""
    answers = {
        socket.rank: None if state is None else ask.ask(socket, "links")
        for socket, state in states.items()
    }
    return links_of(answers, None if before is None else before.traffic)


def _key(row: RankStatus) -> tuple[str, int]:
    return "" if row.group == "world" else row.group, row.rank


def _rows(
    socket: ask.MonitorSocket,
    state: dict[str, Any] | None,
    states: Sequence[dict[str, Any]],
    now: float,
    before: Snapshot | None,
) -> list[RankStatus]:
    if state is None:
        where = socket.rank, socket.pid, "world"
        return [RankStatus(*where, 0, 0, SILENT, 0.0, 0, None, failure=SILENT)]
    calls = _calls(states)
    rows = []
    for group in state["communicators"]:
        reached = calls[_name_and_ranks(group)]
        rate, calls_rate = _rates(before, state["rank"], group, now)
        row = RankStatus(
            state["rank"],
            state["pid"],
            group["name"],
            group["seq"],
            max(reached.values()) - group["seq"],
            _doing(group),
            _since(group, state["time_ns"]),
            group["sent_bytes"],
            rate,
            state["host"],
            calls_rate,
            tuple(
                rank
                for rank, seq in sorted(reached.items())
                if group["inside"] and seq < group["seq"]
            ),
            _failure(group),
        )
        rows.append(row)
    return rows


def _name_and_ranks(group: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """What a communicator is recognised by, on all its ranks."""
    return group["name"], tuple(group["ranks"])


def _calls(
    states: Sequence[dict[str, Any]],
) -> dict[tuple[str, tuple[int, ...]], dict[int, int]]:
    """The last call of every rank that answers, by communicator."""
    calls: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for state in states:
        for group in state["communicators"]:
            calls.setdefault(_name_and_ranks(group), {})[state["rank"]] = group["seq"]
    return calls


def _failure(group: dict[str, Any]) -> str:
    if group["trouble"] == "none":
        return ""
    return f"broken: {group['trouble'].replace('_', ' ')}"


def _doing(group: dict[str, Any]) -> str:
    if group["trouble"] != "none":
        return _failure(group)
    if not group["seq"]:
        return "no call yet"
    return f"in {group['call']}" if group["inside"] else f"after {group['call']}"


def _since(group: dict[str, Any], now_ns: int) -> float:
    since = group["since_ns"] if group["inside"] else group["ended_ns"]
    return max(0.0, (now_ns - since) / 1e9) if since else 0.0


def _rates(
    before: Snapshot | None, rank: int, group: dict[str, Any], now: float
) -> tuple[float | None, float | None]:
    """Bytes and calls per second since the last snapshot; None without one."""
    if before is None or now <= before.time:
        return None, None
    for row in before.rows:
        if (row.rank, row.group) == (rank, group["name"]):
            amounts = group["sent_bytes"] - row.sent, group["seq"] - row.seq
            rate, calls = (max(0, a) / (now - before.time) for a in amounts)
            return float(rate), float(calls)
    return None, None
