"""The device half of a communicator, which is made when it is first used."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from unisono import _native
from unisono.devices.arrays import DeviceView
from unisono.errors import DeviceError
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.device.explain import explain_on_device
from unisono.runtime.device.plane import DevicePlane, HostHalf
from unisono.schedule.collective import Collective


class DeviceHalf:
    """Calls on CUDA arrays; nothing is made before the first of them."""

    def __init__(self) -> None:
        """It is given its communicator with each call, and refers to it weakly."""
        self._plane: DevicePlane | None = None

    def run(
        self, host: HostHalf, call: Call, reduction: Reduction, how: CallOptions
    ) -> Any:
        """Run a call, or start it; at the first one all ranks connect their devices."""
        try:
            if self._plane is None:
                host.check_usable(call.collective)
                self._plane = DevicePlane(host, call.device)
                host.in_flight.device = self._plane.native
                host.in_flight.device_arrays = self._plane.kept
            return self._plane.run(call, reduction, how)
        except _native.CudaError as why:
            raise DeviceError(
                f"{call.collective}: CUDA's driver failed: {why}"
            ) from why

    def explain(
        self,
        n: int,
        what: Collective,
        view: DeviceView,
        nbytes: int,
        root: int,
        how: CallOptions,
    ) -> str:
        """What would run for a call on such an array; nothing is run or made."""
        return explain_on_device(self._plane, n, what, view, nbytes, root, how)

    def synchronize(self, timeout_s: float | None) -> None:
        """Wait on the host until all calls have ended; raise if one has failed."""
        if self._plane is not None:
            self._plane.synchronize(timeout_s)

    def close(self) -> None:
        """Wait for the calls in flight, and release its memory."""
        if self._plane is not None:
            with suppress(_native.CudaError):  # a driver that fails has ended them
                self._plane.close()
