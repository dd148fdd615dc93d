"""unisono's own engine, with the calls that were made before."""

from __future__ import annotations

from collections import deque
from typing import Any

from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallKey, CallOptions, Options
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.work import DeviceCalls
from unisono.runtime.device.explain import explain_on_device
from unisono.runtime.device.host_half import HostHalf
from unisono.runtime.device.plane import DevicePlane
from unisono.runtime.device.quick import QuickCalls
from unisono.runtime.device.work import DeviceWork
from unisono.runtime.observe.subject import DeviceCall


class KernelEngine:
    """Calls by unisono's own kernel."""

    def __init__(self, host: HostHalf, ordinal: int, why: str = "") -> None:
        """All ranks make it at the same time; `why` says who asked for it."""
        self._why = why
        self.plane = DevicePlane(host, ordinal)
        self._quick = QuickCalls(self.plane)

    @property
    def calls(self) -> DeviceCalls:
        """Those in flight."""
        return self.plane.native

    @property
    def kept(self) -> deque[Any]:
        """The arrays of calls in flight."""
        return self.plane.kept

    def run(self, call: Call, reduction: Reduction, how: CallOptions) -> Any:
        """Start a call."""
        return self.plane.run(call, reduction, how)

    def remember(
        self, call: Call, reduction: Reduction, how: CallOptions, key: CallKey
    ) -> None:
        """By its key `start` finds the next call like this one."""
        self._quick.remember(call, reduction, how, key)

    def start(
        self, kind: int, x: Any, out: Any, op: Any, root: int, how: Options
    ) -> int | DeviceWork:
        """Start a call like one that was made before: 1 or its Work, 0 if none was."""
        return self._quick.start(kind, x, out, op, root, how)

    def explain(self, call: DeviceCall) -> str:
        """What would run for a call on such an array; nothing is run or made."""
        why = f"unisono: {self._why}"
        return explain_on_device(self.plane, call, why)

    def check(self, what: str) -> None:
        """Raise the error of the communicator if a call has failed by now."""
        self.plane.check(what)

    def synchronize(self, timeout_s: float | None) -> None:
        """Wait on the host until all calls have ended; raise if one has failed."""
        self.plane.synchronize(timeout_s)

    def close(self) -> None:
        """Wait for the calls in flight, and release its memory."""
        try:
            self.plane.close()
        finally:
            self._quick.clear()
