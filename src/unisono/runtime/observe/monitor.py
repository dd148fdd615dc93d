"""The watch of a rank: a thread that answers who asks, and writes down what happened.

It begins where the user wants it: `unisono run` sets UNISONO_WATCH=1, and a folder for
flight records needs it as well. It sleeps until somebody connects. The socket is in no
file system, so nothing is left of it when the process ends, however it ends; the kernel
vouches for who connects, and only the same user (or root) is answered. It can be asked

    state      who this rank is, and where it and the others have got to
    record     its flight record: calls, lines, stacks
    links      how much it has sent to each of the others

and nothing that it is asked changes anything. With a folder for flight records it also
looks now and then whether a communicator is broken. A verdict reaches every rank over
the job's own connections, whatever its Python does; so the rank that everybody waited
for writes down where it stands.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from itertools import count
from typing import Any

import msgspec

from unisono.runtime.observe import recorder, tracing
from unisono.runtime.observe.failures import Trouble, describe
from unisono.runtime.observe.subject import Subject
from unisono.runtime.observe.traffic import Destinations
from unisono.transports.session import Logbook, Session
from unisono.transports.unix import credentials, readable

WATCH = "UNISONO_WATCH"
PREFIX = "unisono-watch-"
_LOOK_S = 0.2
_ANSWER_S = 5.0
_LONGEST = 64
_ALL: weakref.WeakSet[Watch] = weakref.WeakSet()
_NUMBERS = count()  # a process may leave a world and be the same rank in another


def name_of(pid: int, rank: int, number: int) -> str:
    """Where a rank can be asked; the leading zero keeps it out of file systems."""
    return f"\0{PREFIX}{os.getuid()}-{pid}-{rank}-{number}"


class Watch:
    """One rank's watch."""

    def __init__(self, transport: Session, folder: str) -> None:
        """Begin to listen."""
        self._transport = weakref.ref(transport)
        self._folder = folder
        self._ended = False
        self._destinations = Destinations()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wake, self._woken = socket.socketpair()
        try:
            self._listener.bind(name_of(os.getpid(), transport.rank, next(_NUMBERS)))
            self._listener.listen(8)
        except OSError:
            self.let_go()
            raise
        self._woken.setblocking(False)
        threading.Thread(target=self._run, name="unisono watch", daemon=True).start()

    def ask(self) -> None:
        """Have the record written; for signal handlers."""
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def end(self, logbook: Logbook) -> None:
        """Write the last record and listen no more."""
        if not logbook.engine.forked():
            self._write(logbook, "it left", recorder.LEFT)
        self._ended = True
        self.ask()

    def let_go(self) -> None:
        """Close the sockets; in a fork, too, where they are the parent's."""
        self._ended = True
        for end in (self._listener, self._wake, self._woken):
            end.close()

    def _run(self) -> None:
        every = _LOOK_S if self._folder else None
        while not self._ended:
            try:
                ready = readable([self._listener, self._woken], every)
                transport = self._transport()
                if transport is None or self._ended:
                    break
                if self._woken.fileno() in ready and self._woken.recv(64):
                    self._write(transport.logbook, "it was asked", recorder.ASKED)
                if self._listener.fileno() in ready:
                    self._answer(transport)
                if self._folder:
                    self._look(transport)
            except (OSError, ValueError):  # its sockets are closed
                break
            del transport
        self.let_go()

    def _write(self, logbook: Logbook, why: str, grave: int) -> None:
        if self._folder:
            with contextlib.suppress(OSError):
                recorder.write(logbook, self._folder, why, grave, {})

    def _look(self, transport: Session) -> None:
        """Whether a communicator is broken, by whomever."""
        for core in _open(transport):
            trouble, culprit, reporter, _ = core.native.failure()
            if trouble not in (Trouble.NONE, Trouble.LEFT):
                why = Trouble(trouble).name.lower().replace("_", " ")
                told = f"{core.name}: {why}, rank {culprit}, found by rank {reporter}"
                self._write(transport.logbook, told, recorder.HEARD)

    def _answer(self, transport: Session) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(_ANSWER_S)
            if credentials(connection)[1] not in (os.getuid(), 0):
                return
            asked = connection.recv(_LONGEST).strip()
            connection.sendall(msgspec.json.encode(self._told(transport, asked)))

    def _told(self, transport: Session, asked: bytes) -> dict[str, Any]:
        if asked == b"state":
            return state(transport)
        if asked == b"record":
            return recorder.flight(transport.logbook, "it was asked", {})
        if asked == b"links":
            try:
                return self._destinations.told(transport, _open(transport))
            except Exception as wrong:  # the rank can still be asked the rest
                return {"error": f"{type(wrong).__name__}: {wrong}"}
        return {"error": "expected state, record or links"}


def _open(transport: Session) -> list[Any]:
    """The communicators that are open, asked from another thread than theirs."""
    for _ in range(100):
        with contextlib.suppress(RuntimeError):  # changed while it was read
            return [core for core in transport.users if not core.closed]
    return []


def state(transport: Session) -> dict[str, Any]:
    """Where a rank is: its calls, and what it sees of the others."""
    me = transport.peers[transport.rank]
    return {
        "rank": me.rank,
        "world_size": len(transport.peers),
        "pid": me.pid,
        "host": me.host,
        "pids": [peer.pid for peer in transport.peers],
        "job": os.environ.get("UNISONO_JOB", ""),
        "time_ns": time.monotonic_ns(),
        "communicators": _progresses(transport),
    }


def _progresses(transport: Session) -> list[dict[str, Any]]:
    last = {e["pg_id"]: e for e in recorder.records(transport.logbook)}
    return [_progress(core, last.get(core.native.id())) for core in _open(transport)]


def _progress(core: Subject, last: dict[str, Any] | None) -> dict[str, Any]:
    """`last` is the record of the latest call."""
    native = core.native
    states = native.states()
    arrived, *notes = states[core.rank][:3]
    now = next((note for note in notes if note[0] == arrived), None)
    return {
        "name": core.name,
        "ranks": list(core.world_ranks),
        "rank": core.rank,
        "seq": native.seq(),
        "arrived": [s[0] for s in states],
        "gone": [r for r, s in enumerate(states) if s[4] or s[5]],
        "call": describe(now) if now and arrived else "",
        "inside": last is not None and not last["retired"],
        "since_ns": last["time_created_ns"] if last else 0,
        "ended_ns": (last["time_discovered_completed_ns"] or 0) if last else 0,
        "trouble": Trouble(native.failure()[0]).name.lower(),
        "sent_bytes": native.sent_bytes(),
        "timeout_s": core.timeout_s,
    }


def begin(transport: Session) -> None:
    """Begin to watch over a rank, if the user wants it."""
    folder = recorder.folder_for_records()
    if not folder and os.environ.get(WATCH, "0") in ("", "0"):
        return
    if folder:
        tracing.enable_call_sites()
    try:
        watch = Watch(transport, folder)
    except OSError:  # no room for another socket: it is not what the job is for
        return
    if not _ALL:
        os.register_at_fork(after_in_child=_let_go)
        _hear_signals()
    _ALL.add(watch)
    logbook = transport.logbook
    transport.at_the_end(lambda: watch.end(logbook))


def _let_go() -> None:
    for watch in list(_ALL):
        watch.let_go()


def _hear_signals() -> None:
    """SIGUSR2 asks for flight records, if it is nobody else's."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _asked)


def _asked(*_: object) -> None:
    for watch in list(_ALL):
        watch.ask()
