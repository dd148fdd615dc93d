"""A slow link simulated in front of a fast communicator, to measure overlap.

    comm = SlowLink(comm, bytes_per_s=1e9, latency_s=1e-4)

A call takes as long as its bytes would take on the link, one call after the other.
Computation overlaps with it: waiting for a call sleeps only for the remaining time.
`total_s` is how long the link was busy, `exposed_s` how much of that a caller waited
for. With a `ManualClock` nothing sleeps, and the figures are exact on any machine.
"""

from __future__ import annotations

import time
from typing import Any

from unisono.errors import BadArgument
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator


class WallClock:
    """Real time; waiting sleeps."""

    @property
    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep_until(self, due: float) -> None:
        """Sleep until then."""
        if (left := due - self.now) > 0:
            time.sleep(left)


class ManualClock(WallClock):
    """A clock that only `advance` and `sleep_until` move."""

    def __init__(self) -> None:
        """At zero."""
        self._now = 0.0

    @property
    def now(self) -> float:
        """Seconds that were advanced or slept."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock, as computing for so long would."""
        self._now += seconds

    def sleep_until(self, due: float) -> None:
        """Move the clock to then."""
        self._now = max(self._now, due)


class SlowLink:
    """A communicator whose collectives take as long as on a slow link.

    Everything else is the communicator's own. Not for send and recv.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        bytes_per_s: float,
        latency_s: float = 0.0,
        clock: WallClock | None = None,
    ) -> None:
        """In front of `comm`; every rank has its own."""
        if not bytes_per_s > 0 or latency_s < 0:
            raise BadArgument(
                f"SlowLink: bytes_per_s = {bytes_per_s}, latency_s = {latency_s}: "
                "expected a positive number, and one that is not negative"
            )
        self._comm, self._latency = comm, latency_s
        self._rate = bytes_per_s
        self._clock = clock or WallClock()
        self._free_at = 0.0
        self.total_s = 0.0
        self.exposed_s = 0.0

    @property
    def hidden_share(self) -> float:
        """The share of the link's time that overlapped with computation."""
        return 1.0 - self.exposed_s / self.total_s if self.total_s else 0.0

    def __getattr__(self, name: str) -> Any:
        """The communicator's attribute; collectives are delayed."""
        found = getattr(self._comm, name)
        shares = _TRAFFIC.get(name)
        if shares is None:
            return found
        buffers, passes = shares

        def call(*args: Any, async_op: bool = False, **options: Any) -> Any:
            n = self._comm.world_size
            sizes = [_bytes(args[0] if args else None), _bytes(options.get("out"))]
            whole = max(sizes) if buffers == "largest" else sizes[0]
            took = self._latency + passes * (n - 1) / n * whole / self._rate
            begun = max(self._clock.now, self._free_at)
            self._free_at = begun + took
            self.total_s += took
            work = _DelayedWork(
                found(*args, async_op=True, **options), self, self._free_at
            )
            return work if async_op else work.wait()

        return call


class _DelayedWork:
    """Work that is not done before its due time."""

    def __init__(self, work: Work, link: SlowLink, due: float) -> None:
        self._work, self._link, self._due = work, link, due

    def wait(self, timeout_s: float | None = None) -> Any:
        result = self._work.wait(timeout_s)
        clock = self._link._clock
        self._link.exposed_s += max(0.0, self._due - clock.now)
        clock.sleep_until(self._due)
        return result

    def done(self) -> bool:
        return self._work.done() and self._link._clock.now >= self._due


# A rank sends `passes` times (n-1)/n of this buffer.
_TRAFFIC = {
    "all_reduce": ("first", 2),
    "reduce_scatter": ("first", 1),
    "all_gather": ("largest", 1),
    "broadcast": ("first", 1),
    "reduce": ("first", 1),
    "all_to_all": ("first", 1),
}


def _bytes(x: Any) -> int:
    return 0 if x is None else int(x.nbytes)
