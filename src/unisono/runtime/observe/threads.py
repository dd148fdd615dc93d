"""The threads of this rank that make calls on one communicator at the same time.

Ranks must make their calls in the same order, which several threads do not keep. So an
error that this can cause names them. Nothing is recorded for it as calls are made: the
stacks of the threads and the calls in flight are read when there is an error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

from unisono.errors import CollectiveMismatch, CollectiveTimeout, UnisonoError
from unisono.runtime.call.notes import Note
from unisono.runtime.observe.subject import ObservedCore
from unisono.runtime.plan.plans import CODES

_MESSAGES = "send", "recv"
_NAMES = list(CODES)
_CALLS = {"run", "start", *CODES} - {*_MESSAGES}
_WHERE = "unisono.runtime.communicator", "unisono.runtime.core"


def name_threads(core: ObservedCore, error: UnisonoError, *, refused: bool) -> None:
    """Add to an error that calls came from several threads, if they did.

    A call that is refused has not caused the failure: its thread is not counted.
    """
    if not isinstance(error, CollectiveMismatch | CollectiveTimeout):
        return
    found = core.in_flight.failed_in
    if not refused:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident in {*_in_collectives(core), *_of_calls_in_flight(core)} - {*found}:
            found[ident] = names.get(ident, f"thread {ident}")
    if len(found) < 2:
        return
    who = ", ".join(sorted(found.values()))
    error.args = (
        f"{error}. Several threads of rank {core.rank} made calls at the same time "
        f"({who}): their order differs from run to run; give each thread a "
        "communicator of its own, made by comm.duplicate()",
    )


def _in_collectives(core: ObservedCore) -> Iterator[int]:
    """The threads that are within a collective of this communicator."""
    for ident, frame in sys._current_frames().items():
        here: FrameType | None = frame
        while here is not None:
            if here.f_code.co_name in _CALLS and here.f_globals["__name__"] in _WHERE:
                owner = here.f_locals.get("self")
                if core in (owner, getattr(owner, "core", None)):
                    yield ident
                    break
            here = here.f_back


def _of_calls_in_flight(core: ObservedCore) -> Iterator[int]:
    """The threads that started collectives that have not succeeded."""
    for work, ident in core.in_flight.unfinished():
        if _NAMES[Note(*work.note()).collective] not in _MESSAGES:
            yield ident
