"""Recording a trace: the native core's ring buffers, started and read.

    start(logbook); ...; stop(logbook); part = harvest(logbook)

While it runs, a rank records every call and its events: when it arrived and which rank
was last, each copy and each reduction with the chunk it read, each message to another
host, each wait. Of a call on a device it records the launch, and the kernel tells when
it began, when all ranks had arrived and when it ended. The ring buffers keep the
latest; overwritten events are counted. A `TracePart` is one rank's part as plain data.
`unisono.trace` merges the parts.

With a folder in UNISONO_TRACE every rank records from the beginning and writes its part
there when it leaves.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from unisono import _native
from unisono.errors import BadArgument, Corrupted
from unisono.runtime.call.notes import CallNames, named
from unisono.transports.session import Logbook, Session

TRACE = "UNISONO_TRACE"
EVENTS = "UNISONO_TRACE_EVENTS"
NUM_EVENTS = 1 << 17
"""The number of events in a rank's ring buffer, of 64 bytes; calls: an eighth."""
SUFFIX = ".trace"
VERSION = 3
"""The version of a part's format; others are refused."""
_OURS = str(Path(__file__).parents[1]) + os.sep

KINDS = (
    *("arrival", "wait", "copy", "reduce", "pull", "deliver", "send"),
    *("encode", "exit", "block"),
)
MOMENT = np.dtype(
    [
        *(("begin", "<i8"), ("end", "<i8"), ("bytes", "<u8"), ("seq", "<u4")),
        *(("code", "<i4"), ("communicator", "<u4"), ("peer", "<i4"), ("chunk", "<i4")),
        *(("action", "<i4"), ("piece", "<i4"), ("index", "<i4"), ("output", "<i4")),
        *(("kind", "u1"), ("home", "u1"), ("exposed", "u1"), ("device", "u1")),
    ]
)
CALLED = np.dtype(
    [
        *(("seq", "<u8"), ("count", "<u8"), ("fingerprint", "<u8")),
        *(("content", "<u8"), ("root", "<i4"), ("collective", "u1"), ("dtype", "u1")),
        *(("op", "u1"), ("lengths", "u1", 4), ("text", f"S{_native.NOTE_BYTES}")),
        *(("created", "<i8"), ("begun", "<i8"), ("ended", "<i8"), ("sent", "<u8")),
        *(("communicator", "<u4"), ("peer", "<i4"), ("tag", "<i4"), ("site", "<u4")),
        *(("state", "<u4"), ("queued", "<u2"), ("device", "<i2"), ("stream", "<u8")),
    ]
)

Frame = tuple[str, str, int]
"""A function, its file, a line."""


class TracedCommunicator(msgspec.Struct):
    """A communicator: its name, its number on all ranks, its ranks in the world."""

    name: str
    agreed: int
    ranks: list[int]


class Span(msgspec.Struct):
    """A named range of time on one thread of this rank."""

    name: str
    begin: int
    end: int
    thread: str
    category: str = "user_annotation"


class TracePart(msgspec.Struct):
    """What one rank recorded. Times are of its own clock, in nanoseconds.

    `clock` is the offset of rank 0's clock, and its uncertainty; `wall` the offset of
    the time of day. `lost` are the numbers of overwritten calls and events. `names` are
    the full names of calls, by their fingerprints.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    hosts: list[int]
    clock: tuple[int, int]
    wall: int
    groups: dict[int, TracedCommunicator]
    calls: bytes
    moments: bytes
    lost: tuple[int, int]
    sites: dict[int, list[Frame]]
    spans: list[Span]
    names: dict[int, CallNames] = {}
    version: int = VERSION


_SPANS: list[Span] = []
_MOST_SPANS = 1 << 17


def enable_call_sites() -> None:
    """From now on record the Python line of each call."""
    _native.enable_call_sites(_OURS)


def start(logbook: Logbook) -> None:
    """Start or continue recording."""
    enable_call_sites()
    moments = _size()
    logbook.engine.start_trace(moments, max(1, moments // 8))


def stop(logbook: Logbook) -> None:
    """Stop recording; the events stay."""
    logbook.engine.stop_trace()


def _size() -> int:
    text = os.environ.get(EVENTS, "")
    if not text:
        return NUM_EVENTS
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1 << 28):
        raise BadArgument(f"{EVENTS}={text}: expected a number from 1 to 2^28")
    return int(text)


def add_span(span: Span) -> None:
    """Add a named range, up to a limit."""
    if len(_SPANS) < _MOST_SPANS:
        _SPANS.append(span)


def time_of_day() -> int:
    """The offset from the monotonic clock to the time of day, in nanoseconds.

    The thread may be preempted between two readings: the closest of several count.
    """
    tries = []
    for _ in range(8):
        before, day, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after - before, day - (before + after) // 2))
    return min(tries)[1]


def harvest(logbook: Logbook) -> TracePart:
    """This rank's events so far."""
    (calls, num_calls), (moments, num_moments) = logbook.engine.trace_entries()
    me = logbook.peers[logbook.rank]
    called = np.frombuffer(calls, CALLED)
    sites = np.unique(called["site"]).tolist()
    names = {p: named(p) for p in np.unique(called["fingerprint"]).tolist()}
    return TracePart(
        rank=logbook.rank,
        world_size=len(logbook.peers),
        pid=me.pid,
        host=socket.gethostname(),
        hosts=list(logbook.hosts),
        clock=logbook.clock,
        wall=time_of_day(),
        groups={
            number: TracedCommunicator(known.name, known.agreed, list(known.ranks))
            for number, known in logbook.known.items()
        },
        calls=calls,
        moments=moments,
        lost=(
            num_calls - len(calls) // CALLED.itemsize,
            num_moments - len(moments) // MOMENT.itemsize,
        ),
        sites={site: _native.call_site_frames(site) for site in sites},
        spans=list(_SPANS),
        names={p: found for p, found in names.items() if found is not None},
    )


def write_part(logbook: Logbook, folder: Path) -> Path:
    """Write this rank's part to a folder."""
    part = harvest(logbook)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank{part.rank}-{part.pid}{SUFFIX}"
    scratch = file.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(msgspec.msgpack.encode(part))
    scratch.replace(file)
    return file


def read_part(file: Path) -> TracePart:
    """Read a part that a rank has written; Corrupted if it is not one."""
    try:
        part = msgspec.msgpack.decode(file.read_bytes(), type=TracePart)
    except msgspec.DecodeError as why:
        raise Corrupted(f"{file}: not a rank's part of a trace: {why}") from why
    if part.version != VERSION:
        raise Corrupted(
            f"{file}: a part of version {part.version}, expected {VERSION}: it was "
            "recorded by another unisono; record it again"
        )
    if len(part.calls) % CALLED.itemsize or len(part.moments) % MOMENT.itemsize:
        raise Corrupted(f"{file}: a truncated part of a trace")
    return part


def attend(session: Session) -> None:
    """If UNISONO_TRACE is set, record from now on and write a part at the end."""
    folder, logbook = os.environ.get(TRACE, ""), session.logbook
    if folder:
        start(logbook)
        session.call_at_end(lambda: _leave_part(logbook, Path(folder)))


def _leave_part(logbook: Logbook, folder: Path) -> None:
    stop(logbook)
    if logbook.engine.forked():
        return
    try:
        write_part(logbook, folder)
    except OSError as why:  # the job itself has succeeded
        lost = f"unisono: the trace of rank {logbook.rank} is lost: {why}\n"
        sys.stderr.write(lost)
