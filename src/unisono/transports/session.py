"""What a communicator asks of a transport: an engine, and who the other ranks are.

The engine is native: it holds the segments of shared memory, watches over the lives of
the other ranks, and runs programs. A transport only says how it came about.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet, finalize

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ConnectFailed, UnsupportedWorld

try:
    from unisono import _native
except ImportError as why:  # built without a compiler
    raise UnsupportedWorld(
        "the native core is missing, and ranks cannot talk without it: "
        "install unisono from a wheel, or with a C++20 compiler",
        n=0,
    ) from why

if TYPE_CHECKING:
    from unisono._native import Comm, Engine
    from unisono.transports.listener import Listener
    from unisono.transports.streams import Streams

WINDOW = 256 << 10
"""Bytes of half a rank's window: the pieces of one generation."""

MOST_RANKS = _native.MOST_RANKS
"""So many ranks can be told apart in the word that says who failed."""


def refuse_too_many(n: int) -> None:
    """Raise UnsupportedWorld, before anybody is waited for."""
    if n > MOST_RANKS:
        raise UnsupportedWorld(
            f"a world of {n} ranks: at most {MOST_RANKS} are supported", n=n
        )


TURN_NS = 500_000
"""How long a rank mostly computes before it waits for another."""

_ASK_FROM = 256 << 20
"""Above this many bytes look first: the kernel would rather kill than refuse."""

_LOOK_S = 0.05
_SLOWEST_S = 2e-3  # how often one looks for what should be there in no time
_NUMBERS = count(1)


class InFlight(Protocol):
    """The calls of a communicator that are in flight, and their arrays."""

    def pending(self) -> bool:
        """Whether any has not ended."""

    def rest(self, within_s: float) -> None:
        """Sleep until one more has ended, or for a while."""

    def end(self) -> None:
        """Let go of the arrays: the communicator is closed."""


@dataclass(frozen=True)
class Peer:
    """A rank of the world as others name it."""

    rank: int
    pid: int
    host: str

    def __str__(self) -> str:
        """As in "rank 3 (pid 4242 on host a)"."""
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class Known:
    """A communicator as records tell of it: by what name, and number, which ranks."""

    name: str
    agreed: int
    ranks: tuple[int, ...]


@dataclass(eq=False)
class Logbook:
    """What records of this rank are made of; it may outlive its transport for a moment.

    `known` are all communicators that there ever were, by the numbers that records have
    for them. `clock` is what to add to this host's to have rank 0's, and how sure that
    is, in nanoseconds. `written` tells how grave the record is that was written.
    """

    engine: Engine
    rank: int
    peers: Sequence[Peer]
    hosts: Sequence[int]
    known: dict[int, Known] = field(default_factory=dict)
    clock: tuple[int, int] = (0, 0)
    written: int = -1


