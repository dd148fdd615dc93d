"""The handle of a call in flight."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from unisono.errors import CollectiveTimeout, UnisonoError, UsageError

if TYPE_CHECKING:
    from unisono import _native


class Caller(Protocol):
    """The communicator of a call, for the call's handle."""

    def error_of(self, work: _native.Work, timeout_s: float | None) -> UnisonoError:
        """Why the call failed."""

    def warn_of_dropped(self, work: Work) -> None:
        """The handle of the call was dropped: warn, if it is in use."""


class Work:
    """A call that was started with `async_op=True`.

    Its arrays must not be used until it is done; they are kept alive that long.
    Dropping a Work does not cancel the call. A Work that is dropped before wait() was
    called, or done() was true, gives the warning `DroppedWork`, unless allow_drop() was
    called.
    """

    _watched = True  # until it is made

    def __init__(
        self,
        native: _native.Work | None,
        result: Any,
        caller: Caller | None = None,
        timeout_s: float | None = None,
        call: str = "",
        finish: Callable[[Any], Any] | None = None,
        *,
        droppable: bool = False,
    ) -> None:
        """`finish` makes the result from the buffers, once.

        One that is `droppable` may be dropped without a warning.
        """
        self._native = native
        self._result = result
        self._caller = caller
        self._timeout_s = timeout_s
        self._finish = finish
        self._error: BaseException | None = None
        self._process = os.getpid()
        self.call = call
        self._watched = droppable

    def __del__(self) -> None:
        """Warn if nobody has waited for it, except at the end of the process."""
        if self._watched or self._caller is None or sys.is_finalizing():
            return
        if self._process == os.getpid():
            self._caller.warn_of_dropped(self)

    def allow_drop(self) -> None:
        """It may be dropped without a warning."""
        self._watched = True

    @property
    def caller(self) -> Caller | None:
        """The communicator of the call; None if it is done and was waited for."""
        return self._caller

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait until it is done and return the result, or raise its error.

        CollectiveTimeout after `timeout_s`, if given; the call itself then continues,
        and one may wait again.
        """
        self._watched = True
        if self._process != os.getpid():
            raise UsageError(
                f"{self.call}: this process is a fork of the rank that made the call; "
                "wait for it there"
            )
        if self._native is not None:
            limit = -1 if timeout_s is None else max(0, int(timeout_s * 1e9))
            state = self._native.wait(limit)
            if state == 0:
                late = list(self._native.awaited())
                raise CollectiveTimeout(
                    f"{self.call}: not done after {timeout_s:g} s; waiting for ranks "
                    f"{', '.join(map(str, late))}",
                    ranks=late,
                    collective=self.call.partition("(")[0],
                    seq=self._native.seq(),
                )
            self._settle(state)
        if self._error is not None:
            raise self._error
        self._caller = None  # breaks the cycle with the communicator
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish(self._result)
        return self._result

    def rest(self) -> None:
        """Sleep until it has ended, with or without an error, without driving it."""
        if self._native is not None:
            self._native.wait(-1, False)

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        ended = self._ended()
        if ended and self._finish is None:  # else wait() is needed for the result
            self._watched = True
        return ended

    def _ended(self) -> bool:
        return self._native is None or self._native.state() != 0

    def is_completed(self) -> bool:
        """The same, by torch's name."""
        return self.done()

    def exception(self) -> BaseException | None:
        """The error, if it has ended with one."""
        if self._native is not None and self.done():
            self._settle(self._native.state())
        return self._error

    @property
    def native(self) -> _native.Work | None:
        """The engine's handle; None if the call never reached the engine."""
        return self._native

    @property
    def source(self) -> int | None:
        """The rank that a message came from."""
        found = -1 if self._native is None else self._native.source()
        return None if found < 0 else found

    def _settle(self, state: int) -> None:
        unexplained = state != 1 and self._error is None
        if unexplained and self._native is not None and self._caller is not None:
            self._error = self._caller.error_of(self._native, self._timeout_s)

    def __repr__(self) -> str:
        """One line: the call and its state."""
        watched = self._watched
        if not self.done():
            state = "in flight"
        else:
            state = "done" if self.exception() is None else "failed"
        self._watched = watched  # to be shown is not to be waited for
        return f"<Work: {self.call}, {state}>"


class DeviceCalls(Protocol):
    """The calls of a communicator that are in flight on a device."""

    def is_idle(self) -> bool:
        """Whether all have ended."""

    def close(self) -> None:
        """Wait until all have ended; no more are made."""


class CallsInFlight:
    """Keeps the arrays of a communicator's calls in flight until these have ended.

    If a call failed while another rank was writing to its arrays, that rank may be
    stopped and continue to write at any time: then they are kept for ever.
    """

    def __init__(self, comm: _native.Comm) -> None:
        """No call is in flight yet."""
        self._comm = comm
        self.device: DeviceCalls | None = None
        self.device_arrays: deque[Any] = deque()  # of calls on the device
        self.failed_in: dict[int, str] = {}
        """Names of the threads whose calls failed; see `runtime.observe.threads`."""
        self._calls: deque[tuple[_native.Work, object, int]] = deque()
        self._lock = threading.Lock()

    def add(self, work: _native.Work, arrays: object) -> None:
        """Add a call; release the arrays of those that have ended."""
        with self._lock:
            while self._calls and self._calls[0][0].state() != _PENDING:
                self._release(*self._calls.popleft())
            if work.state() != _SUCCEEDED:
                self._calls.append((work, arrays, threading.get_ident()))

    def pending(self) -> bool:
        """Whether any call has not ended."""
        device = self.device
        if device is not None and not device.is_idle():
            return True
        return any(work.state() == _PENDING for work, _ in self.unfinished())

    def unfinished(self) -> list[tuple[_native.Work, int]]:
        """The calls that have not succeeded, with the threads that started them.

        Also those that another extension module has begun, which keeps their arrays.
        """
        with self._lock:
            own = [(w, t) for w, _, t in self._calls if w.state() != _SUCCEEDED]
        return own + self._comm.begun_calls()

    def rest(self, within_s: float) -> None:
        """Sleep until one more has ended, at most `within_s`."""
        waiting = [w for w, _ in self.unfinished() if w.state() == _PENDING]
        if waiting:
            waiting[0].wait(int(within_s * 1e9), False)
        elif self.device is not None:
            time.sleep(_DEVICE_POLL_S)

    def has_device(self) -> bool:
        """Whether the communicator has a device half."""
        return self.device is not None

    def close_device(self) -> None:
        """Close the device half; waits for its kernels, which end when all fails."""
        if self.device is not None:
            self.device.close()

    def end(self) -> None:
        """The communicator is closed: release all arrays."""
        self.device_arrays.clear()
        with self._lock:
            while self._calls:
                self._release(*self._calls.popleft())

    def _release(self, work: _native.Work, arrays: object, _thread: int) -> None:
        if work.state() != _SUCCEEDED and self._comm.has_writers():
            _KEPT.append(arrays)


_PENDING, _SUCCEEDED = 0, 1
_DEVICE_POLL_S = 1e-3
_KEPT: list[object] = []
