"""A session: one rank's connection to a world, as a transport has made it.

It has a native engine, which owns the segments of shared memory, detects deaths of
other ranks, and runs programs; and it knows who the other ranks are.
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
from weakref import WeakSet, WeakValueDictionary, finalize

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ConnectFailed, UnsupportedWorld
from unisono.service_threads import ServiceThread

try:
    from unisono import _native
except ImportError as why:  # built without a compiler
    raise UnsupportedWorld(
        "the native core is missing, and ranks cannot talk without it: "
        "install unisono from a wheel, or with a C++20 compiler",
        n=0,
    ) from why

if TYPE_CHECKING:
    from unisono._native import Comm, Engine, Registration
    from unisono.transports.listener import Listener
    from unisono.transports.streams import Streams

WINDOW = 256 << 10
"""Bytes of half a rank's window: the pieces of one generation."""

MOST_RANKS = _native.MOST_RANKS
"""So many ranks fit in the native word that names who failed."""


def refuse_too_many(n: int) -> None:
    """Raise UnsupportedWorld, before any rank is waited for."""
    if n > MOST_RANKS:
        raise UnsupportedWorld(
            f"a world of {n} ranks: at most {MOST_RANKS} are supported", n=n
        )


MOST_KNOWN = 2_500
"""More communicators than calls are recorded."""

TIME_SLICE_NS = 500_000
"""How long a rank typically computes before it waits for another."""

_CHECK_FROM = 256 << 20
"""Above this many bytes check first: the kernel would kill rather than refuse."""

_POLL_S = 0.05
_LONGEST_END_S = 10.0
_LONGEST_PAUSE_S = 2e-3  # between checks for what should come at once
_PAUSE_SHARE = 1 / 16
"""Of what was waited: then the next check is so much later, at most."""
_LONGEST_LATE_S = 50e-3  # between checks for what is late, as among many ranks
_NUMBERS = count(1)


class InFlight(Protocol):
    """The calls of a communicator that are in flight, and their arrays."""

    def pending(self) -> bool:
        """Whether any has not ended."""

    def rest(self, within_s: float) -> None:
        """Sleep until one more has ended, or for a while."""

    def has_device(self) -> bool:
        """Whether it has a device half, whose closing waits for the device."""

    def close_device(self) -> None:
        """Close the device half, before the communicator itself is closed."""

    def end(self) -> None:
        """Release the arrays: the communicator is closed."""


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
    """A communicator as records name it: its name, its number, its ranks."""

    name: str
    agreed: int
    ranks: tuple[int, ...]


@dataclass(eq=False)
class Logbook:
    """What records of this rank need; it may outlive its session for a moment.

    `known` are the communicators by the numbers that records have for them: those in
    use, and the last of the others, which the recorded calls are of. `clock` is what to
    add to this host's to have rank 0's, and how sure that is, in nanoseconds. `written`
    tells how grave the record is that was written.
    """

    engine: Engine
    rank: int
    peers: Sequence[Peer]
    hosts: Sequence[int]
    known: dict[int, Known] = field(default_factory=dict)
    clock: tuple[int, int] = (0, 0)
    written: int = -1
    _users: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)

    def add(self, user: object, number: int, known: Known) -> None:
        """Add a communicator; forget the oldest that is not in use, of many."""
        self.known[number] = known
        self._users[number] = user
        if len(self.known) > MOST_KNOWN:
            ended = next((n for n in self.known if n not in self._users), None)
            if ended is not None:
                del self.known[ended]


