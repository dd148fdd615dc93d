"""unisono's own engine for CUDA arrays: one kernel that interprets verified programs.

Made at the first such call, by all ranks together: each allocates its words and
windows on its device and maps those of the others, or all are in host memory if a
device cannot reach another one's. From then on a call is one kernel launch; the host
takes no part in it, and does not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from unisono import _native
from unisono.devices.kernels import kernel
from unisono.errors import DeviceError, UnsupportedWorld
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.timeouts import nanoseconds
from unisono.runtime.device import placement
from unisono.runtime.device.choice import algorithm_on_device
from unisono.runtime.device.host_half import (
    HostHalf,
    gather_bytes,
    gather_texts,
    together,
)
from unisono.runtime.device.stream_engine import NumberedCalls, held_bytes
from unisono.runtime.device.work import await_device
from unisono.runtime.plan.device_plans import device_plan
from unisono.runtime.plan.plans import CallKind
from unisono.schedule.collective import REDUCING

WINDOW = 8 << 20
"""Bytes of half a rank's window in device memory."""
THREADS = (8 << 10, 128), (128 << 10, 256), (None, 512)
"""Of a block, up to so many bytes of the largest buffer: few meet sooner than many.

The kernel is compiled for the last number. It need not be the same on all ranks.
"""
BYTES_PER_BLOCK = 16 << 10
"""A call has one block for so many bytes of its largest buffer, up to a limit."""
PACKETS = 64 << 10
"""Bytes of the largest buffer up to which data travel with flags."""
BYTES_PER_PACKET_BLOCK = 4 << 10
"""Such a call has more blocks: the threads of a block move one unit after another."""
PACKETS_VARIABLE = "UNISONO_CUDA_PACKETS"
"""0: no packets, if any rank says so."""
BLOCKS = "UNISONO_CUDA_BLOCKS"
"""The most blocks of a call, if set; the smallest of all ranks counts."""
MOST_PLANS = 1024
"""Plans with tables on the device that are kept."""
COMMUNICATORS_AT_ONCE = 2
"""The blocks of so many calls of all ranks fit on a device at the same time."""