@dataclass(eq=False)
class Session:
    """The world as one rank reaches it.

    `cores` is how many the ranks of this host share. `hosts` are the numbers of the
    ranks' hosts, and `streams` what leads to the others, if there is more than one.
    `reaches` tells whether the ranks of every host can read each other's own memory.
    `leave` ends what else there is, and `why` tells how hosts are connected. Across
    hosts `reception` is where this rank takes connections. `note` is a number that rank
    0 has told all at the meeting, `tuned` what they have agreed on since about which
    algorithms are quick here. `apart` are the ranks of this host that are in another
    pid namespace than rank 0.
    """

    engine: Engine
    rank: int
    peers: Sequence[Peer]
    cores: int
    window: int = WINDOW
    hosts: Sequence[int] = ()
    streams: Streams | None = None
    reaches: bool = False
    leave: Callable[[], None] | None = None
    why: str = ""
    listener: Listener | None = None
    note: int = 0
    tuned: Any = None
    apart: Sequence[int] = ()
    closed: bool = field(init=False, default=False)
    failed: bool = field(init=False, default=False)
    """Whether a call of this rank has failed, in any communicator."""
    patience: tuple[int, int, int] = field(init=False)
    users: WeakSet[Any] = field(init=False, default_factory=WeakSet)
    """The communicators that are open; the engine is closed with the last of them."""
    _closing: threading.RLock = field(init=False, default_factory=threading.RLock)
    ending: set[InFlight] = field(init=False, default_factory=set)
    """The calls of those that nobody refers to any longer."""
    logbook: Logbook = field(init=False)
    farewells: list[Callable[[], object]] = field(init=False, default_factory=list)
    """What is done when everything ends, or when nobody refers to this any longer."""

    def __post_init__(self) -> None:
        """Decide how to wait: spin where every rank has a core, yield where not."""
        self.hosts = tuple(self.hosts) or (0,) * len(self.peers)
        self.logbook = Logbook(self.engine, self.rank, self.peers, self.hosts)
        # Not for long: another rank may have been put on the same core, and waits.
        here = self.hosts.count(self.hosts[self.rank])
        spins, yields = (300, 4000) if here <= self.cores else (0, 400)
        if here < len(self.peers):  # what comes from afar ends a sleep by itself
            spins, yields = (100, 20) if here <= self.cores else (0, 20)
        # The core comes back when each rank that shares it has had its turn. If that
        # takes longer, somebody else is there, and it is better to sleep.
        self.patience = spins, yields, TURN_NS * -(-here // self.cores)

    def admit(self, user: object, number: int, known: Known) -> None:
        """Take in a communicator, whose records bear this number."""
        self.users.add(user)
        self.logbook.known[number] = known

    def memory_for(self, ranks: Sequence[int]) -> int:
        """Make the memory of a communicator of these ranks on this host; its number."""
        windows = len(self.here(ranks))
        return self.engine.create(
            _native.Comm.memory_needed(len(ranks), windows, self.window)
        )

    def buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """Shared memory of this rank, present in full; MemoryError if there is less."""
        free = memory_free() if nbytes > _ASK_FROM else nbytes
        if nbytes > free:
            raise MemoryError(
                f"{nbytes} bytes of shared memory are asked for, {free} are free"
            )
        return self.engine.buffer(nbytes)

    def at_the_end(self, last: Callable[[], object]) -> None:
        """Have something done once, when this ends in whatever way but by a kill."""
        self.farewells.append(finalize(self, last))

    def close(self) -> None:
        """End everything; nothing can be done with it any longer."""
        with self._closing:  # when this returns it has ended, whoever ends it
            self.retire()
            if self.leave is not None:
                self.leave()

    def retire(self) -> None:
        """End everything but the place where others connect, which may be kept."""
        with self._closing:
            while self.farewells:
                self.farewells.pop()()
            self.closed = True
            if self.streams is not None:
                self.streams.leave_all()
            self.engine.close()

    def give_back(
        self,
        native: Comm,
        agreed: int,
        on_close: Callable[[], None] | None,
        calls: InFlight,
    ) -> None:
        """End a communicator that was dropped without close().

        It may be the garbage collector that comes here, on any thread and in the middle
        of anything: so no other thread of ours is waited for. The end of the last one
        is the end of the world, whose threads are joined by a thread of its own. So are
        its calls in flight awaited, since others still take part in them; but not when
        something has failed here, for then they may never end.
        """
        if self.closed or self.engine.forked():
            return
        if self.failed or not calls.pending():
            self._end(native, agreed, on_close, calls)
            return
        self.ending.add(calls)

        def end() -> None:
            while calls.pending() and not self.failed:
                calls.rest(_LOOK_S)
            self.ending.discard(calls)
            self._end(native, agreed, on_close, calls)

        threading.Thread(target=end, name="unisono end", daemon=True).start()

    def _end(
        self,
        native: Comm,
        agreed: int,
        on_close: Callable[[], None] | None,
        calls: InFlight,
    ) -> None:
        if self.closed:
            return
        native.close()
        calls.end()
        if self.streams is not None:
            self.streams.leave(agreed)
        if on_close is not None:
            on_close()
        if not self.ending and not any(True for _ in self.users):
            threading.Thread(target=self.close, name="unisono end").start()

    def here(self, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks that are on this host."""
        return [r for r in ranks if self.hosts[r] == self.hosts[self.rank]]

    def owner(self, ranks: Sequence[int]) -> int:
        """Who makes the memory of a communicator on this host."""
        return self.here(ranks)[0]

    def communicator(
        self,
        ranks: Sequence[int],
        segment: int,
        *,
        agreed: int,
        timeout_s: float,
        in_vain: Callable[[], bool] = bool,
    ) -> Comm:
        """This rank's end of a communicator, whose memory its owner here has made.

        `agreed` is a number by which all its ranks know it; `in_vain` tells that its
        memory need not be waited for.
        """
        owner = self.owner(ranks)
        self.await_segment(owner, segment, timeout_s, in_vain)
        ranks = list(ranks)
        made = _native.Comm(
            self.engine,
            ranks,
            ranks.index(self.rank),
            [ranks.index(r) for r in self.here(ranks)],
            owner,
            segment,
            self.window,
            next(_NUMBERS),
            agreed,
        )
        if self.streams is not None and len(self.here(ranks)) < len(ranks):
            self.streams.join(agreed, made, ranks)
        return made

    def await_segment(
        self,
        owner: int,
        segment: int,
        timeout_s: float,
        in_vain: Callable[[], bool] = bool,
    ) -> None:
        """Wait until a segment of another rank has arrived here."""
        deadline = time.monotonic() + timeout_s
        pause = 20e-6
        while not self.engine.has(owner, segment):
            if self.engine.dead(owner) and not self.engine.has(owner, segment):
                raise ConnectFailed(
                    f"{self.peers[owner]} died before its memory arrived",
                    missing=[owner],
                )
            if self.engine.out_of_resources():
                raise OSError(
                    errno.EMFILE,
                    f"the memory of {self.peers[owner]} cannot be taken in: there are "
                    "too few file descriptors (ulimit -n) or too little memory",
                )
            if pause >= _SLOWEST_S and in_vain():  # which is not free to ask
                raise ConnectFailed(
                    f"{self.peers[owner]} gave up before its memory arrived",
                    missing=[owner],
                )
            if time.monotonic() > deadline:
                raise ConnectFailed(
                    f"the memory of {self.peers[owner]} did not arrive in "
                    f"{timeout_s:g} s",
                    missing=[owner],
                )
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST_S)


def memory_free() -> int:
    """How many bytes this host could give, as far as it tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 1 << 62


def cores_here() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
