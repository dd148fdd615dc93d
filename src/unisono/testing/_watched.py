"""What `unisono.testing.programs` watches: cells of memory, ranks and streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, ...]
"""A cell: call, home, rank, chunk, piece; or -1, rank, half and place of a window.

-2 instead of -1 is a place for a code.
"""

Clock = list[int]
Word = tuple[int, int]
"""A generation, and the number of actions done in it."""


@dataclass(slots=True)
class Cell:
    """A place in memory: its value, who wrote it when, and who has read it since."""

    value: Any
    writer: int
    written: int
    readers: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Rank:
    """What a rank has told the others, and what it knows of them."""

    clock: Clock
    words: list[Word] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)  # as they were with each word
    arrivals: list[Clock] = field(default_factory=list)
    begun: list[Clock] = field(default_factory=list)


@dataclass(slots=True)
class Stream:
    """What one rank sends to another; it leaves by a thread of its own.

    If it has no room, a message leaves only when it is taken.
    """

    thread: int
    room: bool
    sent: list[tuple[int, Any, Clock]] = field(default_factory=list)
    taken: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """Another's arrival at a call, its progress, its beginning; or some messages."""

    rank: int = -1
    arrival: int = -1
    word: Word = (0, 0)
    begun: int = -1
    stream: Stream | None = None
    sent: int = 0
    taken: int = 0
