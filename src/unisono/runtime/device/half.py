"""The device half of a communicator, which is made when it is first used.

What carries calls out is imported then, too: most communicators have no such calls, and
the modules take a quarter of the time of all that a rank imports.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from unisono import _native
from unisono.errors import DeviceError, UsageError
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallKey, CallOptions, Options
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.device.engine_names import NCCL, checked, wish
from unisono.runtime.observe.subject import DeviceCall

if TYPE_CHECKING:
    from unisono.runtime.device.between_hosts import BetweenHosts
    from unisono.runtime.device.engines import Engine
    from unisono.runtime.device.host_half import HostHalf
    from unisono.runtime.device.kernel_engine import KernelEngine
    from unisono.runtime.device.levels import Split
    from unisono.runtime.device.work import DeviceWork


class DeviceHalf:
    """Calls on CUDA arrays; nothing is made before the first of them."""

    def __init__(self) -> None:
        """It is given its communicator with each call, and refers to it weakly."""
        self.made: Engine | None = None
        self._by_kernel: KernelEngine | None = None
        self._between_hosts: BetweenHosts | None = None
        self.given = ""
        """The name of the engine that its communicator was given, if it was."""
        self.split: Split | None = None
        """Makes groups of the communicator, for which it is set by whoever can."""

    @property
    def engine(self) -> str:
        """The name of the engine that is used, or would be at the first call."""
        return wish(self.given).name

    @engine.setter
    def engine(self, name: str) -> None:
        if self.made is not None and name != self.engine:
            raise UsageError(
                f"engine = {name!r}: calls on CUDA arrays were made by "
                f"{self.engine!r} already; choose it before the first, or for a "
                "communicator of its own: comm.duplicate()"
            )
        self.given = checked(name)

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
            if self.made is None:
                host.check_usable(call.collective)
                self.made = self._engine_for(host, call.device)
                host.in_flight.device = self.made.calls
                host.in_flight.device_arrays = self.made.kept
            result = self.made.run(call, reduction, how)
        except _native.CudaError as why:
            raise _driver_failed(call.collective, why) from why
        if key is not None and self._by_kernel is not None:
            self._by_kernel.remember(call, reduction, how, key)
        return result

    def _engine_for(self, host: HostHalf, ordinal: int) -> Engine:
        """The engine, made by all ranks at the same time."""
        from unisono.runtime.device.between_hosts import BetweenHosts
        from unisono.runtime.device.engines import make_engine
        from unisono.runtime.device.kernel_engine import KernelEngine

        made = make_engine(host, ordinal, self.given, self.split)
        if isinstance(made, KernelEngine):
            self._by_kernel = made
        elif isinstance(made, BetweenHosts):
            self._between_hosts = made
        return made

    def start(
        self, kind: int, x: Any, out: Any, op: Any, root: int, how: Options
    ) -> int | DeviceWork:
        """Start a call like one that was made before: 1 or its Work, 0 if none was."""
        if self._by_kernel is None:
            return 0  # no other engine finds calls by their arguments
        try:
            return self._by_kernel.start(kind, x, out, op, root, how)
        except _native.CudaError as why:
            from unisono.runtime.device.quick import NAMES

            raise _driver_failed(NAMES[kind], why) from why

    def explain(self, call: DeviceCall) -> str:
        """What would run for a call on such an array; nothing is run or made."""
        if self.made is not None:
            return self.made.explain(call)
        from unisono.runtime.device.explain import explain_nccl, explain_on_device
        from unisono.runtime.device.explain_hosts import explain_between_hosts

        wanted = wish(self.given)
        if wanted.name == NCCL:
            return explain_nccl(None, call, f"NCCL: {wanted.why}")
        engine = f"{wanted.name}: {wanted.why}"
        if call.hosts:
            return explain_between_hosts(call, engine)
        return explain_on_device(None, call, engine)

    def error(self) -> BaseException | None:
        """Why calls between hosts have failed, if they have and it is known here."""
        return None if self._between_hosts is None else self._between_hosts.error()

    def sent_bytes(self, host: HostHalf) -> int:
        """How many bytes calls on arrays of the device have sent, as schedules say."""
        sent = host.native.sent_on_devices()
        if self._between_hosts is not None:
            sent += self._between_hosts.levels.sent_bytes()
        return sent

    def check(self, host: HostHalf, what: str) -> None:
        """Raise the error of the communicator if a call has failed by now."""
        if self.made is not None:
            self.made.check(what)
        else:
            host.check_usable(what)

    def synchronize(self, timeout_s: float | None) -> None:
        """Wait on the host until all calls have ended; raise if one has failed."""
        if self.made is not None:
            self.made.synchronize(timeout_s)

    def close(self) -> None:
        """Wait for the calls in flight, and release its memory."""
        if self.made is not None:
            with suppress(_native.CudaError):  # a driver that fails has ended them
                self.made.close()


def _driver_failed(collective: str, why: _native.CudaError) -> DeviceError:
    return DeviceError(f"{collective}: CUDA's driver failed: {why}")
