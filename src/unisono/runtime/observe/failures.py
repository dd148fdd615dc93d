"""Errors that name ranks, made from the native core's failure codes."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono import _native
from unisono.dtypes import DTYPES, OPS
from unisono.errors import (
    BadArgument,
    CollectiveMismatch,
    CollectiveTimeout,
    Corrupted,
    PeerLost,
    TransportError,
    UnisonoError,
)
from unisono.runtime.call.notes import Note, shape_text
from unisono.runtime.observe.recorder import FLIGHT_DIR, is_monitored
from unisono.runtime.plan.plans import CODES
from unisono.schedule.collective import REDUCING, ROOTED
from unisono.transports.session import Peer

if TYPE_CHECKING:
    from unisono._native import Comm
    from unisono._native import Note as NativeNote
    from unisono.runtime.call.arguments import Call

Failure = tuple[int, int, int, int]
"""A failure code, the rank that failed, the rank that reports it, and a seq."""

DEVICE_CALL = _native.DEVICE_CALL
"""A bit of the seq: that of a call on a device, which are counted apart."""
ON_DEVICE = "on CUDA arrays"
"""How such calls are told from others."""
_DYING_S = 1.0
_NAMES = list(CODES)
_DTYPES = list(DTYPES)
_MOMENT_S = 1.0
_NAMES_S = 0.2


class FailureCode(enum.IntEnum):
    """Why a call failed; the same numbers as in the native core."""

    NONE = 0
    PEER_LOST = 1
    LEFT = 2
    INTERRUPTED = 3
    TIMEOUT = 4
    MISMATCH = 5
    MISFIT = 6
    STARVED = 7
    CUT = 8
    UNREACHABLE = 9
    CORRUPTED = 10
    SEVERED = 11


def describe(native_note: NativeNote) -> str:
    """A call as in "all_reduce(float32 x 1024, sum) by ring"; or float32[32, 32]."""
    note = Note(*native_note)
    name, names = _nth(_NAMES, note.collective), note.names
    about = [] if name == "barrier" else [_elements(note, names.shape)]
    if name in REDUCING:
        about.append(_nth(OPS, note.op))
    if name in ROOTED:
        about.append(f"root {note.root}")
    by = f" by {names.algorithm}" if names.algorithm else ""
    by += f" in {names.codec}" if names.codec else ""
    by += f" for {names.label}" if names.label else ""
    return f"{name}({', '.join(about)}){by}"


def _elements(note: Note, shape: str) -> str:
    dtype = _nth(_DTYPES, note.dtype)
    return f"{dtype}{shape}" if "," in shape else f"{dtype} × {note.elements}"


def _nth(words: Sequence[str], number: int) -> str:
    """A name by its number, which may come from another host and be invalid."""
    return words[number] if number < len(words) else "?"


def describe_call(call: Call, op: str) -> str:
    """The description of a call that was refused before an algorithm was chosen."""
    number, op_number = CODES[call.collective], OPS.index(op)
    what = 0, number, call.dtype.code, op_number, call.root, call.total
    return describe((*what, 0, 0, "", "", "", shape_text(call.shape)))


def describe_on_device(call: Call, op: str) -> str:
    """The same of a call on an array of a device."""
    return f"{describe_call(call, op)} {ON_DEVICE}"


def error_for(
    comm: Comm,
    peers: Sequence[Peer],
    failure: Failure,
    *,
    call: str,
    seq: int,
    timeout_s: float,
    awaited: Sequence[int] = (),
    rank: int = -1,
) -> UnisonoError:
    """The error for a failure; `call` is this rank's call."""
    number, failed_rank, reporter, seq_there = failure
    code = FailureCode(number)
    who = peers[failed_rank]
    where = f"{call} (seq {seq})"
    if seq_there & DEVICE_CALL:
        seq = seq_there & ~DEVICE_CALL
        where = f"{call} {ON_DEVICE} (call {seq} there)"
        if code is FailureCode.TIMEOUT:
            return _device_timeout(
                peers, failed_rank, reporter, where, call, seq, timeout_s
            )
    if code is FailureCode.MISMATCH:
        return _mismatch(comm, peers, failed_rank, reporter, seq_there)
    if code is FailureCode.TIMEOUT:
        return _timeout(
            comm, peers, failed_rank, reporter, where, call, seq, timeout_s, awaited
        )
    if code in (FailureCode.MISFIT, FailureCode.CUT, FailureCode.STARVED):
        return _resource_error(code, where, who)
    if code is FailureCode.CORRUPTED:
        return Corrupted(
            f"{where}: data from {who} arrived corrupted at {peers[reporter]}: its "
            "checksum or authentication tag is wrong; check the network between them"
        )
    if code is FailureCode.UNREACHABLE and not _is_dying(comm, failed_rank):
        return TransportError(
            f"{where}: the system denies {peers[reporter]} access to the memory of "
            f"{who}; UNISONO_SINGLE_COPY=0 avoids this access"
        )
    how = _how_lost(code, failed_rank, reporter, rank, peers)
    return PeerLost(
        f"{where}: {who} {how}; the communicator can no longer be used",
        ranks=[failed_rank],
        pids=[who.pid],
        host=who.host,
        collective=call.partition("(")[0],
        seq=seq,
    )


def _resource_error(code: FailureCode, where: str, who: Peer) -> UnisonoError:
    """A message that does not fit or was cut, or a rank without memory."""
    if code is FailureCode.MISFIT:
        return BadArgument(f"{where}: the message of {who} does not fit the buffer")
    if code is FailureCode.CUT:
        return TransportError(
            f"{where}: {who} aborted a message after sending part of it, and "
            "cannot send on this communicator any more; use another one"
        )
    return TransportError(
        f"{where}: {who} ran out of memory or of file descriptors (ulimit -n)"
    )