@dataclass(eq=False)
class Session:
    """One rank's connection to a world.

    `cores` is how many the ranks of this host share. `hosts` are the numbers of the
    ranks' hosts, and `streams` the streams to other hosts, if there are any. `reaches`:
    the ranks of every host can read each other's own memory. `leave` closes what else
    the transport has opened; `why` says how hosts are connected, and `lanes` by how
    many connections and threads. Across hosts `listener` is where this rank accepts
    connections. `note` is 1 if rank 0 has a tuned table: on one host all ranks know it
    from the rendezvous, across hosts rank 0 alone, until the first communicator is
    made. `tuned` is the table that all ranks have agreed on since, and `links` the
    model of the links between hosts, if they were probed. `tcp`: bytes go to other
    machines by this system's TCP. `apart` are the ranks of this host that are in
    another pid namespace than rank 0.
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
    lanes: Callable[[], str] = str
    listener: Listener | None = None
    note: int = 0
    tuned: Any = None
    links: Any = None
    tcp: bool = False
    apart: Sequence[int] = ()
    closed: bool = field(init=False, default=False)
    failed: bool = field(init=False, default=False)
    """Whether a call of this rank has failed, in any communicator."""
    wait_policy: tuple[int, int, int] = field(init=False)
    users: WeakSet[Any] = field(init=False, default_factory=WeakSet)
    """The communicators that are open; the engine is closed with the last of them."""
    _closing: threading.RLock = field(init=False, default_factory=threading.RLock)
    finishing: dict[InFlight, threading.Thread] = field(
        init=False, default_factory=dict
    )
    """Calls in flight of communicators that were dropped without close()."""
    logbook: Logbook = field(init=False)
    closers: list[Callable[[], object]] = field(init=False, default_factory=list)
    """Called when the session is closed or garbage-collected."""
    after_close: list[Callable[[], object]] = field(init=False, default_factory=list)
    """Called when it is closed and the other ranks know that this one has left."""

    def __post_init__(self) -> None:
        """Choose the wait policy: spin if every rank has a core, else yield."""
        self.hosts = tuple(self.hosts) or (0,) * len(self.peers)
        self.logbook = Logbook(self.engine, self.rank, self.peers, self.hosts)
        # Not for long: another rank may run on the same core.
        here = self.hosts.count(self.hosts[self.rank])
        spins, yields = (300, 4000) if here <= self.cores else (0, 400)
        if here < len(self.peers):  # bytes from other hosts end a sleep
            spins, yields = (100, 20) if here <= self.cores else (0, 20)
        # A yield returns when each rank that shares the core has had its turn. If that
        # takes longer, another process runs there, and it is better to sleep.
        self.wait_policy = spins, yields, TIME_SLICE_NS * -(-here // self.cores)

    def admit(self, user: object, number: int, known: Known) -> None:
        """Add a communicator, whose records have this number."""
        self.users.add(user)
        self.logbook.add(user, number, known)

    def memory_for(self, ranks: Sequence[int]) -> int:
        """Make the memory of a communicator of these ranks on this host; its number."""
        windows = len(self.here(ranks))
        return self.engine.create(
            _native.Comm.memory_needed(len(ranks), windows, self.window)
        )

    def buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """Shared memory of this rank, present in full; MemoryError if there is less."""
        _refuse_too_much(nbytes)
        return self.engine.buffer(nbytes)

    def register(self, address: int, nbytes: int) -> Registration:
        """Make memory of this rank shared where it is; MemoryError if there is less."""
        _refuse_too_much(nbytes)
        return self.engine.register(address, nbytes)

    def call_at_end(self, last: Callable[[], object]) -> None:
        """Have something called once, when the session or the process ends normally."""
        self.closers.append(finalize(self, last))

    def close(self) -> None:
        """Close everything."""
        with self._closing:  # when this returns, it is closed, by whichever thread
            self.retire()
            if self.leave is not None:
                self.leave()

    def retire(self) -> None:
        """Close everything but the listener, to which others may still connect."""
        with self._closing:
            while self.closers:
                self.closers.pop()()
            self.closed = True
            if self.streams is not None:
                self.streams.leave_all()
            self.engine.close()
            while self.after_close:
                self.after_close.pop()()

    def await_closing(self) -> None:
        """Wait for another thread if it is closing this; it may stay open."""
        with self._closing:
            pass

    def close_dropped(
        self,
        native: Comm,
        agreed: int,
        on_close: Callable[[], None] | None,
        calls: InFlight,
    ) -> None:
        """Close a communicator that was dropped without close().

        The garbage collector may call this, on any thread at any time: so it waits for
        no other thread. Closing the last one closes the session, whose threads are
        joined by a thread of its own. Such a thread also waits for calls in flight,
        since other ranks take part in them; unless something has failed here, for then
        they may never end.
        """
        if self.closed or self.engine.forked():
            return
        if not calls.has_device() and (self.failed or not calls.pending()):
            self._close_now(native, agreed, on_close, calls)
            return

        def end() -> None:
            while calls.pending() and not self.failed:
                calls.rest(_POLL_S)
            calls.close_device()
            self.finishing.pop(calls, None)
            self._close_now(native, agreed, on_close, calls)

        thread = ServiceThread(target=end, name="unisono end", daemon=True)
        self.finishing[calls] = thread
        if not _begins(thread):
            self.finishing.pop(calls, None)

    def end_dropped(self) -> None:
        """At exit, close what was dropped and has a device half, which others may read.

        Their threads would end with the interpreter.
        """
        for calls, thread in list(self.finishing.items()):
            if calls.has_device():
                calls.close_device()
                thread.join(_LONGEST_END_S)

    def _close_now(
        self,
        native: Comm,
        agreed: int,
        on_close: Callable[[], None] | None,
        calls: InFlight,
    ) -> None:
        if self.closed:
            return
        calls.close_device()
        native.close()
        calls.end()
        if self.streams is not None:
            self.streams.leave(agreed)
        if on_close is not None:
            on_close()
        if not self.finishing and not any(True for _ in self.users):
            _begins(ServiceThread(target=self.close, name="unisono end"))

    def links_between(self, ranks: Sequence[int]) -> Any:
        """The model of the links between the hosts of these ranks; None if unknown."""
        hosts = dict.fromkeys(self.hosts[r] for r in ranks)
        return self.links.of(list(hosts)) if self.links else None

    def here(self, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks that are on this host."""
        return [r for r in ranks if self.hosts[r] == self.hosts[self.rank]]

    def owner(self, ranks: Sequence[int]) -> int:
        """The rank that makes the memory of a communicator on this host."""
        return self.here(ranks)[0]

    def communicator(
        self,
        ranks: Sequence[int],
        segment: int,
        *,
        agreed: int,
        timeout_s: float,
        cancelled: Callable[[], bool] = bool,
    ) -> Comm:
        """This rank's part of a communicator, whose memory its owner here has made.

        `agreed` is a number by which all its ranks know it; `cancelled` returns
        whether its memory will never come.
        """
        owner = self.owner(ranks)
        self.await_segment(owner, segment, timeout_s, cancelled)
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
        cancelled: Callable[[], bool] = bool,
    ) -> None:
        """Wait until a segment of another rank has arrived here."""
        begun = time.monotonic()
        deadline = begun + timeout_s
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
                    f"the memory of {self.peers[owner]} cannot be received: there are "
                    "too few file descriptors (ulimit -n) or too little memory",
                )
            if (
                pause >= _LONGEST_PAUSE_S and cancelled()
            ):  # which takes a while to find out
                raise ConnectFailed(
                    f"{self.peers[owner]} cancelled before its memory arrived",
                    missing=[owner],
                )
            if time.monotonic() > deadline:
                raise ConnectFailed(
                    f"the memory of {self.peers[owner]} did not arrive in "
                    f"{timeout_s:g} s",
                    missing=[owner],
                )
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            waited = time.monotonic() - begun
            late = min(_PAUSE_SHARE * waited, _LONGEST_LATE_S)
            pause = min(2 * pause, max(_LONGEST_PAUSE_S, late))


def _refuse_too_much(nbytes: int) -> None:
    free = memory_free() if nbytes > _CHECK_FROM else nbytes
    if nbytes > free:
        raise MemoryError(
            f"{nbytes} bytes of shared memory are asked for, {free} are free"
        )


def memory_free() -> int:
    """How many bytes of memory this host has available, if it reports that."""
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


def _begins(thread: ServiceThread) -> bool:
    """Start a thread that closes a session; if it cannot, that is closed at exit."""
    try:
        thread.start()
    except OSError:
        return False
    return True
