"""A wait that takes longer than two seconds says what it waits for."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from unisono.service_threads import ServiceThread

NOTICE_S = 2.0


@contextlib.contextmanager
def noticed(what: Callable[[], str]) -> Iterator[None]:
    """A context that waits; after two seconds `what()` is on standard error, once.

    As long as it is empty nothing is waited for.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(NOTICE_S):
            if text := what():
                _tell(text)
                return

    watcher = ServiceThread(target=watch, name="unisono-notice", daemon=True)
    try:
        watcher.start()
    except OSError:  # no thread can be started: the wait is not to fail for that
        yield
        return
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _tell(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed: nobody reads it
        if sys.stderr is not None:
            print(f"unisono: {text}", file=sys.stderr, flush=True)  # noqa: T201


def ranks_named(ranks: list[int]) -> str:
    """As in "rank 3" or "ranks 3, 5"; of very many the first and how many."""
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"ranks {shown}{more}" if len(ranks) > 1 else f"rank {shown}"


_MOST_NAMED = 16
