"""The device half of a communicator: it runs calls on CUDA arrays.

Made at the first such call, by all ranks together: each allocates its words and
windows on its device and maps those of the others. From then on a call is one kernel
launch; the host takes no part in it, and does not wait for it.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from unisono import _native
from unisono.algorithms import Spec
from unisono.devices.arrays import (
    DeviceArray,
    current_stream,
    stream_handle,
    view_of,
)
from unisono.devices.kernels import kernel
from unisono.errors import BadArgument, UnsupportedWorld
from unisono.runtime.call.arguments import Call, Position
from unisono.runtime.call.arguments import all_gather as all_gather_call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction, as_reduction
from unisono.runtime.call.timeouts import nanoseconds
from unisono.runtime.call.work import CallsInFlight
from unisono.runtime.device.choice import algorithm_on_device
from unisono.runtime.device.work import DeviceWork, await_device
from unisono.runtime.plan.device_plans import device_plan
from unisono.runtime.plan.plans import CallKind
from unisono.transports.session import Session

WINDOW = 8 << 20
"""Bytes of half a rank's window in device memory."""
THREADS = 512
"""Of a block; the kernel is compiled for so many."""
BYTES_PER_BLOCK = 16 << 10
"""A call has one block for so many bytes of its largest buffer, up to a limit."""
BLOCKS = "UNISONO_CUDA_BLOCKS"
"""The most blocks of a call, if set; all ranks must have the same."""
COMMUNICATORS_AT_ONCE = 2
"""The blocks of so many calls of all ranks fit on a device at the same time."""
REDUCING = ("reduce", "all_reduce", "reduce_scatter")
_LEGACY_DEFAULT = (0, 1)
"""CUDA's handles of the default stream that all threads of a process share."""


class HostHalf(Protocol):
    """The part of a communicator's core that its device half uses."""

    native: _native.Comm
    session: Session
    world_ranks: tuple[int, ...]
    position: Position
    rank: int
    world_size: int
    hosts_if_several: tuple[int, ...]
    exceeded_s: float
    in_flight: CallsInFlight

    @property
    def timeout_s(self) -> float:
        """The timeout of calls without one of their own."""

    def run(self, call: Call, reduction: Reduction, how: CallOptions) -> Any:
        """Run a call on arrays of the host."""

    def spec(self, algorithm: str) -> Spec:
        """An algorithm, with its files as they were when it was first used here."""

    def check_usable(self, what: str) -> None:
        """Raise the error of the communicator if it has failed."""


@dataclass(frozen=True)
class Facts:
    """What all ranks know: how many share a device, and the size of the smallest."""

    ranks_per_device: int
    multiprocessors: int