T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What all ranks know: how many share a device, and the size of the smallest.

    `packets` is whether the data of small calls may travel with flags; `why_on_host`
    says why the windows are in host memory, "" if they are not.
    """

    ranks_per_device: int
    multiprocessors: int
    most_blocks: int
    packets: bool
    why_on_host: str = ""


class LaunchShape(NamedTuple):
    """The blocks and threads of a call, and whether its data travel with flags."""

    blocks: int
    threads: int
    packets: bool


class Prepared(NamedTuple):
    """What a kind of call runs."""

    plan: _native.DevicePlan
    kernel: _native.CudaKernel
    shape: LaunchShape


class DevicePlane(NumberedCalls):
    """The kernels of one communicator, on one device."""

    def __init__(self, host: HostHalf, ordinal: int) -> None:
        """All ranks make it at the same time; BadArgument if their devices differ."""
        if host.world_size > _native.MOST_DEVICE_RANKS:
            raise UnsupportedWorld(
                f"a world of {host.world_size} ranks: at most "
                f"{_native.MOST_DEVICE_RANKS} are supported on CUDA devices",
                n=host.world_size,
            )
        super().__init__(host, ordinal)
        self.native = self._make()
        self.facts = self._connect()
        self._one_device = (
            self.facts.ranks_per_device == host.world_size
            and not self.facts.why_on_host
        )
        self._plans: dict[object, _native.DevicePlan] = {}
        self._captured: dict[int, _native.DevicePlan] = {}  # by their ids

    def _make(self) -> _native.DeviceComm:
        """This rank's half, with a board in shared memory."""
        host = self.host
        return self._with_segment(
            _native.device_board_bytes(host.world_size),
            lambda owner, number: _native.make_device_comm(
                host.native, self.ordinal, WINDOW, owner, number
            ),
        )

    def _with_segment(self, nbytes: int, step: Callable[[int, int], T]) -> T:
        """A step of all ranks that maps shared memory, which the first rank makes."""
        host = self.host
        session, owner = host.session, host.world_ranks[0]
        mine = together(
            host, lambda: session.engine.create(nbytes) if host.rank == 0 else 0
        )
        rows = gather_bytes(host, mine.to_bytes(8, "little"))
        number = int.from_bytes(rows[0], "little")
        try:
            session.await_segment(owner, number, host.timeout_s)
            return together(host, lambda: step(owner, number))
        finally:  # who has mapped it keeps it
            if host.rank == 0:
                session.engine.drop(number)

    def _connect(self) -> Facts:
        """Map the memory of the others, or share memory of the host with them."""
        host, device = self.host, _native.cuda_device(self.ordinal)
        about = device.uuid + device.multiprocessors.to_bytes(4, "little")
        about += _most_blocks().to_bytes(4, "little")
        about += bytes([may_use_packets(0)])
        rows = gather_bytes(host, about + placement.wanted())
        why = self._place([row[len(about) :] for row in rows])
        together(host, self.native.start)
        uuids = [row[:16] for row in rows]
        sizes = [int.from_bytes(row[16:20], "little") for row in rows]
        blocks = [int.from_bytes(row[20:24], "little") for row in rows]
        packets = not why and all(row[24] for row in rows)
        sharing = max(uuids.count(u) for u in uuids)
        return Facts(sharing, min(sizes), min(blocks), packets, why)

    def _place(self, wanted: Sequence[bytes]) -> str:
        """Place words and windows; why they are in host memory, if they are."""
        host = self.host
        why = placement.why_on_host(wanted)
        if not why:
            together(host, self.native.allocate)
        announced = gather_bytes(host, together(host, self.native.announcement))
        missed = gather_texts(
            host, together(host, lambda: self.native.connect(announced))
        )
        for rank, reason in enumerate(missed):
            if reason and not why:
                why = f"rank {rank}: {reason}"
        if why:
            placement.refuse_host(wanted, why)
            self.native.disconnect()
            nbytes = _native.device_host_bytes(host.world_size, WINDOW)
            self._with_segment(nbytes, self.native.place_on_host)
        return why

    def check(self, what: str, words: Callable[[], str] = lambda: "") -> None:
        """Raise if the communicator has failed, on the host or on a device."""
        self.native.look()
        self.host.check_usable(what, words)

    def ranks_here(self) -> int:
        """How many ranks are threads of this process."""
        return self.native.ranks_here()

    def ended(self) -> int:
        """How many calls have ended at least."""
        return self.native.ended()

    def launch(
        self,
        call: Call,
        reduction: Reduction,
        how: CallOptions,
        stream: int,
        current: int,
    ) -> bool:
        """Start a call; whether it was captured for a graph instead."""
        limit = self.host.timeout_s if how.timeout_s is None else how.timeout_s
        self.host.exceeded_s = limit  # for the error, if it is
        number = self.start(
            self.prepared(call, reduction, how),
            *call.addresses,
            stream,
            current,
            nanoseconds(limit),
            held_bytes(call, beside=stream != current),
            (call.input, call.output),
            queued=how.async_op,
        )
        if number is None:  # it was refused: the communicator has failed
            self.check(call.collective)
            raise DeviceError(f"{call.collective}: a rank has closed its device half")
        return number == 0

    def start(
        self,
        prepared: Prepared,
        input_at: int,
        output_at: int,
        stream: int,
        current: int,
        timeout_ns: int,
        held: int,
        arrays: object,
        *,
        queued: bool = False,
    ) -> int | None:
        """Launch a call on a stream, after what is on the current one; its number.

        0 if it was captured for a graph instead; None if it was refused. `arrays` are
        kept until it has ended, if they hold bytes. Those of a call that was captured
        are kept by whoever keeps the graph.
        """
        plan, kernel, shape = prepared
        number = self.native.launch(
            plan,
            kernel,
            input_at,
            output_at,
            stream,
            current,
            timeout_ns,
            shape.blocks,
            shape.threads,
            shape.packets,
            queued,
            held,
        )
        if number == 0:  # a graph may use it at any time
            self._captured[id(plan)] = plan
        elif number is not None and held:
            self.kept.append((number, arrays))
            self.release_some()
        return number

    def prepared(self, call: Call, reduction: Reduction, how: CallOptions) -> Prepared:
        """What such a call runs."""
        op = reduction.op if call.collective in REDUCING else None
        nbytes = call.total * call.dtype.itemsize
        plan = self._plan(call, reduction, how)
        return Prepared(
            plan,
            kernel(self.ordinal, call.dtype, op, one_device=self._one_device),
            self.shape(nbytes, plan.fits_packets),
        )

    def shape(self, nbytes: int, fits: Callable[[int], bool]) -> LaunchShape:
        """How a call of this size is launched; the same on all ranks.

        `fits` tells whether the data travel with flags in so many blocks.
        """
        blocks = self._blocks(nbytes, packets=True)
        if self.may_use_packets(nbytes) and fits(blocks):
            return LaunchShape(blocks, _native.PACKET_THREADS, True)
        threads = next(n for limit, n in THREADS if limit is None or nbytes <= limit)
        return LaunchShape(self._blocks(nbytes, packets=False), threads, False)

    def may_use_packets(self, nbytes: int) -> bool:
        """Whether the data of a call of this size travel with flags, if they fit."""
        return self.facts.packets and may_use_packets(nbytes)

    def _blocks(self, nbytes: int, *, packets: bool) -> int:
        facts = self.facts
        resident = 2 * facts.multiprocessors  # of 512 threads with 64 registers each
        share = resident // (facts.ranks_per_device * COMMUNICATORS_AT_ONCE)
        limit = max(1, min(share, facts.most_blocks))
        each = BYTES_PER_BLOCK
        if packets:
            limit = min(limit, _native.MOST_PACKET_BLOCKS)
            each = BYTES_PER_PACKET_BLOCK
        return max(1, min(limit, -(-nbytes // each)))

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
                packets=self.may_use_packets(call.total * dtype.itemsize),
            )
            spec = self.host.spec(choice.algorithm)
            kind = CallKind.of(call, reduction, spec, how.label)
            if how.reproducible:
                self.host.refuse_other_orders(kind)
            size, rank = self.host.world_size, self.host.rank
            plan = device_plan(kind, size, rank, window=WINDOW)
            if len(self._plans) > MOST_PLANS:
                self._plans.clear()
            found = self._plans[key] = _native.DevicePlan(self.native, plan)
        return found

    def synchronize(self, timeout_s: float | None) -> None:
        """Wait on the host until all calls have ended; raise if one has failed."""
        await_device(self.native.is_idle, timeout_s, "synchronize")
        self.release()
        self.check("synchronize")

    def close(self) -> None:
        """Wait for the calls in flight, and release its memory."""
        self.native.close()
        self.kept.clear()
        self._plans.clear()
        self._captured.clear()


def may_use_packets(nbytes: int) -> bool:
    """Whether this rank lets the data of a call of this size travel with flags."""
    return nbytes <= PACKETS and os.environ.get(PACKETS_VARIABLE) != "0"


def _most_blocks() -> int:
    """The limit of the environment, or of the kernel."""
    most = os.environ.get(BLOCKS, "")
    if not most.isdigit():
        return int(_native.MOST_DEVICE_BLOCKS)
    return max(1, min(int(most), _native.MOST_DEVICE_BLOCKS))
