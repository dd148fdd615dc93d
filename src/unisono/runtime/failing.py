"""How an error of one rank becomes an error of all, where the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    TransportError,
    UnisonoError,
)
from unisono.runtime.collectives import Collectives

BROKEN = CollectiveMismatch, CollectiveTimeout, TransportError
"""After these errors a communicator has failed on all ranks."""


@contextmanager
def fail_together(
    comm: Collectives, reason: str, timeout_s: float | None = None
) -> Iterator[None]:
    """A check within a step: if it fails on this rank, all other ranks raise as well.

    This rank makes a call that matches no other rank's. `reason` is what they see of
    it, in 28 characters at most. If all ranks fail at the same place, their calls
    match, and each rank raises its own error.
    """
    try:
        yield
    except BROKEN:
        raise
    except UnisonoError:
        with suppress(UnisonoError):  # the others raise that; this rank, its own
            comm.barrier(label=reason, timeout_s=timeout_s)
        raise
