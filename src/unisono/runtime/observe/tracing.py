"""Recording a trace: the native core's rings, switched on and read.

    start(logbook); ...; stop(logbook); part = harvest(logbook)

While it is on, a rank notes every call and what the call is made of: when it arrived
and who was last, each copy and each reduction with whose chunk it read, each message to
another host, each wait. The rings keep the latest; what was overwritten is counted. A
`Part` is one rank's share as plain data. `unisono.trace` puts the parts together.

UNISONO_TRACE names a folder: then every rank records from the beginning and leaves its
part there when it leaves.
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
from unisono.runtime.call.notes import Names, named
from unisono.transports.session import Logbook, Session

TRACE = "UNISONO_TRACE"
EVENTS = "UNISONO_TRACE_EVENTS"
MOMENTS = 1 << 17
"""How many moments a rank's ring holds, of 64 bytes each; calls: an eighth."""
SUFFIX = ".trace"
VERSION = 2
"""Of what lies in a part; one of another version is not believed."""
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
        *(("kind", "u1"), ("home", "u1"), ("lent", "u1"), ("unused", "u1")),
    ]
)
CALLED = np.dtype(
    [
        *(("seq", "<u8"), ("count", "<u8"), ("fingerprint", "<u8")),
        *(("content", "<u8"), ("root", "<i4"), ("collective", "u1"), ("dtype", "u1")),
        *(("op", "u1"), ("lengths", "u1", 4), ("text", f"S{_native.NOTE_BYTES}")),
        *(("created", "<i8"), ("begun", "<i8"), ("ended", "<i8"), ("sent", "<u8")),
        *(("communicator", "<u4"), ("peer", "<i4"), ("tag", "<i4"), ("site", "<u4")),
        *(("state", "<u4"), ("queued", "<u4"), ("unused", "V8")),
    ]
)

Frame = tuple[str, str, int]
"""A function, its file, a line."""


class Group(msgspec.Struct):
    """A communicator: its name, the number all know it by, its ranks in the world."""

    name: str
    agreed: int
    ranks: list[int]


class Span(msgspec.Struct):
    """What the user named on this rank: a range of time on one of its threads."""

    name: str
    begin: int
    end: int
    thread: str
    category: str = "user_annotation"


class Part(msgspec.Struct):
    """What one rank recorded. Times are of its own clock, in nanoseconds.

    `clock` is what to add to have rank 0's clock, and how sure that is; `wall` what to
    add to have the time of day. `lost` are the calls and moments that were overwritten.
    `names` are the names of the calls in full, by their fingerprints.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    hosts: list[int]
    clock: tuple[int, int]
    wall: int
    groups: dict[int, Group]
    calls: bytes
    moments: bytes
    lost: tuple[int, int]
    sites: dict[int, list[Frame]]
    spans: list[Span]
    names: dict[int, Names] = {}
    version: int = VERSION


_SPANS: list[Span] = []
_MOST_SPANS = 1 << 17


def enable_call_sites() -> None:
    """From now on calls remember where in Python they were made."""
    _native.enable_call_sites(_OURS)


def start(logbook: Logbook) -> None:
    """Begin to record, or go on."""
    enable_call_sites()
    moments = _size()
    logbook.engine.start_trace(moments, max(1, moments // 8))


def stop(logbook: Logbook) -> None:
    """Record no more; what there is stays."""
    logbook.engine.stop_trace()


def _size() -> int:
    told = os.environ.get(EVENTS, "")
    if not told:
        return MOMENTS
    if not (told.isascii() and told.isdigit() and 0 < int(told) <= 1 << 28):
        raise BadArgument(f"{EVENTS}={told}: expected how many, from 1 to 2^28")
    return int(told)


def add_span(span: Span) -> None:
    """Keep a range that the user named; the first so many."""
    if len(_SPANS) < _MOST_SPANS:
        _SPANS.append(span)


def time_of_day() -> int:
    """What to add to the clock of records to have the time of day, in nanoseconds.

    Somebody may come between two looks at two clocks: the closest of some are believed.
    """
    tries = []
    for _ in range(8):
        before, day, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after - before, day - (before + after) // 2))
    return min(tries)[1]


def harvest(logbook: Logbook) -> Part:
    """What this rank has recorded so far."""
    (calls, num_calls), (moments, num_moments) = logbook.engine.trace_entries()
    me = logbook.peers[logbook.rank]
    called = np.frombuffer(calls, CALLED)
    sites = np.unique(called["site"]).tolist()
    names = {p: named(p) for p in np.unique(called["fingerprint"]).tolist()}
    return Part(
        rank=logbook.rank,
        world_size=len(logbook.peers),
        pid=me.pid,
        host=socket.gethostname(),
        hosts=list(logbook.hosts),
        clock=logbook.clock,
        wall=time_of_day(),
        groups={
            number: Group(known.name, known.agreed, list(known.ranks))
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
    """Leave this rank's part in a folder."""
    part = harvest(logbook)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank{part.rank}-{part.pid}{SUFFIX}"
    scratch = file.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(msgspec.msgpack.encode(part))
    scratch.replace(file)
    return file


def read_part(file: Path) -> Part:
    """A part that a rank has left; Corrupted if it is none."""
    try:
        part = msgspec.msgpack.decode(file.read_bytes(), type=Part)
    except msgspec.DecodeError as why:
        raise Corrupted(f"{file}: expected a rank's part of a trace: {why}") from why
    if part.version != VERSION:
        raise Corrupted(
            f"{file}: a part of version {part.version}, expected {VERSION}: it was "
            "recorded by another unisono; record it again"
        )
    if len(part.calls) % CALLED.itemsize or len(part.moments) % MOMENT.itemsize:
        raise Corrupted(f"{file}: a rank's part of a trace, cut short")
    return part


def attend(transport: Session) -> None:
    """Record from the beginning, and leave a part at the end, if the user asks so."""
    folder, logbook = os.environ.get(TRACE, ""), transport.logbook
    if folder:
        start(logbook)
        transport.at_the_end(lambda: _leave_part(logbook, Path(folder)))


def _leave_part(logbook: Logbook, folder: Path) -> None:
    stop(logbook)
    if logbook.engine.forked():
        return
    try:
        write_part(logbook, folder)
    except OSError as why:  # the job is over, and this is not what it was for
        lost = f"unisono: the trace of rank {logbook.rank} is lost: {why}\n"
        sys.stderr.write(lost)
