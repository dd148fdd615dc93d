"""The flight recorder: the last 2,000 calls of a rank, always on, written on error.

The native core writes the records; here they become dictionaries with the field names
of PyTorch's tools. A call on a device has its device and stream; it is created when it
is launched. Unless `timed`, it was found that it had ended, and is not known when it
began. Only if UNISONO_FLIGHT_DIR names a folder, a rank writes a *flight
record* there: its calls with the lines that made them, and the stacks of its threads.
It does so when a call fails, when another rank's has failed, on request (SIGUSR2), and
when it leaves; the most severe reason stays. `unisono trace why` reads them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from unisono import _native
from unisono.dtypes import DTYPES, OPS
from unisono.runtime.call.notes import Note
from unisono.runtime.plan.plans import CODES
from unisono.transports.session import Logbook

FLIGHT_DIR = "UNISONO_FLIGHT_DIR"
MONITOR = "UNISONO_MONITOR"
"""`1`: ranks can be asked for their records (`monitor`)."""
OLD_MONITOR = "UNISONO_WATCH"
"""Its name before."""
LEFT, REQUESTED, REMOTE_FAILURE, FAILED = range(4)
"""Why a flight record is written, by severity."""

_NAMES = list(CODES)
_DTYPES = list(DTYPES)
STATES = ("scheduled", "started", "completed", "failed", "captured")
"""Of a call; captured: for a CUDA graph, which may run it any number of times."""
_MESSAGES = ("send", "recv")
_DEEPEST = 64
_WRITING = threading.Lock()


def is_monitored() -> bool:
    """Whether a variable asks for the monitor; the old one counts, too."""
    value = os.environ.get(OLD_MONITOR, os.environ.get(MONITOR, "0"))
    return value not in ("", "0")


def records(logbook: Logbook) -> list[dict[str, Any]]:
    """The records of this rank, oldest first."""
    found = []
    for record in logbook.engine.records():
        number, group, noted, created, begun, ended, state, *more = record
        peer, tag, encoded, decoded, site, device, stream, timed = more
        note = Note(*noted)
        names, dtype = note.names, _DTYPES[note.dtype]
        known = logbook.known.get(group)
        name = _NAMES[note.collective]
        found.append(
            {
                "record_id": number,
                "pg_id": group,
                "process_group": [str(known.agreed), known.name] if known else ["", ""],
                "collective_seq_id": note.seq,
                "p2p_seq_id": 0,
                "op_id": number,
                "profiling_name": name,
                "is_p2p": name in _MESSAGES,
                "algorithm": names.algorithm,
                "content": f"{note.content:016x}",
                "codec": names.codec,
                "label": names.label,
                "op": OPS[note.op],
                "root": note.root,
                "shape": names.shape,
                "input_dtypes": [dtype],
                "input_sizes": [[note.elements]],
                "output_dtypes": [dtype],
                "output_sizes": [[note.elements]],
                "peer": None if peer < 0 else peer,
                "tag": tag,
                "encoded_bytes": encoded,
                "decoded_bytes": decoded,
                "device": f"cuda:{device}" if device >= 0 else None,
                "stream": stream if device >= 0 else None,
                "timed": device < 0 or timed,
                "state": STATES[state],
                "retired": state > 1,
                "time_created_ns": created,
                "time_discovered_started_ns": begun or None,
                "time_discovered_completed_ns": ended or None,
                "duration_ms": (ended - begun) / 1e6 if ended and begun else None,
                "frames": [_frame(*frame) for frame in _native.call_site_frames(site)],
            }
        )
    return found


def note_on_device(logbook: Logbook, group: int, number: int) -> Any:
    """The note of a communicator's call on a device, if it is recorded; else None."""
    for _, of, note, *more in reversed(logbook.engine.records()):
        device = more[-3]
        if device >= 0 and (of, note[0]) == (group, number):
            return note
    return None


def _frame(name: str, filename: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def stacks() -> list[dict[str, Any]]:
    """The stacks of this process's threads, innermost frame first.

    The current thread is the one that writes this: of a failed call, its caller.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frames in _native.thread_stacks(_DEEPEST):
        found.append(
            {
                "thread": names.get(ident, "?"),
                "main": ident == threading.main_thread().ident,
                "current": ident == threading.get_ident(),
                "frames": [_frame(*frame) for frame in frames],
            }
        )
    return sorted(found, key=lambda stack: not stack["main"])


def flight(logbook: Logbook, why: str, about: dict[str, Any]) -> dict[str, Any]:
    """A rank's flight record; `about` describes its error, if it has one.

    Times are of this host's clock; adding `clock_ns` gives rank 0's.
    """
    me = logbook.peers[logbook.rank]
    entries = records(logbook)
    return {
        "version": "unisono-2",
        "rank": me.rank,
        "world_size": len(logbook.peers),
        "pid": me.pid,
        "host": socket.gethostname(),
        "reason": why,
        "error": about,
        "time_ns": time.monotonic_ns(),
        "clock_ns": logbook.clock[0],
        "pg_config": {
            str(number): {
                "name": str(known.agreed),
                "desc": known.name,
                "ranks": str(list(known.ranks)),
            }
            for number, known in logbook.known.items()
        },
        "pg_status": {
            str(number): _status(entries, number) for number in logbook.known
        },
        "entries": entries,
        "stacks": stacks(),
    }


def _status(entries: list[dict[str, Any]], group: int) -> dict[str, int]:
    """The progress of a communicator's collectives on this rank.

    Calls on a device are counted apart, and are not among them.
    """
    mine = [
        e
        for e in entries
        if e["pg_id"] == group and not e["is_p2p"] and e["device"] is None
    ]

    def last(*states: str) -> int:
        return max(
            (e["collective_seq_id"] for e in mine if e["state"] in states), default=-1
        )

    return {
        "last_enqueued_collective": last(*STATES),
        "last_started_collective": last("started", "completed", "failed"),
        "last_completed_collective": last("completed"),
    }


def folder_for_records() -> str:
    """The folder for flight records, or an empty string."""
    return os.environ.get(FLIGHT_DIR, "")


def write(
    logbook: Logbook, folder: str, why: str, severity: int, about: dict[str, Any]
) -> Path:
    """Write the flight record of this rank, unless there is a more severe one."""
    file = Path(folder) / f"unisono-rank{logbook.rank}-{os.getpid()}.json"
    with _WRITING:
        if severity < logbook.written or severity == logbook.written == FAILED:
            return file
        Path(folder).mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{threading.get_ident()}")
        scratch.write_bytes(msgspec.json.encode(flight(logbook, why, about)))
        scratch.replace(file)
        logbook.written = severity
    return file


def dump_on_error(
    logbook: Logbook, name: str, error: Exception, call: str, *, on_device: bool
) -> None:
    """Write the flight record, if the user asked for it, and note it in the error.

    `call` describes the failed call, also if it was refused and has no record.
    """
    folder = folder_for_records()
    if not folder:
        return
    about = {
        "type": type(error).__name__,
        "communicator": name,
        "call": call,
        "on_device": on_device,
        **{
            key: getattr(error, key)
            for key in ("ranks", "collective", "seq", "calls")
            if getattr(error, key, None) is not None
        },
    }
    why = f"{name}: {type(error).__name__}: {error}"
    try:
        file = write(logbook, folder, why, FAILED, about)
        error.add_note(f"the last calls of this rank are in {file}")
    except OSError as wrong:
        error.add_note(f"the flight recorder could not be written: {wrong}")
