"""What a device half needs of its communicator, and what its ranks tell each other.

The ranks connect their devices by calls of the communicator on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from unisono import _native
from unisono.algorithms import Spec
from unisono.errors import DeviceError, UnisonoError
from unisono.runtime.call.arguments import Call, Position
from unisono.runtime.call.arguments import all_gather as all_gather_call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction, as_reduction
from unisono.runtime.call.work import CallsInFlight
from unisono.runtime.plan.plans import CallKind
from unisono.transports.session import Session

_TEXT = 240  # bytes of an error that all ranks raise
T = TypeVar("T")


class HostHalf(Protocol):
    """The part of a communicator's core that its device half uses."""

    native: _native.Comm
    session: Session
    world_ranks: tuple[int, ...]
    position: Position
    rank: int
    world_size: int
    hosts_if_several: tuple[int, ...]
    exceeded_s: float
    in_flight: CallsInFlight

    @property
    def timeout_s(self) -> float:
        """The timeout of calls without one of their own."""

    def run(self, call: Call, reduction: Reduction, how: CallOptions) -> Any:
        """Run a call on arrays of the host."""

    def spec(self, algorithm: str) -> Spec:
        """An algorithm, with its files as they were when it was first used here."""

    def check_usable(self, what: str, words: Callable[[], str] = ...) -> None:
        """Raise the error of the communicator if it has failed."""

    def failure(
        self, timeout_s: float | None = None, refused: str = ""
    ) -> UnisonoError:
        """Why the latest call failed, or why one is refused."""

    def close(self) -> None:
        """Close it."""

    def kind(self, call: Call, reduction: Reduction, how: CallOptions) -> CallKind:
        """What the ranks must agree on in a call on arrays of the host."""

    def connect(self, ranks: Sequence[int], what: str) -> None:
        """Open the streams to these ranks, if they are on other hosts."""

    def error_of(self, work: _native.Work, timeout_s: float | None) -> UnisonoError:
        """Why a call in flight failed."""

    def refuse_other_orders(self, kind: CallKind) -> None:
        """Raise BadArgument if an algorithm does not reduce in the order of ranks."""


def gather_bytes(host: HostHalf, mine: bytes) -> list[bytes]:
    """The same number of bytes of each rank, by the communicator's host half."""
    x = np.frombuffer(mine, np.uint8)
    call = all_gather_call(host.position, x, None, None)
    how = CallOptions(label="device communicator")
    gathered = host.run(call, as_reduction("sum"), how)
    return [r.tobytes() for r in gathered.reshape(host.world_size, -1)]


def gather_texts(host: HostHalf, mine: str) -> list[str]:
    """What each rank says."""
    rows = gather_bytes(host, mine.encode()[:_TEXT].ljust(_TEXT, b"\0"))
    return [row.rstrip(b"\0").decode(errors="replace") for row in rows]


def together(host: HostHalf, step: Callable[[], T]) -> T:
    """A step of all ranks; if it fails on one, all raise the same DeviceError."""
    made: list[T] = []
    why = ""
    try:
        made.append(step())
    except (DeviceError, RuntimeError, OSError, MemoryError) as error:
        why = str(error) or type(error).__name__
    for rank, words in enumerate(gather_texts(host, why)):
        if words:
            raise DeviceError(
                f"the ranks' devices could not be connected; rank {rank}: {words}"
            )
    return made[0]
