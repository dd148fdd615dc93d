"""A snapshot of a running job: where each rank is, which are late, traffic by link.

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

    `behind` is by how many calls it is behind the furthest; `rate` in bytes per second.
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
        return {**plain, "late": self.late, **traffic}


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
        return [
            RankStatus(socket.rank, socket.pid, "world", 0, 0, SILENT, 0.0, 0, None)
        ]
    furthest = _furthest(states)
    rows = []
    for group in state["communicators"]:
        behind = furthest[group["name"], tuple(group["ranks"])] - group["seq"]
        row = RankStatus(
            state["rank"],
            state["pid"],
            group["name"],
            group["seq"],
            behind,
            _doing(group),
            _since(group, state["time_ns"]),
            group["sent_bytes"],
            _rate(before, state["rank"], group, now),
        )
        rows.append(row)
    return rows


def _furthest(
    states: Sequence[dict[str, Any]],
) -> dict[tuple[str, tuple[int, ...]], int]:
    furthest: dict[tuple[str, tuple[int, ...]], int] = {}
    for state in states:
        for group in state["communicators"]:
            key = group["name"], tuple(group["ranks"])
            furthest[key] = max(furthest.get(key, 0), group["seq"])
    return furthest


def _doing(group: dict[str, Any]) -> str:
    if group["trouble"] != "none":
        return f"broken: {group['trouble'].replace('_', ' ')}"
    if not group["seq"]:
        return "no call yet"
    return f"in {group['call']}" if group["inside"] else f"after {group['call']}"


def _since(group: dict[str, Any], now_ns: int) -> float:
    since = group["since_ns"] if group["inside"] else group["ended_ns"]
    return max(0.0, (now_ns - since) / 1e9) if since else 0.0


def _rate(
    before: Snapshot | None, rank: int, group: dict[str, Any], now: float
) -> float | None:
    if before is None or now <= before.time:
        return None
    for row in before.rows:
        if (row.rank, row.group) == (rank, group["name"]):
            return float(max(0, group["sent_bytes"] - row.sent) / (now - before.time))
    return None
