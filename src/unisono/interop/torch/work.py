"""Work in flight as torch wants to see it: waited for, asked, or turned into a future.

A future is completed by a thread of its group, which sleeps until the work is done.
What waits for the future then runs on yet another thread: it may itself make calls and
wait for them, and nothing else may be held up by that.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from unisono.errors import CollectiveTimeout, UnisonoError
from unisono.interop.torch.dynamo import leave_out
from unisono.interop.torch.errors import for_torch, text_for_future
from unisono.runtime.call.work import Work as Part
from unisono.service_threads import ServiceThread

_LOG = logging.getLogger("unisono")
_NO_LIMIT = timedelta(0)
_AT_END_S = 1.0


class PendingCall(dist.Work):
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
        self._settled = not parts and finish is None
        self._future: Any = None

    def __del__(self) -> None:
        """A call goes on without its handle: its results still come home.

        Its tensors are kept by the communicator, so without that nothing is to be done.
        """
        if self._finish is None or self._completer is None:
            return
        if self.is_completed() or sys.is_finalizing():
            return
        twin = PendingCall(self._outputs, self._parts, self._finish)
        self._completer.add(twin, None)

    def settle(self) -> None:
        """After all parts have ended: bring results home, once; note what failed."""
        with self._lock:  # who comes second returns when all is home
            if self._settled:
                return
            try:
                for part in self._parts:
                    part.wait()
                self._noted()
                if self._finish is not None:
                    self._finish()
            except BaseException as error:
                self._error = for_torch(error)
            self._parts, self._finish, self._settled = (), None, True

    def _noted(self) -> None:
        """Remember what the parts know."""

    def rest(self) -> None:
        """Sleep until all parts have ended."""
        for part in self._parts:
            part.rest()

    @property
    def parts(self) -> Sequence[Part]:
        """Calls of the engine that may be in flight."""
        return self._parts

    # --- what the adapter in C++ asks

    def native_parts(self) -> list[Any]:
        """What is, or was, in flight; nothing if it was done at once or is settled."""
        return [part.native for part in self._parts if part.native is not None]

    def stream_place(self) -> tuple[int, int] | None:
        """Which stream it is on, as torch numbers them and their devices, if any."""
        return None

    def plain(self) -> bool:
        """Whether nothing is left to do once its parts have ended well."""
        return bool(self._parts) and self._finish is None

    def failure(self) -> str | None:
        """After all parts have ended: what went wrong, with the name of the error."""
        self.settle()
        error = self._error
        return None if error is None else text_for_future(error)

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
        if not self._settled:
            self.settle()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; then its results are home."""
        if not all(part.done() for part in self._parts):
            return False
        if self._finish is not None:
            self.settle()
        return True

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """What went wrong, if anything did."""
        if self._error is None:
            for part in self._parts:
                if (error := part.exception()) is not None:
                    return for_torch(error)
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
        source = self._parts[0].source if self._parts else None
        return getattr(self, "_source", -1) if source is None else source

    def get_future(self) -> Any:
        """A future whose value is the tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            raw = self._new_future()
            # An error set on a future is a value like others to C++; one that is raised
            # by a callback is an error there, too.
            self._future = raw.then(lambda done: done.wait())
        if self._completer is None or self.is_completed():
            self.complete(raw)
        else:
            self._completer.add(self, raw)
        return self._future

    def _new_future(self) -> Any:
        return torch.futures.Future()

    def complete(self, raw: Any) -> None:
        """Give the future, if there is one, its value or its error."""
        if not self._settled:
            self.settle()
        if raw is None:
            return
        if self._error is not None:
            text_for_future(self._error)  # which torch writes, as it passes it on
            raw.set_exception(self._error)
        else:
            raw.set_result(self._outputs)


class CompletedWork(PendingCall):
    """A call that was done when it returned."""

    _parts, _finish, _completer = (), None, None
    _error, _future, _settled = None, None, True
    _lock = threading.Lock()  # held for a moment, to make a future

    def __init__(self, outputs: Any) -> None:
        """Only the result is its own."""
        dist.Work.__init__(self)
        self._outputs = outputs

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Nothing to wait for."""
        return True


class AnySourceRecv(PendingCall):
    """A message from any rank, which is known when it has arrived."""

    def _noted(self) -> None:
        """Remember the sender."""
        self._source = self._parts[0].source


class Completer:
    """Completes the futures of one group, in the order in which they were asked for."""

    def __init__(self) -> None:
        """The threads are started when the first future is asked for."""
        self._waiting: queue.SimpleQueue[tuple[PendingCall, Any] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, work: PendingCall, raw: Any) -> None:
        """Complete `raw` when `work` is done."""
        with self._lock:
            if self._thread is None:
                self._thread = ServiceThread(
                    target=self._run, name="unisono-futures", daemon=True
                )
                self._thread.start()
        self._waiting.put((work, raw))

    def close(self) -> None:
        """No more futures."""
        self._waiting.put(None)

    def _run(self) -> None:
        while self._completed_one():
            pass

    def _completed_one(self) -> bool:
        # A function of its own: who sleeps holds no tensors.
        item = self._waiting.get()
        if item is None:
            return False
        work, raw = item
        work.rest()
        _CALLBACKS.run(partial(work.complete, raw))
        return True


class _Callbacks:
    """Threads for what waits for futures: a new one whenever none is idle."""

    def __init__(self) -> None:
        self._begin()
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0
        self._busy = 0
        self._ended = False
        self._lock = threading.Lock()

    def run(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._ended:
                return
            self._busy += 1
            if self._idle > 0:
                self._idle -= 1
            else:
                ServiceThread(
                    target=self._work, name="unisono-callback", daemon=True
                ).start()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:
                _LOG.exception("a callback of a future failed")
            del job  # an idle thread holds no tensors
            with self._lock:
                self._idle += 1
                self._busy -= 1

    def _end(self) -> None:
        """A thread that is within torch when the interpreter ends would crash.

        Groups are closed after this, and what was in flight ends then: no callback
        runs.
        """
        with self._lock:
            self._ended = True
        deadline = time.monotonic() + _AT_END_S
        while self._busy and time.monotonic() < deadline:
            time.sleep(1e-3)


_CALLBACKS = _Callbacks()

leave_out(PendingCall, CompletedWork, AnySourceRecv)
