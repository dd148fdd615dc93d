"""The errors that calls of one communicator raise, and the warning of a dropped Work.

The native core's failure code becomes an error that names ranks, and the flight record
is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from unisono import _native
from unisono.errors import BadArgument, DroppedWork, UnisonoError
from unisono.runtime.call.work import Work
from unisono.runtime.observe.failures import (
    DEVICE_CALL,
    FailureCode,
    describe,
    error_for,
)
from unisono.runtime.observe.recorder import dump_on_error, note_on_device
from unisono.runtime.observe.subject import ObservedCore
from unisono.runtime.observe.threads import name_threads


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
    awaited = core.native.awaited()
    return _error(
        core, failure, call, seq, limit, awaited, words, refused=bool(refused)
    )


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


def warn_of_dropped(core: ObservedCore, work: Work) -> None:
    """The handle of a call was dropped that nobody has waited for: warn.

    Not if the communicator failed or is closed: then the program knows that its calls
    have ended, or an error has it abandon them. A finalizer calls this: where the
    warning is an error, Python reports it and continues.
    """
    native = work.native
    if core.closed or core.native.failure()[0] != FailureCode.NONE:
        return
    call = work.call if native is None else describe(native.note())
    warnings.warn(
        f"{call} on rank {core.rank} of {core.name!r}: its Work was dropped without "
        "wait(). The call continues, but its arrays must not be used before it is "
        "done: keep the Work that async_op=True returns, and call wait()",
        DroppedWork,
        stacklevel=4,  # above Work.__del__: whoever dropped it
        source=work,
    )


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
    *,
    refused: bool = False,
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
    name_threads(core, error, refused=refused)
    on_device = bool(failure[3] & DEVICE_CALL)
    dump_on_error(
        core.session.logbook, core.name, error, words or call, on_device=on_device
    )
    return error
