"""The errors that calls of one communicator raise.

The native core's failure code becomes an error that names ranks, and the flight record
is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono import _native
from unisono.errors import BadArgument, UnisonoError
from unisono.runtime.observe.failures import (
    DEVICE_CALL,
    FailureCode,
    describe,
    error_for,
)
from unisono.runtime.observe.recorder import dump_on_error, note_on_device
from unisono.runtime.observe.subject import ObservedCore


def error_of_call(
    core: ObservedCore,
    timeout_s: float | None = None,
    refused: str = "",
    words: str = "",
) -> UnisonoError:
    """The error of the latest call, or of one refused because of an earlier failure.

    `words` describe the refused call, for the flight record. A call on a device fails
    when its caller has gone on: the error then names that call.
    """
    seq = core.native.seq() + bool(refused)
    notes = [n for n in core.native.states()[core.rank][1:3] if n[0] == seq]
    call = refused or (describe(notes[0]) if notes else "a call")
    failure = core.native.failure()
    if failure[3] & DEVICE_CALL:
        number = failure[3] & ~DEVICE_CALL
        noted = note_on_device(core.session.logbook, core.native.id(), number)
        call = call if noted is None else describe(noted)
    limit = core.exceeded_s if refused else limit_of(core, timeout_s, seq)
    return _error(core, failure, call, seq, limit, core.native.awaited(), words)


def error_of_work(
    core: ObservedCore, work: _native.Work, timeout_s: float | None
) -> UnisonoError:
    """The error of a call in flight."""
    failure = work.failure()
    call = describe(work.note())
    if failure[0] == FailureCode.MISFIT:
        sent, source = work.message_bytes(), work.source()
        return BadArgument(
            f"{call}: the message of {core.peers[source]} has {sent} bytes or "
            "another element type; receive it into an array that fits"
        )
    limit = limit_of(core, timeout_s, work.seq())
    return _error(core, failure, call, work.seq(), limit, work.awaited())


def limit_of(core: ObservedCore, timeout_s: float | None, seq: int) -> float:
    """A call's timeout; kept if it broke the communicator."""
    limit = core.timeout_s if timeout_s is None else timeout_s
    code, _, reporter, broken_at = core.native.failure()
    is_mine = reporter == core.rank and broken_at == seq & 0xFFFFFFFF
    if code == FailureCode.TIMEOUT and is_mine:
        core.exceeded_s = limit
    return limit


def _error(
    core: ObservedCore,
    failure: tuple[int, int, int, int],
    call: str,
    seq: int,
    limit: float,
    awaited: Sequence[int],
    words: str = "",
) -> UnisonoError:
    core.session.failed = True
    error = error_for(
        core.native,
        core.peers,
        failure,
        call=call,
        seq=seq,
        timeout_s=limit,
        awaited=awaited,
        rank=core.rank,
    )
    on_device = bool(failure[3] & DEVICE_CALL)
    dump_on_error(
        core.session.logbook, core.name, error, words or call, on_device=on_device
    )
    return error