def _how_lost(
    code: FailureCode, failed_rank: int, reporter: int, rank: int, peers: Sequence[Peer]
) -> str:
    """What became of a rank, as the end of a sentence about it."""
    if code is FailureCode.SEVERED and failed_rank == reporter:
        return "aborted the communicator"
    if code is FailureCode.PEER_LOST and failed_rank == rank:
        return (
            "is this rank: the others received no heartbeat from it for too long "
            "(UNISONO_SILENCE_S) and marked it dead"
        )
    return {
        FailureCode.PEER_LOST: "died",
        FailureCode.UNREACHABLE: "died",
        FailureCode.LEFT: "closed its communicator",
        FailureCode.INTERRUPTED: "was interrupted",
        FailureCode.SEVERED: f"cannot be reached any more by {peers[reporter]}",
    }.get(code, "failed")


def _is_dying(comm: Comm, rank: int) -> bool:
    """Whether a rank whose memory is denied turns out to be dead.

    The memory of a killed process is freed a little before the process has exited.
    """
    until = time.monotonic() + _DYING_S
    while not comm.states()[rank][-1]:
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _mismatch(
    comm: Comm, peers: Sequence[Peer], failed_rank: int, reporter: int, seq: int
) -> CollectiveMismatch:
    calls: dict[int, str] = {}
    notes = []
    for rank in sorted({failed_rank, reporter}):
        note = _note_of(comm, rank, seq)
        calls[rank] = describe(note) if note else "another collective"
        notes += [Note(*note)] if note else []
    text = "; ".join(f"{peers[r]} called {c}" for r, c in calls.items())
    number = seq & ~DEVICE_CALL
    which = f"call {number} {ON_DEVICE}" if seq & DEVICE_CALL else f"call {number}"
    return CollectiveMismatch(
        f"{which} differs between ranks: {text}. {_advice(notes, calls)}",
        calls=calls,
        seq=number,
    )


def _advice(notes: Sequence[Note], calls: dict[int, str]) -> str:
    """What to do about a mismatch; also where the two descriptions are equal."""
    if len(notes) == 2 and len(set(calls.values())) == 1:
        one, other = notes
        if one.content != other.content:
            return (
                f"The steps of {one.names.algorithm} are not the same there: give all "
                "ranks the same file, or the same version of the package it is from"
            )
        return (
            "The difference is too long to be shown: the ranks' numbers of elements, "
            "or the middle of a name"
        )
    return "All ranks of a communicator must make the same calls in the same order"


def _note_of(comm: Comm, rank: int, seq: int) -> NativeNote | None:
    """A rank's call; that of another host may still have to arrive.

    Of a call on a device the rank itself adds the names, if no graph has made it.
    """
    begun = time.monotonic()
    while True:
        state = comm.states()[rank]
        waited = time.monotonic() - begun
        for note in (state[6], *state[1:3]):
            if note[0] and note[0] & 0xFFFFFFFF == seq:
                named = Note(*note).algorithm or not seq & DEVICE_CALL
                if named or waited > _NAMES_S:
                    return note
        if waited > _MOMENT_S:
            return None
        time.sleep(1e-3)


def late_hint() -> str:
    """What the warning of a late rank ends with."""
    return f"; see unisono trace why {os.getpid()}" if is_monitored() else ""


def _who_knows_more() -> str:
    """What to run to see why a rank is late."""
    if folder := os.environ.get(FLIGHT_DIR):
        return f" (unisono trace why {folder} names the cause)"
    if is_monitored():
        return f" (while ranks run, unisono trace why {os.getpid()} names the cause)"
    return f" ({FLIGHT_DIR}=folder keeps records for unisono trace why)"


def _device_timeout(
    peers: Sequence[Peer],
    failed_rank: int,
    reporter: int,
    where: str,
    call: str,
    seq: int,
    timeout_s: float,
) -> CollectiveTimeout:
    """A kernel has waited too long; it knows one rank that it waited for."""
    limit = "" if timeout_s < 0 else f" within {timeout_s:g} s"
    return CollectiveTimeout(
        f"{where}: not completed{limit}; the kernel of {peers[reporter]} timed out "
        f"waiting for {peers[failed_rank]}{_who_knows_more()}",
        ranks=[failed_rank],
        collective=call.partition("(")[0],
        seq=seq,
    )


def _timeout(
    comm: Comm,
    peers: Sequence[Peer],
    failed_rank: int,
    reporter: int,
    where: str,
    call: str,
    seq: int,
    timeout_s: float,
    awaited: Sequence[int],
) -> CollectiveTimeout:
    late = list(awaited) or [failed_rank]
    states = comm.states()
    seen = []
    for rank in late:
        arrived, one, other, *_ = states[rank]
        last = one if one[0] == arrived else other
        doing = f"last seen at seq {arrived}" if arrived else "never seen"
        seen.append(
            f"{peers[rank]}, {doing}" + (f" in {describe(last)}" * bool(arrived))
        )
    limit = "" if timeout_s < 0 else f" within {timeout_s:g} s"
    return CollectiveTimeout(
        f"{where}: not completed{limit}; {peers[reporter]} timed out waiting for "
        + "; ".join(seen)
        + _who_knows_more(),
        ranks=late,
        collective=call.partition("(")[0],
        seq=seq,
    )
