"""The errors that calls of one communicator raise.

The engine's failure code is one word; here it becomes an error that names ranks, and
the flight record is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono import _native
from unisono.errors import BadArgument, UnisonoError
from unisono.runtime.observe.failures import Trouble, describe
from unisono.runtime.observe.failures import failure as error_of
from unisono.runtime.observe.recorder import dump_on_error
from unisono.runtime.observe.subject import Subject


def error_of_call(
    core: Subject,
    timeout_s: float | None = None,
    refused: str = "",
    words: str = "",
) -> UnisonoError:
    """What the verdict means, for the latest call or one refused because of it.

    `words` tell more of what was refused, for the flight record.
    """
    seq = core.native.seq() + bool(refused)
    notes = [n for n in core.native.states()[core.rank][1:3] if n[0] == seq]
    call = refused or (describe(notes[0]) if notes else "a call")
    verdict = core.native.failure()
    limit = core.exceeded_s if refused else limit_of(core, timeout_s, seq)
    return _error(core, verdict, call, seq, limit, core.native.awaited(), words)


def error_of_work(
    core: Subject, work: _native.Work, timeout_s: float | None
) -> UnisonoError:
    """What went wrong with a call in flight."""
    verdict = work.failure()
    call = describe(work.note())
    if verdict[0] == Trouble.MISFIT:
        sent, source = work.message_bytes(), work.source()
        return BadArgument(
            f"{call}: the message of {core.peers[source]} has {sent} bytes or "
            "another element type; receive it into an array that fits"
        )
    limit = limit_of(core, timeout_s, work.seq())
    return _error(core, verdict, call, work.seq(), limit, work.awaited())


def limit_of(core: Subject, timeout_s: float | None, seq: int) -> float:
    """How long a call was given; remembered if the communicator broke by it."""
    limit = core.timeout_s if timeout_s is None else timeout_s
    trouble, _, reporter, broken_at = core.native.failure()
    is_mine = reporter == core.rank and broken_at == seq & 0xFFFFFFFF
    if trouble == Trouble.TIMEOUT and is_mine:
        core.exceeded_s = limit
    return limit


def _error(
    core: Subject,
    verdict: tuple[int, int, int, int],
    call: str,
    seq: int,
    limit: float,
    awaited: Sequence[int],
    words: str = "",
) -> UnisonoError:
    core.transport.failed = True
    error = error_of(
        core.native,
        core.peers,
        verdict,
        call=call,
        seq=seq,
        timeout_s=limit,
        awaited=awaited,
        rank=core.rank,
    )
    dump_on_error(core.transport.logbook, core.name, error, words or call)
    return error
