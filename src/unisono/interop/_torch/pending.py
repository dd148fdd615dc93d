"""Work in flight as torch wants to see it: waited for, asked, or turned into a future.

A future is completed by a thread of its group, which sleeps until the work is done.
What waits for the future then runs on yet another thread: it may itself make calls and
wait for them, and nothing else may be held up by that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from unisono.errors import CollectiveTimeout, UnisonoError
from unisono.runtime.work import Work as Part

_NO_LIMIT = timedelta(0)


def for_torch(error: BaseException) -> BaseException:
    """The same error, which is torch's DistBackendError as well."""
    if not isinstance(error, UnisonoError) or isinstance(error, RuntimeError):
        return error
    text = str(error)
    if isinstance(error, CollectiveTimeout):
        text = f"{error.collective or 'a call'} Timed out waiting: {text}"
    error.args = (text,)
    found: BaseException = error
    found.__class__ = _both(type(error))
    return found


_BOTH: dict[type[BaseException], type[BaseException]] = {}


def _both(kind: type[BaseException]) -> type[BaseException]:
    if kind not in _BOTH:
        own = {"__module__": kind.__module__}
        _BOTH[kind] = type(kind.__name__, (kind, dist.DistBackendError), own)
    return _BOTH[kind]


class Pending(dist.Work):
    """Calls of the engine that are one call of torch's, and what comes after."""

    def __init__(
        self,
        outputs: Any,
        parts: Sequence[Part] = (),
        finish: Callable[[], None] | None = None,
        completer: Completer | None = None,
    ) -> None:
        """Without `parts` it is done."""
        super().__init__()
        self._outputs = outputs
        self._parts = parts
        self._finish = finish
        self._completer = completer
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._future: Any = None

    def settle(self) -> None:
        """After all parts have ended: bring results home, once; note what failed."""
        with self._lock:
            parts, self._parts = self._parts, ()
            finish, self._finish = self._finish, None
            try:
                for part in parts:
                    part.wait()
                if finish is not None:
                    finish()
            except BaseException as error:
                self._error = for_torch(error)

    def rest(self) -> None:
        """Sleep until all parts have ended."""
        for part in self._parts:
            part.rest()

    # --- what torch asks

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block until it is done; raise what went wrong."""
        limit = timeout.total_seconds()
        try:
            for part in self._parts:
                part.wait(limit if limit > 0 else None)
        except CollectiveTimeout as error:
            if not all(part.done() for part in self._parts):
                raise for_torch(error) from None
        except UnisonoError:
            pass  # settled below
        if self._parts or self._finish is not None:
            self.settle()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return all(part.done() for part in self._parts)

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """What went wrong, if anything did."""
        if self._error is None:
            for part in self._parts:
                if (error := part.exception()) is not None:
                    return error
        return self._error

    def result(self) -> Any:
        """The tensors that hold the result."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait; on the CPU there is nothing else to it."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait; the CPU has no streams."""
        self.wait()

    def source_rank(self) -> int:
        """Who sent what was received."""
        return self._source_rank()

    def _source_rank(self) -> int:
        found = self._parts[0].source if self._parts else None
        return getattr(self, "_source", -1) if found is None else found

    def get_future(self) -> Any:
        """A future whose value is the tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            raw: Any = torch.futures.Future()
            # An error set on a future is a value like others to C++; one that is raised
            # by a callback is an error there, too.
            self._future = raw.then(lambda done: done.wait())
        if self._completer is None or self.is_completed():
            self.complete(raw)
        else:
            self._completer.add(self, raw)
        return self._future

    def complete(self, raw: Any) -> None:
        """Give the future its value, or its error."""
        if self._parts or self._finish is not None:
            self.settle()
        if self._error is not None:
            raw.set_exception(self._error)
        else:
            raw.set_result(self._outputs)


class Done(Pending):
    """A call that was done when it returned."""

    _parts, _finish, _completer = (), None, None
    _error = _future = None
    _lock = threading.Lock()  # held for a moment, to make a future

    def __init__(self, outputs: Any) -> None:
        """Only the result is its own."""
        dist.Work.__init__(self)
        self._outputs = outputs

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Nothing to wait for."""
        return True


class Received(Pending):
    """A message from anybody, who is known when it has come."""

    def settle(self) -> None:
        """Remember the sender."""
        parts = self._parts
        super().settle()
        self._source = parts[0].source if parts else -1


class Completer:
    """Completes the futures of one group, in the order in which they were asked for."""

    def __init__(self) -> None:
        """The threads are started when the first future is asked for."""
        self._waiting: queue.SimpleQueue[tuple[Pending, Any] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, work: Pending, raw: Any) -> None:
        """Complete `raw` when `work` is done."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="unisono-futures", daemon=True
                )
                self._thread.start()
        self._waiting.put((work, raw))

    def close(self) -> None:
        """No more futures."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            work, raw = item
            work.rest()
            _CALLBACKS.run(partial(work.complete, raw))


class _Callbacks:
    """Threads for what waits for futures: a new one whenever none is idle."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0
        self._lock = threading.Lock()

    def run(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                threading.Thread(
                    target=self._work, name="unisono-callback", daemon=True
                ).start()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1


_CALLBACKS = _Callbacks()
