"""Device, memory of the host, wire, memory of the host, device: in pieces that overlap.

Of a call in pieces, two are copied from the device, two are on the wire, and two are
copied back, at the same time: a device that is busy has the time of two pieces for its
copies. Each has a slot of memory that the driver knows and other ranks of this host can
read; the slots are all the memory of the host that calls need, whatever their size.

A communicator makes one call after the other. So the two on the wire are calls of two
communicators of the same ranks, which the pieces take in turn: while one of them waits
for other ranks, between its rounds or at its end, the other one sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import c_uint8
from typing import NamedTuple

import numpy as np

from unisono import _native
from unisono.dtypes import numpy_dtype
from unisono.reductions import reduce
from unisono.runtime.call.arguments import Call, Position
from unisono.runtime.call.buffers import Buffer
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.work import Work
from unisono.runtime.device.host_half import HostHalf
from unisono.runtime.device.pieces import ALIGNMENT, Piece, Pieces
from unisono.runtime.device.work import pause_after

SLOTS = 6
"""Pieces that are under way at the same time."""
SLOT = 4 << 20
"""Bytes of a piece."""
_WIRE, _BACK = 2, 4
"""How many pieces later a piece is sent, and copied back."""
_LOOK_NS = 20_000_000
_SPINS = 200

Look = Callable[[], None]
"""Raises if the call cannot go on: it is called from time to time."""


class Wire(NamedTuple):
    """How the pieces of a call are sent: by these ranks, as this collective.

    `cores` are communicators of the ranks, which the pieces take in turn. `divisor`:
    the result is divided by it in the memory of the host. `places` are the elements at
    which the shares of the output begin, if they do not follow each other.
    """

    cores: tuple[HostHalf, ...]
    call: Call
    reduction: Reduction
    how: CallOptions
    divisor: int = 1
    places: tuple[int, ...] | None = None


class Pipeline:
    """The slots of one communicator, and the streams that copy from and to them."""

    def __init__(self, host: HostHalf, ordinal: int) -> None:
        """Memory that this rank makes for itself; MemoryError if there is none."""
        self._engine = host.session.engine
        self._segment = self._engine.create(_native.STAGING_HEADER + SLOTS * SLOT)
        try:
            self.staging = _native.CudaStaging(host.native, ordinal, self._segment)
        except BaseException:
            self._engine.drop(self._segment)
            raise
        # Not in a queue of the device with streams that wait for a call.
        self._down, self._up = (
            _native.CudaStream(ordinal, urgent=True) for _ in range(2)
        )
        self._fetched = [_native.CudaEvent(ordinal) for _ in range(SLOTS)]
        self._returned = [_native.CudaEvent(ordinal) for _ in range(SLOTS)]
        self._between = _native.CudaEvent(ordinal)

    @property
    def down(self) -> int:
        """The stream that copies from the device."""
        return self._down.handle

    @property
    def up(self) -> int:
        """The stream that copies to the device."""
        return self._up.handle

    def begin(self, ready: _native.CudaEvent) -> None:
        """The next call begins when an event has come."""
        ready.order(self.down)
        ready.order(self.up)

    def send(self, wire: Wire, look: Look) -> None:
        """Send a call in pieces; returns when the last one is being copied back."""
        at = wire.cores[0].position
        pieces = list(Pieces(wire.call, at, SLOT, wire.places))
        works: dict[int, Work] = {}
        try:
            for step in range(len(pieces) + _BACK):
                look()
                if step < len(pieces):
                    self._fetch(step, pieces[step], wire.call)
                if 0 <= (k := step - _WIRE) < len(pieces):
                    works[k] = self._submit(k, pieces[k], wire, look)
                if (k := step - _BACK) >= 0:
                    self._return(k, pieces[k], wire, works.pop(k), look)
        finally:
            for work in works.values():  # of a call that has failed
                work.allow_drop()

    def spoil(self, call: Call, at: Position) -> None:
        """Fill the output with bytes that are not a number, when nobody reads it."""
        self._between.record(self.down)
        self._between.order(self.up)
        nbytes = Pieces(call, at, SLOT).output_bytes
        if call.output is not None and nbytes:
            self.staging.spoil(call.output.address, nbytes, self.up)

    def _fetch(self, number: int, piece: Piece, call: Call) -> None:
        """Copy the input of a piece from the device, once its slot is free."""
        slot = number % SLOTS
        self._returned[slot].order(self.down)
        at = slot * SLOT
        for offset, nbytes in piece.inputs:
            if nbytes:
                source = call.addresses[0] + offset
                self.staging.to_host(at, source, nbytes, self.down)
            at += nbytes
        self._fetched[slot].record(self.down)

    def _submit(self, number: int, piece: Piece, wire: Wire, look: Look) -> Work:
        """Start the call of a piece among the ranks."""
        slot = number % SLOTS
        await_event(self._fetched[slot], look)
        given, call = wire.call, wire.call
        source = self._buffer(slot * SLOT, piece.input_bytes, call)
        target = self._buffer(_output_at(slot, piece, call), piece.output_bytes, call)
        made = Call(
            given.collective,
            piece.counts,
            source if given.input is not None else None,
            target if given.output is not None else None,
            None,
            None,
            given.root,
            given.shape,
        )
        core = wire.cores[number % len(wire.cores)]
        work: Work = core.run(made, wire.reduction, wire.how)
        return work

    def _buffer(self, at: int, nbytes: int, call: Call) -> Buffer:
        """Memory of a slot, which is kept as long as its call is in flight."""
        address = self.staging.address + at
        shape = (nbytes // call.dtype.itemsize,)
        return Buffer(self.staging, address, shape, call.dtype)

    def _return(
        self, number: int, piece: Piece, wire: Wire, work: Work, look: Look
    ) -> None:
        """Wait for a piece, and copy its output to the device."""
        await_work(work, look)
        slot, call = number % SLOTS, wire.call
        at = _output_at(slot, piece, call)
        if wire.divisor > 1:
            self._divide(at, piece.output_bytes, wire)
        for offset, nbytes in piece.outputs:
            if nbytes:
                self.staging.to_device(call.addresses[1] + offset, at, nbytes, self.up)
            at += nbytes
        self._returned[slot].record(self.up)

    def _divide(self, at: int, nbytes: int, wire: Wire) -> None:
        raw = (c_uint8 * nbytes).from_address(self.staging.address + at)
        sums = np.ctypeslib.as_array(raw).view(numpy_dtype(wire.call.dtype.name))
        reduce(sums, [sums], "mean", divisor=wire.divisor)

    def close(self) -> None:
        """No more calls: the memory is released when nobody uses it."""
        self._engine.drop(self._segment)


def _output_at(slot: int, piece: Piece, call: Call) -> int:
    """Where the output of a piece is: with its input, or behind it."""
    begin = slot * SLOT
    if isinstance(piece.counts, int):
        return begin
    return begin + -(-piece.input_bytes // ALIGNMENT) * ALIGNMENT


def await_event(event: _native.CudaEvent, look: Look) -> None:
    """Wait on the host until a device has come so far."""
    begun = time.monotonic()
    for _ in range(_SPINS):
        if event.query():
            return
    while not event.query():
        look()
        time.sleep(pause_after(time.monotonic() - begun))


def await_work(work: Work, look: Look) -> None:
    """Wait until a call of the engine is done; raise its error if it failed."""
    native = work.native
    while native is not None and native.wait(_LOOK_NS) == 0:
        look()
    work.wait()
