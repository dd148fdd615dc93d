"""The monitor of a rank: a thread that answers queries and writes flight records.

It runs only on request: `unisono run` sets UNISONO_MONITOR=1, and a folder for flight
records needs it as well. It sleeps until a client connects. The socket is not in the
file system, so nothing is left when the process ends; the kernel gives the client's
user id, and only the same user (or root) gets an answer. The queries are

    state      this rank, and the progress of it and the others
    record     its flight record: calls, lines, stacks
    links      how many bytes it has sent to each of the others

and none of them changes anything. With a folder for flight records it also checks
periodically whether a communicator is broken. A failure code reaches every rank over
the job's own connections, whatever its Python does; so the rank that the others waited
for writes its record, too.
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

from unisono.deprecation import warn_renamed
from unisono.runtime.observe import recorder, tracing
from unisono.runtime.observe.failures import (
    DEVICE_CALL,
    ON_DEVICE,
    FailureCode,
    describe,
)
from unisono.runtime.observe.recorder import MONITOR, OLD_MONITOR
from unisono.runtime.observe.subject import ObservedCore
from unisono.runtime.observe.traffic import TrafficCounter
from unisono.service_threads import ServiceThread
from unisono.transports.session import Logbook, Session
from unisono.transports.unix import credentials, readable

PREFIX = "unisono-monitor-"
_CHECK_S = 0.2
_ANSWER_S = 5.0
_LONGEST = 64
_MONITORS: weakref.WeakSet[Monitor] = weakref.WeakSet()
_NUMBERS = count()  # a process may be the same rank in several worlds


def name_of(pid: int, rank: int, number: int) -> str:
    """The socket name of a rank's monitor; the leading zero makes it abstract."""
    return f"\0{PREFIX}{os.getuid()}-{pid}-{rank}-{number}"


_ASK, _END = b"!", b"."
"""What its thread is told."""


class Monitor:
    """The monitor of one rank."""

    def __init__(self, session: Session, folder: str) -> None:
        """Start to listen."""
        self._session = weakref.ref(session)
        self._folder = folder
        self._ended = self._leaves = False
        self._traffic = TrafficCounter()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wake, self._woken = socket.socketpair()
        try:
            self._listener.bind(name_of(os.getpid(), session.rank, next(_NUMBERS)))
            self._listener.listen(8)
        except OSError:
            self.release()
            raise
        self._woken.setblocking(False)
        ServiceThread(target=self._run, name="unisono monitor", daemon=True).start()

    def ask(self) -> None:
        """Request a flight record; for signal handlers."""
        if not self._leaves:
            self._tell(_ASK)

    def _tell(self, what: bytes) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(what)

    def end(self, logbook: Logbook) -> None:
        """Write the last record and stop."""
        if not logbook.engine.forked():
            self._write(logbook, "it left", recorder.LEFT)
        self._leaves = True
        self._tell(_END)  # its thread closes the sockets, when it has received this

    def release(self) -> None:
        """Close the sockets; also in a forked child, where they are the parent's."""
        self._ended = True
        for end in (self._listener, self._wake, self._woken):
            end.close()

    def _run(self) -> None:
        every = _CHECK_S if self._folder else None
        while not self._ended:
            try:
                ready = readable([self._listener, self._woken], every)
                session = self._session()
                if session is None or self._ended:
                    break
                asked = self._woken.recv(64) if self._woken.fileno() in ready else b""
                if _END in asked:
                    break
                if asked:
                    self._write(session.logbook, "it was asked", recorder.REQUESTED)
                if self._listener.fileno() in ready:
                    self._answer(session)
                if self._folder:
                    self._check_failures(session)
            except (OSError, ValueError):  # its sockets are closed
                break
            del session
        self.release()

    def _write(self, logbook: Logbook, why: str, severity: int) -> None:
        if self._folder:
            with contextlib.suppress(OSError):
                recorder.write(logbook, self._folder, why, severity, {})

    def _check_failures(self, session: Session) -> None:
        """Write a record if any rank has broken a communicator."""
        for core in _open(session):
            code, failed_rank, reporter, seq = core.native.failure()
            if code not in (FailureCode.NONE, FailureCode.LEFT):
                why = FailureCode(code).name.lower().replace("_", " ")
                text = (
                    f"{core.name}: {why}, rank {failed_rank}, found by rank {reporter}"
                )
                if seq & DEVICE_CALL:
                    text += f", in call {seq & ~DEVICE_CALL} {ON_DEVICE}"
                self._write(session.logbook, text, recorder.REMOTE_FAILURE)

    def _answer(self, session: Session) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(_ANSWER_S)
            if credentials(connection)[1] not in (os.getuid(), 0):
                return
            request = connection.recv(_LONGEST).strip()
            connection.sendall(msgspec.json.encode(self._reply(session, request)))

    def _reply(self, session: Session, request: bytes) -> dict[str, Any]:
        if request == b"state":
            return state(session)
        if request == b"record":
            return recorder.flight(session.logbook, "it was asked", {})
        if request == b"links":
            try:
                return self._traffic.report(session, _open(session))
            except Exception as wrong:  # the other queries still work
                return {"error": f"{type(wrong).__name__}: {wrong}"}
        return {"error": "expected state, record or links"}


