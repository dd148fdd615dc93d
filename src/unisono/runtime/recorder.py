"""The flight recorder: the last 2,000 calls of a rank, always on, dumped on error.

The native core writes the records; here they become dictionaries with the field names
that PyTorch's tools know. UNISONO_DUMP_DIR names a folder for dumps on error; without
it nothing is written.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import msgspec

from unisono.dtypes import DTYPES, OPS
from unisono.runtime.plans import CODES, ENCODED, LABELLED
from unisono.transports.base import Transport

DUMP_DIR = "UNISONO_DUMP_DIR"
_NAMES = list(CODES)
_DTYPES = list(DTYPES)
_STATES = ("scheduled", "started", "completed", "failed")


def records(transport: Transport) -> list[dict[str, Any]]:
    """The records of this rank, the oldest first."""
    found = []
    for record in transport.engine.records():
        number, communicator, note, created, begun, ended, state, *more = record
        peer, tag, encoded, decoded = more
        seq, collective, dtype, op, root, count, algorithm = note
        algorithm, _, label = algorithm.partition(LABELLED)
        algorithm, _, codec = algorithm.partition(ENCODED)
        found.append(
            {
                "record_id": number,
                "pg_id": communicator,
                "collective_seq_id": seq,
                "profiling_name": _NAMES[collective],
                "algorithm": algorithm,
                "codec": codec,
                "label": label,
                "op": OPS[op],
                "root": root,
                "input_dtypes": [_DTYPES[dtype]],
                "input_sizes": [[count]],
                "peer": None if peer < 0 else peer,
                "tag": tag,
                "encoded_bytes": encoded,
                "decoded_bytes": decoded,
                "state": _STATES[state],
                "time_created_ns": created,
                "time_discovered_started_ns": begun or None,
                "time_discovered_completed_ns": ended or None,
            }
        )
    return found


def dump(transport: Transport, path: Path, why: str) -> None:
    """Write the records of this rank as JSON."""
    me = transport.peers[transport.rank]
    told = {
        "version": "unisono-1",
        "rank": me.rank,
        "pid": me.pid,
        "host": socket.gethostname(),
        "reason": why,
        "entries": records(transport),
    }
    path.write_bytes(msgspec.json.encode(told))


def dump_on_error(transport: Transport, name: str, error: Exception) -> None:
    """Write the records where the user asked for them; say so in the error."""
    folder = os.environ.get(DUMP_DIR)
    if not folder:
        return
    file = Path(folder) / f"unisono-rank{transport.rank}-{os.getpid()}.json"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        dump(transport, file, f"{name}: {type(error).__name__}: {error}")
        error.add_note(f"the last calls of this rank are in {file}")
    except OSError as why:
        error.add_note(f"the flight recorder could not be written: {why}")
