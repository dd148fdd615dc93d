"""The handle of a call on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono.devices.arrays import current_stream, view_of
from unisono.errors import CollectiveTimeout, UnisonoError

if TYPE_CHECKING:
    from unisono import _native
    from unisono.runtime.call.arguments import Call

_POLL_S = 1e-4
_LONGEST_POLL_S = 2e-3


class DeviceWork:
    """A call that was started with `async_op=True` on arrays of a device.

    Its arrays are kept alive until it is done.
    """

    def __init__(
        self, event: _native.CudaEvent, call: Call | None, check: Callable[[str], None]
    ) -> None:
        """`event` is recorded behind the call; `check` raises if one has failed."""
        self._check = check
        self._event = event
        self._call = call
        self.call = "synchronize" if call is None else call.collective

    def wait(self, timeout_s: float | None = None) -> Any:
        """Let the current stream wait for it, and return the result.

        The host does not wait, as with torch's own backends; with `timeout_s` it does,
        and CollectiveTimeout is raised if the call is not done by then.
        """
        if timeout_s is not None:
            self.synchronize(timeout_s)
        self._check(self.call)
        call = self._call
        if call is None:
            return None
        some = call.input or call.output
        assert some is not None
        self._event.order(current_stream(some.array, view_of(some.array, self.call)))
        result, finish = call.result, call.finish
        call.finish = None
        return result if finish is None else finish(result)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait on the host until it is done; raise its error if it failed."""
        begun = time.monotonic()
        pause = _POLL_S
        while not self._event.query():
            if timeout_s is not None and time.monotonic() - begun > timeout_s:
                raise CollectiveTimeout(
                    f"{self.call}: not done after {timeout_s:g} s",
                    ranks=(),
                    collective=self.call,
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        self._check(self.call)

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._event.query()

    def is_completed(self) -> bool:
        """The same, by torch's name."""
        return self.done()

    def exception(self) -> BaseException | None:
        """The error, if it has ended with one."""
        try:
            self._check(self.call)
        except UnisonoError as error:
            return error if self.done() else None
        return None

    def __repr__(self) -> str:
        """One line: the call and its state."""
        return f"<DeviceWork: {self.call}, {'done' if self.done() else 'in flight'}>"
