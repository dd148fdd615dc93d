"""What went wrong, in words: the engine's verdicts made into errors that name ranks."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
from unisono.runtime.plan.plans import CODES
from unisono.transports.session import Peer

if TYPE_CHECKING:
    from unisono._native import Comm
    from unisono._native import Note as NativeNote
    from unisono.runtime.call.arguments import Call

Verdict = tuple[int, int, int, int]

_DYING_S = 1.0
_NAMES = list(CODES)
_DTYPES = list(DTYPES)
_MOMENT_S = 1.0
_REDUCING = ("reduce", "all_reduce", "reduce_scatter")
_ROOTED = ("broadcast", "scatter", "gather", "reduce")


class Trouble(enum.IntEnum):
    """Why a call failed; the native core counts likewise."""

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


def describe(told: NativeNote) -> str:
    """A call as in "all_reduce(float32 x 1024, sum) by ring"; or float32[32, 32]."""
    note = Note(*told)
    name, names = _nth(_NAMES, note.collective), note.names
    about = [] if name == "barrier" else [_elements(note, names.shape)]
    if name in _REDUCING:
        about.append(_nth(OPS, note.op))
    if name in _ROOTED:
        about.append(f"root {note.root}")
    by = f" by {names.algorithm}" if names.algorithm else ""
    by += f" in {names.codec}" if names.codec else ""
    by += f" for {names.label}" if names.label else ""
    return f"{name}({', '.join(about)}){by}"


def _elements(note: Note, shape: str) -> str:
    dtype = _nth(_DTYPES, note.dtype)
    return f"{dtype}{shape}" if "," in shape else f"{dtype} × {note.elements}"


def _nth(words: Sequence[str], number: int) -> str:
    """A word by its number, which may have come from another host."""
    return words[number] if number < len(words) else "?"


def in_words(call: Call, op: str) -> str:
    """The same of a call that was not made, before an algorithm was chosen."""
    number, place = CODES[call.collective], OPS.index(op)
    what = 0, number, call.dtype.code, place, call.root, call.total
    return describe((*what, 0, 0, "", "", "", shape_text(call.shape)))


def failure(
    comm: Comm,
    peers: Sequence[Peer],
    verdict: Verdict,
    *,
    call: str,
    seq: int,
    timeout_s: float,
    awaited: Sequence[int] = (),
    rank: int = -1,
) -> UnisonoError:
    """The error for a verdict; `call` is what this rank, `rank`, was doing."""
    kind, culprit, reporter, seq_there = verdict
    trouble = Trouble(kind)
    who = peers[culprit]
    where = f"{call} (seq {seq})"
    if trouble is Trouble.MISMATCH:
        return _mismatch(comm, peers, culprit, reporter, seq_there)
    if trouble is Trouble.TIMEOUT:
        return _timeout(
            comm, peers, culprit, reporter, where, call, seq, timeout_s, awaited
        )
    if trouble is Trouble.MISFIT:
        return BadArgument(f"{where}: the message of {who} does not fit the buffer")
    if trouble is Trouble.CUT:
        return TransportError(
            f"{where}: {who} gave up a message when it was half sent, and can send "
            "nothing more this way; use another communicator"
        )
    if trouble is Trouble.STARVED:
        return TransportError(
            f"{where}: {who} ran out of memory or of file descriptors (ulimit -n)"
        )
    if trouble is Trouble.CORRUPTED:
        return Corrupted(
            f"{where}: what {who} sent did not arrive at {peers[reporter]} as it was "
            "sent: its checksum or its seal is wrong; look at the network between them"
        )
    if trouble is Trouble.UNREACHABLE and not _is_dying(comm, culprit):
        return TransportError(
            f"{where}: the system refuses {peers[reporter]} the memory of {who}; "
            "UNISONO_SINGLE_COPY=0 goes without it"
        )
    how = _how_lost(trouble, culprit, reporter, rank, peers)
    return PeerLost(
        f"{where}: {who} {how}; the communicator can no longer be used",
        ranks=[culprit],
        pids=[who.pid],
        host=who.host,
        collective=call.partition("(")[0],
        seq=seq,
    )


def _how_lost(
    trouble: Trouble, culprit: int, reporter: int, rank: int, peers: Sequence[Peer]
) -> str:
    """What became of a rank, as the end of a sentence about it."""
    if trouble is Trouble.SEVERED and culprit == reporter:
        return "aborted the communicator"
    if trouble is Trouble.PEER_LOST and culprit == rank:
        return "is this rank: the others heard nothing of it for long, and gave it up"
    return {
        Trouble.PEER_LOST: "died",
        Trouble.UNREACHABLE: "died",
        Trouble.LEFT: "closed its communicator",
        Trouble.INTERRUPTED: "was interrupted",
        Trouble.SEVERED: f"cannot be reached any more by {peers[reporter]}",
    }.get(trouble, "failed")


def _is_dying(comm: Comm, rank: int) -> bool:
    """Whether a rank whose memory is refused is about to be known as dead.

    The memory of a process that is killed goes a little before the process itself.
    """
    until = time.monotonic() + _DYING_S
    while not comm.states()[rank][-1]:
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _mismatch(
    comm: Comm, peers: Sequence[Peer], culprit: int, reporter: int, seq: int
) -> CollectiveMismatch:
    calls: dict[int, str] = {}
    notes = []
    for rank in sorted({culprit, reporter}):
        note = _note_of(comm, rank, seq)
        calls[rank] = describe(note) if note else "something else"
        notes += [Note(*note)] if note else []
    told = "; ".join(f"{peers[r]} called {c}" for r, c in calls.items())
    return CollectiveMismatch(
        f"call {seq} differs between ranks: {told}. {_advice(notes, calls)}",
        calls=calls,
        seq=seq,
    )


def _advice(notes: Sequence[Note], calls: dict[int, str]) -> str:
    """What to do about it; also where the two calls look the same."""
    if len(notes) == 2 and len(set(calls.values())) == 1:
        one, other = notes
        if one.content != other.content:
            return (
                f"The steps of {one.names.algorithm} are not the same there: give all "
                "ranks the same file, or the same version of the package it is from"
            )
        return (
            "What differs is too long to be told here: how many elements each rank "
            "has, or the middle of a name"
        )
    return "All ranks of a communicator must make the same calls in the same order"


def _note_of(comm: Comm, rank: int, seq: int) -> NativeNote | None:
    """What a rank called; one of another host may still have to tell."""
    until = time.monotonic() + _MOMENT_S
    while True:
        state = comm.states()[rank]
        for note in (state[6], *state[1:3]):
            if note[0] and note[0] & 0xFFFFFFFF == seq:
                return note
        if time.monotonic() > until:
            return None
        time.sleep(1e-3)


def _timeout(
    comm: Comm,
    peers: Sequence[Peer],
    culprit: int,
    reporter: int,
    where: str,
    call: str,
    seq: int,
    timeout_s: float,
    awaited: Sequence[int],
) -> CollectiveTimeout:
    late = list(awaited) or [culprit]
    states = comm.states()
    told = []
    for rank in late:
        arrived, one, other, *_ = states[rank]
        last = one if one[0] == arrived else other
        doing = f"last seen at seq {arrived}" if arrived else "never seen"
        told.append(
            f"{peers[rank]}, {doing}" + (f" in {describe(last)}" * bool(arrived))
        )
    gave_up = "" if timeout_s < 0 else f" within {timeout_s:g} s"
    return CollectiveTimeout(
        f"{where}: not completed{gave_up}; {peers[reporter]} gave up waiting for "
        + "; ".join(told),
        ranks=late,
        collective=call.partition("(")[0],
        seq=seq,
    )
