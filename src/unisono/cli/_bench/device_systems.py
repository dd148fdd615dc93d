"""The systems on GPUs: arrays in device memory, and calls that only start work there.

A rank has the GPU of its number, modulo their number, and one stream. To wait, the host
waits for an event behind the last call, as precisely as the driver can: `comm.
synchronize` sleeps between two looks, and the time of that would be measured as well.

unisono's ranks allocate memory for the largest size once, and every case uses parts of
it: as in nccl-tests, and because other processes map what a rank allocates and keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from unisono import _native
from unisono.cli._bench.cases import ON_DEVICES, Case
from unisono.cli._bench.inputs import Array
from unisono.cli._bench.systems import AnyArray, Call, Gloo, System, Unisono
from unisono.devices.arrays import DeviceArray
from unisono.dtypes import DTYPES, numpy_dtype
from unisono.errors import BadArgument
from unisono.runtime.device.choice import algorithm_on_device
from unisono.runtime.device.plane import may_use_packets

_COPIED = 256 << 20
_COPIES = 10


class UnisonoOnDevice(Unisono):
    """Our own, on a GPU."""

    def __init__(self, comm: Any) -> None:
        """`comm` is this rank's communicator."""
        super().__init__(comm)
        self.ordinal = self.rank % _native.cuda_device_count()
        self._stream = _native.CudaStream(self.ordinal)
        self._event = _native.CudaEvent(self.ordinal)
        self._reserved = 0
        self._memory: list[DeviceArray] = []
        self._used = 0
        self._ran = ""

    def reserve(self, nbytes: int) -> None:
        """Allocate at least so many bytes for each array, once."""
        self._reserved = nbytes

    def forget(self) -> None:
        """The next arrays are in the same memory."""
        self._used = 0

    def empty(self, count: int, dtype: str, *, shared: bool) -> AnyArray:
        """Memory of comm.empty, which all ranks can use."""
        at, self._used = self._used, self._used + 1
        known = self._memory[at : at + 1]
        if not known or known[0].dtype != dtype or len(known[0]) < count:
            most = max(count, self._reserved // DTYPES[dtype].itemsize)
            device = f"cuda:{self.ordinal}"
            known = [self.comm.empty((most,), dtype, device=device)]
            self._memory[at : at + 1] = known
        return known[0][:count]

    def on_host(self, array: AnyArray) -> Array:
        """A copy."""
        copied: Array = array.numpy()
        return copied

    def put(self, array: AnyArray, values: Array) -> None:
        """Copy them to the device."""
        array.copy_from(values)

    def call(
        self, case: Case, place: str, x: AnyArray, out: AnyArray, algorithm: str
    ) -> Call:
        """The method of the communicator, on this rank's stream."""
        if case.collective not in ON_DEVICES:
            raise BadArgument(f"{case.collective} is not offered on CUDA arrays")
        dtype = DTYPES[case.dtype]
        what = case.collective, case.size, case.n, dtype
        named = algorithm or None
        packets = may_use_packets(case.size)
        chosen = algorithm_on_device(
            *what, named=named, reproducible=False, packets=packets
        )
        self._ran = chosen.algorithm
        bound: Any = super().call(case, place, x, out, algorithm)
        return partial(bound, stream=self._stream.handle)

    def wait(self) -> None:
        """Wait for the device; raise if a call has failed."""
        self._await_device()
        self.comm.synchronize()

    def waiting(self, call: Call) -> Call:
        """The call, and the wait for the device."""

        def both() -> None:
            call()
            self._await_device()

        return both

    def _await_device(self) -> None:
        self._event.record(self._stream.handle)
        self._event.synchronize()

    def ran(self) -> str:
        """The algorithm of the last call that was bound."""
        return self._ran

    def about_device(self) -> dict[str, Any]:
        """What there is to know of the rank's GPU."""
        device = _native.cuda_device(self.ordinal)
        return {
            "ordinal": self.ordinal,
            "name": device.name,
            "memory": device.memory,
            "has_mps": device.has_mps,
            "is_emulated": _native.cuda_is_emulated(),
        }

    def copy_speed(self) -> float:
        """That of the driver's own copies; a byte is read once and written once."""
        nbytes = min(_COPIED, _native.cuda_device(self.ordinal).memory // 64)
        return 2 * nbytes / _native.cuda_copy_seconds(self.ordinal, nbytes, _COPIES)


class GlooOnDevice(Gloo):
    """gloo on torch's CUDA tensors."""

    def __init__(self, rank: int, n: int, rendezvous: str) -> None:
        """Rendezvous by a file."""
        torch = import_module("torch")
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        super().__init__(rank, n, rendezvous)
        self.barrier: Call = self.waiting(self.dist.barrier)

    def empty(self, count: int, dtype: str, *, shared: bool) -> AnyArray:
        """A tensor on this rank's GPU."""
        kind = getattr(self.torch, dtype)
        return self.torch.empty(count, dtype=kind, device=self.device)

    def on_host(self, array: AnyArray) -> Array:
        """A copy."""
        name = str(array.dtype).removeprefix("torch.")
        copied: Array = np.empty(len(array), numpy_dtype(name))
        self.tensor(copied, name).copy_(array)
        return copied

    def put(self, array: AnyArray, values: Array) -> None:
        """Copy them to the device."""
        array.copy_(self.tensor(values, str(array.dtype).removeprefix("torch.")))

    def tensor(self, array: AnyArray, dtype: str) -> Any:
        """Tensors as they are; NumPy arrays as tensors in the same memory."""
        return array if self.torch.is_tensor(array) else super().tensor(array, dtype)

    def wait(self) -> None:
        """Wait for the device."""
        self.torch.cuda.synchronize()

    def waiting(self, call: Call) -> Call:
        """The call, and the wait for the device."""

        def both() -> None:
            call()
            self.wait()

        return both


class Nccl(GlooOnDevice):
    """NCCL as torch.distributed offers it."""

    backend = "nccl"


DEVICE_SYSTEMS: dict[str, Callable[[int, int, str], System]] = {
    "unisono": UnisonoOnDevice.join,
    "gloo": GlooOnDevice,
    "nccl": Nccl,
}
