"""Ranks as threads of this process, on the engine that processes use.

    results = world(4).run(lambda comm: comm.all_reduce(np.ones(3)))

A rank whose function raises is lost to the others, as a process that dies would be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from unisono.errors import BadArgument, CollectiveTimeout, PeerLost, whole_number
from unisono.runtime.communicator import Communicator
from unisono.runtime.world.first import first_communicator
from unisono.transports.session import WINDOW
from unisono.transports.threads import sessions
from unisono.transports.tls import wanted

_LOOK_S = 0.2
"""A signal that arrives just before Python begins to wait does not end the wait."""
_GRACE_S = 20.0
"""How long ranks have to end after an interrupt; a loop of the user's may never end."""


class World:
    """n communicators of one world, one for each thread."""

    def __init__(
        self,
        n: int,
        *,
        timeout_s: float = 60.0,
        window: int = WINDOW,
        hosts: Sequence[int] = (),
        tls: str | None = None,
    ) -> None:
        """Create and connect the ranks."""
        n = whole_number("n", n)
        if n < 1:
            raise BadArgument(f"n = {n}: a world has at least one rank")
        if hosts and len(hosts) != n:
            raise BadArgument(
                f"hosts = {list(hosts)}: expected one for each of {n} ranks"
            )
        made = sessions(n, window=window, hosts=hosts, encrypted=wanted(tls))
        self.comms: list[Communicator] = [
            first_communicator(s, timeout_s=timeout_s) for s in made
        ]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call function(comm, *args) on every rank at once; their results by rank.

        If any raises, the first that is not merely about another rank is raised here.
        """
        results: list[Any] = [None] * len(self.comms)
        errors: list[tuple[int, BaseException]] = []
        ended = [threading.Event() for _ in self.comms]

        def rank(comm: Communicator) -> None:
            try:
                results[comm.rank] = function(comm, *args)
            except BaseException as error:
                errors.append((comm.rank, error))
                comm.close()
            finally:
                ended[comm.rank].set()

        running = [
            threading.Thread(target=rank, args=(c,), daemon=True) for c in self.comms
        ]
        try:
            for thread in running:
                thread.start()
            for event in ended:
                _await(event)
        except BaseException:  # interrupted: close all ranks, so that none waits
            self.close()
            _await_end(running)
            raise
        for thread in running:
            thread.join()
        if errors:
            about_others = (PeerLost, CollectiveTimeout)
            own = [e for e in errors if not isinstance(e[1], about_others)]
            number, error = (own or errors)[0]
            error.add_note(f"raised on rank {number} of {len(self.comms)}")
            raise error
        return results

    def close(self) -> None:
        """Close all ranks."""
        for comm in self.comms:
            comm.close()

    def __enter__(self) -> World:
        """For `with world(4) as w:`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def _await_end(interrupted: Sequence[threading.Thread]) -> None:
    until = time.monotonic() + _GRACE_S
    for thread in interrupted:
        if thread.is_alive():  # or never started
            thread.join(max(0.0, until - time.monotonic()))


def _await(event: threading.Event) -> None:
    while not event.wait(_LOOK_S):
        pass


def world(
    n: int,
    *,
    timeout_s: float = 60.0,
    window: int = WINDOW,
    hosts: Sequence[int] = (),
    tls: str | None = None,
) -> World:
    """A world of n ranks, each a thread of this process.

    Given numbers of hosts, ranks with different ones talk as ranks of different hosts
    do: by messages over sockets, and not through memory; encrypted with tls="mutual".
    """
    return World(n, timeout_s=timeout_s, window=window, hosts=hosts, tls=tls)
