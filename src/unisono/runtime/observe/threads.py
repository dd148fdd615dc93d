"""The threads of this rank that make calls on one communicator at the same time.

Ranks must make their calls in the same order, which several threads do not keep. So an
error that this can cause names them: those that wait in a call or whose call has
failed, as the native core knows them, and those that started calls in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from unisono.errors import CollectiveMismatch, CollectiveTimeout, UnisonoError
from unisono.runtime.call.notes import Note
from unisono.runtime.observe.subject import ObservedCore
from unisono.runtime.plan.plans import CODES

_MESSAGES = "send", "recv"
_NAMES = list(CODES)


def name_threads(core: ObservedCore, error: UnisonoError, *, refused: bool) -> None:
    """Add to an error that calls came from several threads, if they did.

    A call that is refused has not caused the failure: its thread is not counted.
    """
    if not isinstance(error, CollectiveMismatch | CollectiveTimeout):
        return
    found = core.in_flight.failed_in
    if not refused:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident in {*core.native.calling_threads(), *_of_calls_in_flight(core)}:
            found.setdefault(ident, names.get(ident, f"thread {ident}"))
    if len(found) < 2:
        return
    who = ", ".join(sorted(found.values()))
    error.args = (
        f"{error}. Several threads of rank {core.rank} made calls at the same time "
        f"({who}): their order differs from run to run; give each thread a "
        "communicator of its own, made by comm.duplicate()",
    )


def _of_calls_in_flight(core: ObservedCore) -> Iterator[int]:
    """The threads that started collectives that have not succeeded."""
    for work, ident in core.in_flight.unfinished():
        if _NAMES[Note(*work.note()).collective] not in _MESSAGES:
            yield ident
