"""The state of `program_player`: memory cells, ranks and streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, ...]
"""A cell: call, home, rank, chunk, piece; or -1, rank, half and slot of a window.

-2 instead of -1 is a slot for a code.
"""

Clock = list[int]
Progress = tuple[int, int]
"""A generation, and the number of actions done in it."""


@dataclass(slots=True)
class MemoryCell:
    """A memory cell: its value, its writer and time, and its readers since."""

    value: Any
    writer: int
    written: int
    readers: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class RankState:
    """A rank's published progress and its vector clock."""

    clock: Clock
    progress: list[Progress] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)  # one for each progress
    arrivals: list[Clock] = field(default_factory=list)
    started: list[Clock] = field(default_factory=list)


@dataclass(slots=True)
class MessageStream:
    """What one rank sends to another, on a thread of its own.

    Without room, a send completes only when the message is received.
    """

    thread: int
    room: bool
    sent: list[tuple[int, Any, Clock]] = field(default_factory=list)
    received: int = 0


@dataclass(frozen=True, slots=True)
class Condition:
    """A rank's arrival at a call, its progress or start; or a number of messages."""

    rank: int = -1
    arrival: int = -1
    progress: Progress = (0, 0)
    started: int = -1
    stream: MessageStream | None = None
    sent: int = 0
    received: int = 0