def _open(session: Session) -> list[Any]:
    """The open communicators, read from another thread than theirs."""
    for _ in range(100):
        with contextlib.suppress(RuntimeError):  # changed during iteration
            return [core for core in session.users if not core.closed]
    return []


def state(session: Session) -> dict[str, Any]:
    """A rank's progress, and that of the others as it sees them."""
    me = session.peers[session.rank]
    return {
        "rank": me.rank,
        "world_size": len(session.peers),
        "pid": me.pid,
        "host": me.host,
        "pids": [peer.pid for peer in session.peers],
        "job": os.environ.get("UNISONO_JOB", ""),
        "time_ns": time.monotonic_ns(),
        "communicators": _progresses(session),
    }


def _progresses(session: Session) -> list[dict[str, Any]]:
    entries = recorder.records(session.logbook)
    last = {e["pg_id"]: e for e in entries if e["device"] is None}
    made = [e for e in entries if e["device"] and e["state"] != "captured"]
    there = {e["pg_id"]: e for e in made}
    rows = []
    for core in _open(session):
        number = core.native.id()
        rows.append(_progress(core, last.get(number)))
        if number in there:
            rows.append(_progress_on_device(core, there[number]))
    return rows


def _progress(core: ObservedCore, last: dict[str, Any] | None) -> dict[str, Any]:
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
        "trouble": FailureCode(native.failure()[0]).name.lower(),
        "sent_bytes": native.sent_bytes(),
        "timeout_s": core.timeout_s,
    }


def _progress_on_device(core: ObservedCore, last: dict[str, Any]) -> dict[str, Any]:
    """The same of the calls on a device, which are counted apart.

    What these send is not counted.
    """
    note = recorder.note_on_device(
        core.session.logbook, core.native.id(), last["collective_seq_id"]
    )
    return {
        **_progress(core, last),
        "name": f"{core.name} on cuda",
        "seq": last["collective_seq_id"],
        "arrived": [],
        "call": describe(note) if note else last["profiling_name"],
        "sent_bytes": 0,
    }


def is_requested() -> bool:
    """Whether a variable asks for the monitor; the old one counts, and warns."""
    if OLD_MONITOR in os.environ:
        warn_renamed(OLD_MONITOR, MONITOR)
    return recorder.is_monitored()


def begin(session: Session) -> None:
    """Start the monitor of a rank, if the user asked for it."""
    folder = recorder.folder_for_records()
    if not folder and not is_requested():
        return
    if folder:
        tracing.enable_call_sites()
    try:
        monitor = Monitor(session, folder)
    except OSError:  # no descriptors left: the job runs without it
        return
    if not _MONITORS:
        os.register_at_fork(after_in_child=_release_all)
        _install_signal_handler()
    _MONITORS.add(monitor)
    logbook = session.logbook
    session.call_at_end(lambda: monitor.end(logbook))


def _release_all() -> None:
    for monitor in list(_MONITORS):
        monitor.release()


def _install_signal_handler() -> None:
    """Handle SIGUSR2, which requests flight records, unless it has a handler."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _on_signal)


def _on_signal(*_: object) -> None:
    for monitor in list(_MONITORS):
        monitor.ask()
