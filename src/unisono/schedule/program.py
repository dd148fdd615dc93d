"""Programs: what each rank does, as `lower` makes it of a schedule.

Where values are sent as codes (see `coding.py`), a place of a window holds either a
value or a code, and the two kinds are numbered separately.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass


class Home(enum.IntEnum):
    """Where a source is stored: a rank's input, its output, its window; or it is sent.

    CODE is a place of a window as well, for a code.
    """

    INPUT = 0
    OUTPUT = 1
    WINDOW = 2
    STREAM = 3
    CODE = 4


@dataclass(frozen=True, slots=True)
class Source:
    """A value to read: chunk `index` of a buffer, or place `index` of a window.

    Or message `index` of those that `rank`, on another host, sends here.
    """

    home: Home
    rank: int
    index: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on when `rank` has done `count` of its actions.

    If it is on another host: when `count` of the messages to it have left.
    """

    rank: int
    count: int


@dataclass(frozen=True, slots=True)
class Action:
    """Reduce the sources, in their order, into the window, the output, or both.

    `chunk` gives the size. `completes` marks the reduction after which the value holds
    every rank's contribution, which is where a mean is divided. `delivers` are ranks to
    whose outputs, at the same chunk, the result is written as well.

    `code` is the place for the result's code, if others get it as one: made of the
    result, or taken over from the only source if that is a code. With `back`, what is
    written elsewhere is the decoded value, which is what the others will have.
    """

    chunk: int
    sources: tuple[Source, ...]
    window: int | None
    output: int | None
    waits: tuple[Wait, ...]
    completes: bool
    delivers: tuple[int, ...] = ()
    code: int | None = None
    back: bool = False


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A value sent to another host, once `after` actions are done; `chunk` its size."""

    to: int
    chunk: int
    source: Source
    after: int


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does. It publishes that so many actions are done as in `awaited`.

    Other ranks wait for them, or messages of this one. The first `lead[r]` actions of
    rank r only publish its input and wait for no rank. `readers` are the ranks that
    read this rank's window. `exits` are waited for at the very end, so that the buffers
    may be used again. `messages` leave in their order for each rank they go to, beside
    the actions.
    """

    rank: int
    actions: tuple[Action, ...]
    awaited: frozenset[int]
    lead: tuple[int, ...]
    readers: tuple[int, ...]
    exits: tuple[Wait, ...]
    messages: tuple[StreamMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class Noise:
    """How far codes lead from the exact result, in the worst of its chunks.

    Ranks' contributions are taken as independent and of one size, so errors add up as
    variances do. `terms` are pairs: what was encoded had so many ranks' contributions,
    and its error has that share in the error of the result.
    """

    terms: tuple[tuple[int, float], ...] = ()

    @property
    def factor(self) -> float:
        """The error of the result, in errors of encoding once."""
        return math.sqrt(math.fsum(share for _, share in self.terms))

    def error(self, once: Callable[[int], float]) -> float:
        """The same where the error of encoding once depends on what is encoded."""
        return math.sqrt(math.fsum(share * once(k) ** 2 for k, share in self.terms))


@dataclass(frozen=True, eq=False)
class Lowered:
    """All programs of a schedule, made together because they wait for each other.

    `places` is how many a window must have; `depth` counts the steps. `canonical` is
    whether every sum is made in one pass over all ranks' inputs, in rank order, so that
    its bits depend on nothing but the inputs.

    Where values are sent as codes, `codes` is how many places a window must have for
    them beside the `places` for values, and `noise` is what that does to the result.
    `replicated` is whether several ranks encode the same sum, each for itself.
    """

    programs: tuple[Program, ...]
    places: int
    depth: int
    canonical: bool
    codes: int = 0
    noise: Noise | None = None
    replicated: bool = False
