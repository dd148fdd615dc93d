"""Switching the recording on and off, and bringing the parts of all ranks together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from unisono.errors import BadArgument
from unisono.runtime.communicator import Communicator
from unisono.runtime.observe import tracing
from unisono.runtime.world.clocks import compare_clocks
from unisono.runtime.world.first import open_sessions
from unisono.trace.document import Document, merge, write
from unisono.transports.session import Session


def start() -> None:
    """Record from now on what the ranks of this process do."""
    for session in _here():
        tracing.start(session.logbook)


def stop() -> None:
    """Record no more, until it is started again; what there is stays."""
    for session in _here():
        tracing.stop(session.logbook)


def _here() -> list[Session]:
    sessions = [s for s in open_sessions() if not s.engine.forked()]
    if not sessions:
        raise BadArgument(
            "trace: no communicator is open here; call unisono.init first"
        )
    return sessions


@contextmanager
def span(name: str, category: str = "user_annotation") -> Iterator[None]:
    """A range of your own, shown next to the calls. It is kept while a trace is on."""
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        if any(session.engine.is_tracing() for session in open_sessions()):
            end, thread = time.monotonic_ns(), threading.current_thread().name
            tracing.add_span(tracing.Span(name, begin, end, thread, category))


def gather(comm: Communicator, root: int = 0) -> Document | None:
    """Bring what all ranks have recorded to one of them, over the job's connections.

    All ranks of `comm` call it. The document is rank `root`'s; the others get None.
    """
    part = msgspec.msgpack.encode(tracing.harvest(comm.core.session.logbook))
    parts = comm.gather_objects(part, root=root)
    if parts is None:
        return None
    return merge([msgspec.msgpack.decode(p, type=tracing.TracePart) for p in parts])


@contextmanager
def recording(comm: Communicator, path: str | Path) -> Iterator[None]:
    """Record what happens inside, and have rank 0 write one file for all ranks.

    All ranks of `comm` enter and leave it together. If one leaves it by an error there
    is no file. Calls of `comm` on a device are waited for at the end.
    """
    if len(set(comm.hosts)) > 1:
        compare_clocks(comm)
    tracing.start(comm.core.session.logbook)
    try:
        yield
        comm.synchronize()
    finally:
        tracing.stop(comm.core.session.logbook)
    doc = gather(comm)
    if doc is not None:
        write(doc, Path(path))