class DevicePlane:
    """The device half of one communicator, on one device."""

    def __init__(self, host: HostHalf, ordinal: int) -> None:
        """All ranks make it at the same time; BadArgument if their devices differ."""
        if host.hosts_if_several:
            raise UnsupportedWorld(
                "ranks on several hosts: collectives on CUDA arrays are supported "
                "inside one host only",
                n=host.world_size,
            )
        if host.world_size > _native.MOST_DEVICE_RANKS:
            raise UnsupportedWorld(
                f"a world of {host.world_size} ranks: at most "
                f"{_native.MOST_DEVICE_RANKS} are supported on CUDA devices",
                n=host.world_size,
            )
        self.host = host
        self.ordinal = ordinal
        self.native = self._make()
        self.facts = self._connect()
        self._plans: dict[object, _native.DevicePlan] = {}
        self._stream: _native.CudaStream | None = None
        self._in_flight: deque[tuple[_native.CudaEvent, object]] = deque()
        self._kept: deque[tuple[int, object]] = deque()

    def _make(self) -> _native.DeviceComm:
        """This rank's half, with a board in shared memory that the first rank makes."""
        host = self.host
        session, owner = host.session, host.world_ranks[0]
        number = 0
        if host.rank == 0:
            number = session.engine.create(_native.device_board_bytes(host.world_size))
        number = int.from_bytes(
            self._all_gather(number.to_bytes(8, "little"))[0], "little"
        )
        self._board = number
        session.await_segment(owner, number, host.timeout_s)
        return _native.make_device_comm(
            host.native, self.ordinal, WINDOW, owner, number
        )

    def _connect(self) -> Facts:
        """Map the memory of the others."""
        device = _native.cuda_device(self.ordinal)
        about = device.uuid + device.multiprocessors.to_bytes(4, "little")
        announced = self._all_gather(self.native.announcement() + about)
        self.native.connect([row[: -len(about)] for row in announced])
        uuids = [row[-len(about) : -4] for row in announced]
        sizes = [int.from_bytes(row[-4:], "little") for row in announced]
        return Facts(max(uuids.count(u) for u in uuids), min(sizes))

    def _all_gather(self, mine: bytes) -> list[bytes]:
        """The same number of bytes of each rank, by the communicator's host half."""
        x = np.frombuffer(mine, np.uint8)
        call = all_gather_call(self.host.position, x, None, None)
        how = CallOptions(label="device communicator")
        gathered = self.host.run(call, as_reduction("sum"), how)
        return [r.tobytes() for r in gathered.reshape(self.host.world_size, -1)]

    def run(self, call: Call, reduction: Reduction, how: CallOptions) -> Any:
        """Start a call on the caller's current stream, or beside it (async_op)."""
        self._refuse(call, how)
        self._check(call.collective)
        stream = self._stream_of(call, how)
        if how.async_op:
            return self._start(call, reduction, how, stream)
        self._launch(call, reduction, how, stream)
        self._keep(call)
        return call.result if call.finish is None else call.finish(call.result)

    def _stream_of(self, call: Call, how: CallOptions) -> int:
        """The stream that is given, or the current one of the array's library."""
        some = call.input or call.output
        assert some is not None
        view = view_of(some.array, call.collective)
        stream = (
            current_stream(some.array, view)
            if how.stream is None
            else stream_handle(how.stream)
        )
        if stream in _LEGACY_DEFAULT and self.native.ranks_here() > 1:
            raise BadArgument(
                f"{call.collective}: {self.native.ranks_here()} ranks are threads of "
                "this process, and their kernels wait for each other: on the default "
                "stream, which all threads share, they would wait for ever. Give each "
                "rank a stream of its own, with torch.cuda.stream() or stream="
            )
        return stream

    def _check(self, what: str) -> None:
        """Raise if the communicator has failed, on the host or on a device."""
        self.native.look()
        self.host.check_usable(what)

    def _keep(self, call: Call) -> None:
        """Keep our own arrays until the call has ended; others know streams."""
        arrays = [b.array for b in (call.input, call.output) if b is not None]
        done = self.native.done()
        while self._kept and self._kept[0][0] <= done:
            self._kept.popleft()
        if any(isinstance(array, DeviceArray) for array in arrays):
            self._kept.append((self.native.launched(), arrays))

    def _start(
        self, call: Call, reduction: Reduction, how: CallOptions, stream: int
    ) -> DeviceWork:
        """Launch on a stream of ours, after what is on the caller's stream."""
        if self._stream is None:
            self._stream = _native.CudaStream(self.ordinal)
        event = _native.CudaEvent(self.ordinal)
        event.record(stream)
        event.order(self._stream.handle)
        self._launch(call, reduction, how, self._stream.handle)
        event.record(self._stream.handle)
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        self._in_flight.append((event, (call.input, call.output)))
        return DeviceWork(call, event, stream, self._check)

    def _launch(
        self, call: Call, reduction: Reduction, how: CallOptions, stream: int
    ) -> None:
        plan = self._plan(call, reduction, how)
        op = reduction.op if call.collective in REDUCING else None
        limit = self.host.timeout_s if how.timeout_s is None else how.timeout_s
        self.host.exceeded_s = limit  # for the error, if it is
        self.native.launch(
            plan,
            kernel(self.ordinal, call.dtype, op),
            *call.addresses,
            stream,
            nanoseconds(limit),
            self.blocks(call.total * call.dtype.itemsize),
            THREADS,
        )

    def blocks(self, nbytes: int) -> int:
        """How many blocks a call of this size has; the same on all ranks."""
        facts = self.facts
        resident = 2 * facts.multiprocessors  # of 512 threads with 64 registers each
        share = resident // (facts.ranks_per_device * COMMUNICATORS_AT_ONCE)
        most = int(os.environ.get(BLOCKS, share) or share)
        limit = max(1, min(share, most, _native.MOST_DEVICE_BLOCKS))
        return max(1, min(limit, -(-nbytes // BYTES_PER_BLOCK)))

    def _plan(
        self, call: Call, reduction: Reduction, how: CallOptions
    ) -> _native.DevicePlan:
        sizes = call.counts, call.shape
        dtype = call.dtype
        chosen = how.algorithm, how.reproducible, how.label
        key = (call.collective, dtype.code, reduction.op, call.root, *sizes, *chosen)
        found = self._plans.get(key)
        if found is None:
            reduction.check(dtype)
            choice = algorithm_on_device(
                call.collective,
                call.total * dtype.itemsize,
                self.host.world_size,
                dtype,
                named=how.algorithm,
                reproducible=how.reproducible,
            )
            spec = self.host.spec(choice.algorithm)
            what = call.collective, dtype, reduction, call.root, call.counts, spec
            kind = CallKind(*what, how.label, shape=call.shape)
            size, rank = self.host.world_size, self.host.rank
            plan = device_plan(kind, size, rank, window=WINDOW)
            found = self._plans[key] = _native.DevicePlan(self.ordinal, plan)
        return found

    def _refuse(self, call: Call, how: CallOptions) -> None:
        if call.device != self.ordinal:
            raise BadArgument(
                f"{call.collective}: the array is on cuda:{call.device}, this "
                f"communicator uses cuda:{self.ordinal}; a rank has one device"
            )
        if how.codec is not None:
            raise BadArgument(
                f"{call.collective}: codec= is not supported on CUDA arrays"
            )

    def synchronize(self, timeout_s: float | None) -> None:
        """Wait on the host until all calls have ended; raise if one has failed."""
        await_device(self.native.is_idle, timeout_s, "synchronize")
        self._check("synchronize")

    def close(self) -> None:
        """Wait for the calls in flight, and release its memory."""
        self.native.close()
        self._in_flight.clear()
        self._kept.clear()
        self._plans.clear()
        if self.host.rank == 0:
            self.host.session.engine.drop(self._board)
