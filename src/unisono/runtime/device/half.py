"""The device half of a communicator, which is made when it is first used."""

from __future__ import annotations

from typing import Any

from unisono import _native
from unisono.devices.arrays import DeviceView
from unisono.errors import DeviceError
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.device.explain import explain_on_device
from unisono.runtime.device.plane import DevicePlane, HostHalf


class DeviceHalf:
    """Calls on CUDA arrays; nothing is made before the first of them."""

    def __init__(self, host: HostHalf) -> None:
        """`host` is the core of the communicator."""
        self._host = host
        self._plane: DevicePlane | None = None

    def run(self, call: Call, reduction: Reduction, how: CallOptions) -> Any:
        """Run a call, or start it; at the first one all ranks connect their devices."""
        try:
            if self._plane is None:
                self._host.check_usable(call.collective)
                self._plane = DevicePlane(self._host, call.device)
                self._host.in_flight.device = self._plane.native
            return self._plane.run(call, reduction, how)
        except _native.CudaError as why:
            raise DeviceError(
                f"{call.collective}: CUDA's driver failed: {why}"
            ) from why

    def explain(
        self,
        collective: str,
        view: DeviceView,
        *,
        algorithm: str | None,
        root: int,
        reproducible: bool,
    ) -> str:
        """What would run for a call on such an array; nothing is run or made."""
        return explain_on_device(
            self._plane,
            self._host.world_size,
            collective,
            view,
            algorithm=algorithm,
            root=root,
            reproducible=reproducible,
        )

    def synchronize(self, timeout_s: float | None) -> None:
        """Wait on the host until all calls have ended; raise if one has failed."""
        if self._plane is not None:
            self._plane.synchronize(timeout_s)

    def close(self) -> None:
        """Wait for the calls in flight, and release its memory."""
        if self._plane is not None:
            self._plane.close()
