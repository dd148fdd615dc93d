"""The stages of a call between hosts, as one rank takes part in them.

All kinds are made of calls inside the host, which are kernels, and of one call of a
rail, which is sent in pieces:

                    inside                     across          inside
    all_reduce      reduce_scatter             all_reduce      all_gather
    reduce          reduce_scatter             reduce          gather, by the root
    broadcast       scatter, by the root       broadcast       all_gather
    all_gather                                 all_gather      all_gather, by host
    reduce_scatter  reduce_scatter, by host    reduce_scatter

In the first three each rail has a share of the whole array. In the others each rank is
a rail, and has the rows of the ranks of its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from unisono import _native
from unisono.runtime.call.arguments import Call, Position
from unisono.runtime.call.buffers import Buffer
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.timeouts import nanoseconds
from unisono.runtime.device import pipeline
from unisono.runtime.device.host_half import HostHalf
from unisono.runtime.device.layout import Layout
from unisono.runtime.device.pieces import FEWEST
from unisono.runtime.device.pipeline import Wire
from unisono.runtime.device.plane import DevicePlane, Prepared
from unisono.schedule.collective import COLLECTIVES, Contract, Holders

_SUM = Reduction("sum")


class Launch(NamedTuple):
    """A kernel inside this host: what it runs, on which addresses."""

    prepared: Prepared
    input_at: int
    output_at: int
    timeout_ns: int


class Route(NamedTuple):
    """What a call does on this rank: the stages that it takes part in.

    `announced` says what all ranks are told first; `scratch` is kept until the end.
    """

    call: Call
    first: tuple[Launch, ...] = ()
    wire: Wire | None = None
    last: tuple[Launch, ...] = ()
    announced: CallOptions | None = None
    scratch: _native.CudaMemory | None = None


@dataclass(frozen=True)
class Groups:
    """Who takes part: all ranks, those of this host, and those of this rail.

    `rails` are communicators of the same ranks; a rank without a rail has none.
    """

    at: Position
    layout: Layout
    plane: DevicePlane
    rails: tuple[HostHalf, ...]


class Staged:
    """A call in stages. `limit_s` is how long each of its waits may take."""

    def __init__(
        self, groups: Groups, call: Call, reduction: Reduction, limit_s: float
    ) -> None:
        """Nothing is launched by it."""
        self._groups, self._layout = groups, groups.layout
        self._plane, self._call = groups.plane, call
        self._place = self._layout.places[groups.at.rank]
        self._what = COLLECTIVES[call.collective]
        self._is_mean = reduction.op == "mean"
        self._op = _SUM if self._is_mean else reduction
        self._limit_s = limit_s
        self._item = call.dtype.itemsize
        self._label = ""
        self._scratch: _native.CudaMemory | None = None

    def route(self, announced: CallOptions) -> Route:
        """Its stages."""
        self._label = announced.label
        if self._what.owned:
            made = self._gathered() if self._what.before is Holders.OWNER else None
            first, wire, last = made or self._scattered()
        else:
            first, wire, last = self._whole()
        return Route(self._call, first, wire, last, announced, self._scratch)

    # --- one share of the array for each rail

    def _whole(self) -> tuple[tuple[Launch, ...], Wire | None, tuple[Launch, ...]]:
        call, what = self._call, self._what
        here = self._layout.is_same_host(call.root, self._groups.at.rank)
        shares = self._layout.shares(call.total, self._groups.at)
        begin, mine = sum(shares[: self._place]), shares[self._place]
        share = self._buffer(self._area(begin, mine), mine)
        first: tuple[Launch, ...] = ()
        last: tuple[Launch, ...] = ()
        if what.before is Holders.EVERYWHERE:
            first = (self._launch("reduce_scatter", shares, call.input, share),)
        elif here:
            first = (self._launch("scatter", shares, call.input, share),)
        times = self._pieces(shares[0])
        if what.after is Holders.EVERYWHERE:
            last = (self._launch("all_gather", shares, share, call.output, times),)
        elif here:
            last = (self._launch("gather", shares, share, call.output, times),)
        reads = what.before is not Holders.ROOT or here
        writes = what.after is not Holders.ROOT or here
        made = Call(
            call.collective,
            mine,
            share if reads else None,
            share if writes else None,
            None,
            None,
            self._layout.rail_root(call.root, self._place) if what.rooted else 0,
        )
        return first, self._wire(made), last

    def _area(self, begin: int, count: int) -> int:
        """Where this rank's share is: in the output, or in memory of its own."""
        if self._call.output is None:
            return self._scratch_for(count)
        return self._call.output.address + begin * self._item if count else 0

    # --- the rows of each rank

    def _gathered(self) -> tuple[tuple[Launch, ...], Wire | None, tuple[Launch, ...]]:
        """Rows of this place from all hosts, then those of each host inside."""
        call = self._call
        assert call.output is not None
        begins, rows, rail = self._rows()
        made = Call(
            "all_gather",
            tuple(rows[r] for r in rail),
            call.input,
            call.output,
            None,
        )
        times, last = self._pieces(max(rows) * len(rail)), []
        for ranks in self._layout.ranks:
            mine = ranks[self._place]
            share = self._buffer(self._at(call.output, begins[mine]), rows[mine])
            target = self._buffer(
                self._at(call.output, begins[ranks[0]]), sum(rows[r] for r in ranks)
            )
            counts = [rows[r] for r in ranks]
            last.append(self._launch("all_gather", counts, share, target, times))
        wire = self._wire(made, tuple(begins[r] for r in rail))
        return (), wire, tuple(last)

    def _scattered(self) -> tuple[tuple[Launch, ...], Wire | None, tuple[Launch, ...]]:
        """The host's sums of the rows of this place, then their sums across."""
        call = self._call
        assert call.input is not None
        begins, rows, rail = self._rows()
        sums = self._scratch_for(sum(rows[r] for r in rail))
        first, done = [], 0
        for ranks in self._layout.ranks:
            mine = ranks[self._place]
            share = self._buffer(sums + done * self._item, rows[mine])
            source = self._buffer(
                self._at(call.input, begins[ranks[0]]), sum(rows[r] for r in ranks)
            )
            counts = [rows[r] for r in ranks]
            first.append(self._launch("reduce_scatter", counts, source, share))
            done += rows[mine]
        counts_of_rail = tuple(rows[r] for r in rail)
        made = Call(
            "reduce_scatter",
            counts_of_rail,
            self._buffer(sums, done),
            call.output,
            None,
        )
        return tuple(first), self._wire(made), ()

    def _rows(self) -> tuple[list[int], list[int], list[int]]:
        """Where each rank's rows begin, how many elements, and the ranks of a rail."""
        n = self._groups.at.n
        contract = Contract(self._what, n, 0, n)
        rows = contract.chunk_sizes(self._call.counts).tolist()
        begins = [sum(rows[:r]) for r in range(n)]
        return begins, rows, [ranks[self._place] for ranks in self._layout.ranks]

    # --- what they are made of

    def _at(self, buffer: Buffer, element: int) -> int:
        return buffer.address + element * self._item

    def _buffer(self, address: int, count: int) -> Buffer:
        at = address if count else 0
        return Buffer(None, at, (count,), self._call.dtype, self._plane.ordinal)

    def _scratch_for(self, count: int) -> int:
        nbytes = max(1, count * self._item)
        self._scratch = _native.CudaMemory(self._plane.ordinal, nbytes)
        return self._scratch.address

    def _pieces(self, count: int) -> int:
        """At most so many pieces a rail sends, each of which may take the limit."""
        return 2 + max(FEWEST, count * self._item // pipeline.SLOT)

    def _launch(
        self,
        name: str,
        counts: list[int],
        source: Buffer | None,
        target: Buffer | None,
        times: int = 1,
    ) -> Launch:
        """A kernel; it may wait for `times` waits of others."""
        root = 0
        if name in ("scatter", "gather"):
            root = self._layout.places[self._call.root]
        made = Call(name, tuple(counts), source, target, None, None, root)
        prepared = self._plane.prepared(made, self._op, CallOptions())
        limit_ns = nanoseconds(self._limit_s * times)
        return Launch(prepared, *made.addresses, limit_ns)

    def _wire(self, call: Call, places: tuple[int, ...] | None = None) -> Wire | None:
        """A call of the ranks of this rail."""
        if not self._groups.rails:
            return None
        how = CallOptions(timeout_s=self._limit_s, async_op=True, label=self._label)
        divisor = self._groups.at.n if self._is_mean else 1
        return Wire(self._groups.rails, call, self._op, how, divisor, places)
