"""What functions need of a schedule, as protocols.

`Schedule` has methods that verify, count and transform it. The modules behind these
methods import the protocols of this module, and `schedule.py` imports those modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self, TypeVar, runtime_checkable

from unisono.schedule.collective import Collective, Contract
from unisono.schedule.step import Step


@runtime_checkable
class ReadableSchedule(Protocol):
    """What a function that only reads a schedule needs of it."""

    @property
    def collective(self) -> Collective:
        """The collective that the steps implement."""

    @property
    def contract(self) -> Contract:
        """The collective for this number of ranks and chunks, and this root."""

    @property
    def n(self) -> int:
        """The number of ranks."""

    @property
    def root(self) -> int:
        """The root, where the collective has one."""

    @property
    def num_chunks(self) -> int:
        """The number of chunks."""

    @property
    def num_temporaries(self) -> int:
        """The number of temporaries, whose numbers follow those of the chunks."""

    @property
    def num_slots(self) -> int:
        """Chunks and temporaries together."""

    @property
    def title(self) -> str:
        """The collective, the algorithm and the number of ranks, for messages."""

    def __iter__(self) -> Iterator[Step]:
        """The steps, generated anew each time."""


class TransformableSchedule(ReadableSchedule, Protocol):
    """What a function that makes a schedule from others needs of them."""

    @property
    def name(self) -> str:
        """The algorithm and its parameters."""

    def but(self, **changes: object) -> Self:
        """The same schedule with some attributes changed."""


S = TypeVar("S", bound=TransformableSchedule)
"""The type of a schedule that a transformation takes and returns."""
