"""The device half of a communicator, which is made when it is first used."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from unisono import _native
from unisono.devices.arrays import DeviceView
from unisono.errors import DeviceError, UsageError
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallKey, CallOptions, Options
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.device.between_hosts import BetweenHosts
from unisono.runtime.device.explain import explain_on_device
from unisono.runtime.device.explain_hosts import explain_between_hosts
from unisono.runtime.device.levels import Split
from unisono.runtime.device.plane import DevicePlane
from unisono.runtime.device.quick import NAMES, QuickCalls
from unisono.runtime.device.stream_calls import HostHalf
from unisono.runtime.device.work import DeviceWork
from unisono.schedule.collective import Collective


class DeviceHalf:
    """Calls on CUDA arrays; nothing is made before the first of them."""

    def __init__(self) -> None:
        """It is given its communicator with each call, and refers to it weakly."""
        self._plane: DevicePlane | BetweenHosts | None = None
        self._quick: QuickCalls | None = None
        self.split: Split | None = None
        """Makes groups of the communicator, for which it is set by whoever can."""

    def run(
        self,
        host: HostHalf,
        call: Call,
        reduction: Reduction,
        how: CallOptions,
        key: CallKey | None,
    ) -> Any:
        """Run a call, or start it; at the first one all ranks connect their devices.

        By its key, if it has one, `start` finds the next call like it.
        """
        try:
            if self._plane is None:
                host.check_usable(call.collective)
                self._make(host, call)
            assert self._plane is not None
            result = self._plane.run(call, reduction, how)
        except _native.CudaError as why:
            raise _driver_failed(call.collective, why) from why
        if key is not None and self._quick is not None:
            self._quick.remember(call, reduction, how, key)
        return result

    def _make(self, host: HostHalf, call: Call) -> None:
        if host.hosts_if_several:
            if self.split is None:
                raise UsageError(
                    f"{call.collective}: calls on CUDA arrays between hosts need a "
                    "communicator that can be split"
                )
            plane = BetweenHosts(host, call.device, self.split)
            host.in_flight.device = self._plane = plane
        else:
            inside = DevicePlane(host, call.device)
            self._quick = QuickCalls(inside)
            host.in_flight.device = inside.native
            self._plane = inside
        host.in_flight.device_arrays = self._plane.kept

    def start(
        self, kind: int, x: Any, out: Any, op: Any, root: int, how: Options
    ) -> int | DeviceWork:
        """Start a call like one that was made before: 1 or its Work, 0 if none was."""
        if self._quick is None:
            return 0
        try:
            return self._quick.start(kind, x, out, op, root, how)
        except _native.CudaError as why:
            raise _driver_failed(NAMES[kind], why) from why

    def explain(
        self,
        n: int,
        hosts: tuple[int, ...],
        what: Collective,
        view: DeviceView,
        nbytes: int,
        root: int,
        how: CallOptions,
    ) -> str:
        """What would run for a call on such an array; nothing is run or made.

        `hosts` are those of the ranks, if there are several.
        """
        if hosts or isinstance(self._plane, BetweenHosts):
            return explain_between_hosts(hosts, what, view, nbytes, how)
        return explain_on_device(self._plane, n, what, view, nbytes, root, how)

    def error(self) -> BaseException | None:
        """Why calls between hosts have failed, if they have and it is known here."""
        return self._plane.error() if isinstance(self._plane, BetweenHosts) else None

    def sent_bytes(self, host: HostHalf) -> int:
        """How many bytes calls on arrays of the device have sent, as schedules say."""
        sent = host.native.sent_on_devices()
        if isinstance(self._plane, BetweenHosts):
            sent += self._plane.levels.sent_bytes()
        return sent

    def check(self, host: HostHalf, what: str) -> None:
        """Raise the error of the communicator if a call has failed by now."""
        if self._plane is not None:
            self._plane.look()
        host.check_usable(what)

    def synchronize(self, timeout_s: float | None) -> None:
        """Wait on the host until all calls have ended; raise if one has failed."""
        if self._plane is not None:
            self._plane.synchronize(timeout_s)

    def close(self) -> None:
        """Wait for the calls in flight, and release its memory."""
        if self._plane is not None:
            with suppress(_native.CudaError):  # a driver that fails has ended them
                self._plane.close()
        if self._quick is not None:
            self._quick.clear()


def _driver_failed(collective: str, why: _native.CudaError) -> DeviceError:
    return DeviceError(f"{collective}: CUDA's driver failed: {why}")
