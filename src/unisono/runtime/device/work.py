"""The handle of a call on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from unisono import _native
from unisono.devices.arrays import current_stream, stream_handle, view_of
from unisono.errors import CollectiveTimeout, UnisonoError, UsageError
from unisono.runtime.call.options import CallOptions

_SHORTEST_PAUSE_S = 2e-5
_LONGEST_PAUSE_S = 1e-3


def pause_after(waited_s: float) -> float:
    """How long to sleep before a device is looked at again.

    A sixteenth of what was waited: so little of a wait is lost at its end, and a long
    one costs few looks.
    """
    return min(max(waited_s / 16, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)


def await_device(
    is_done: Callable[[], bool], timeout_s: float | None, what: str
) -> None:
    """Sleep until a device has done something; CollectiveTimeout after `timeout_s`."""
    begun = time.monotonic()
    while not is_done():
        waited = time.monotonic() - begun
        if timeout_s is not None and waited > timeout_s:
            raise CollectiveTimeout(
                f"{what}: not done after {timeout_s:g} s", ranks=(), collective=what
            )
        time.sleep(pause_after(waited))


class Reached(Protocol):
    """A point of a stream."""

    def order(self, stream: int) -> None:
        """Let another stream wait for it."""

    def query(self) -> bool:
        """Whether the device has come so far."""


class DeviceWork:
    """A call that was started with `async_op=True` on arrays of a device.

    Its arrays are kept alive until it is done. One that was captured for a CUDA graph
    runs when the graph does: wait() belongs into the capture, where it lets the current
    stream join the call's; the host cannot wait for it.
    """

    def __init__(
        self,
        call: str,
        event: Reached,
        current: Callable[[], int],
        check: Callable[[str], None],
        result: Any,
        finish: Callable[[Any], Any] | None,
        *,
        captured: bool = False,
    ) -> None:
        """`event` is recorded behind the call; `check` raises if one has failed.

        `current` tells the current stream, `finish` makes the result, once.
        """
        self._captured = captured
        self._event = event
        self._current = current
        self._check = check
        self._result = result
        self._finish = finish
        self.call = call

    def wait(self, timeout_s: float | None = None) -> Any:
        """Let the current stream wait for it, and return the result.

        The host does not wait, as with torch's own backends; with `timeout_s` it does,
        and CollectiveTimeout is raised if the call is not done by then.
        """
        if timeout_s is not None:
            self.synchronize(timeout_s)
        self._check(self.call)
        self._join()
        finish, self._finish = self._finish, None
        return self._result if finish is None else finish(self._result)

    def _join(self) -> None:
        try:
            self._event.order(self._current())
        except _native.CudaError as why:
            if not self._captured:
                raise
            raise UsageError(
                f"{self.call}: it was captured for a CUDA graph, so wait() must be "
                f"called inside that capture: {why}"
            ) from why

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait on the host until it is done; raise its error if it failed."""
        if self._captured:
            raise UsageError(
                f"{self.call}: it was captured for a CUDA graph and runs when the "
                "graph does: the host cannot wait for it"
            )
        await_device(self._event.query, timeout_s, self.call)
        self._check(self.call)

    def done(self) -> bool:
        """Whether it has ended, with or without an error; a captured call never has."""
        return not self._captured and self._event.query()

    def is_completed(self) -> bool:
        """The same, by torch's name."""
        return self.done()

    def exception(self) -> BaseException | None:
        """The error, if it has ended with one."""
        if not self.done():
            return None
        try:
            self._check(self.call)
        except UnisonoError as error:
            return error
        return None

    def __repr__(self) -> str:
        """One line: the call and its state."""
        state = "captured" if self._captured else "done" if self.done() else "in flight"
        return f"<DeviceWork: {self.call}, {state}>"


def written_here(
    what: str, x: Any, how: CallOptions, check: Callable[[str], None]
) -> Any:
    """An array that was written on the current stream, as a call returns it.

    The given stream waits for it, or it is the result of a Work; `check` is the same as
    that of one.
    """

    def current() -> int:
        return current_stream(x, what) or 0

    event = _native.CudaEvent(view_of(x, what).ordinal, current())
    if how.async_op:
        return DeviceWork(what, event, current, check, x, None)
    if how.stream is not None:
        event.order(stream_handle(how.stream))
    return x
