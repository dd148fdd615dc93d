"""How a call on CUDA arrays is divided between the inside of hosts and the network.

Ranks of one host reach each other through the memory of their devices, ranks of several
by the network. So, where hosts have several ranks, a call that reduces or copies whole
arrays has three stages:

1. inside every host, each of its lanes gets a share: of the host's sum, or of the data
   of a root that is there;
2. lanes of the same number, one rank of each host, make the same call on their share,
   through memory of the host;
3. inside every host all ranks, or the root, collect the shares.

There are as many lanes as the smallest host has ranks. Calls of other kinds, with an
algorithm that the caller names, or in the order of ranks (`reproducible`), are sent in
pieces among all ranks. A call in stages is announced to all ranks by a call without
bytes, so that calls which differ and ranks which do not come are found and named.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from unisono import _native
from unisono.errors import DeviceError, UnisonoError
from unisono.runtime.call.arguments import Call, barrier
from unisono.runtime.call.buffers import Buffer
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.timeouts import nanoseconds
from unisono.runtime.call.work import Work
from unisono.runtime.device.layout import Layout, has_stages
from unisono.runtime.device.pieces import Pieces
from unisono.runtime.device.pipeline import SLOT, Wire
from unisono.runtime.device.plane import DevicePlane, Prepared
from unisono.runtime.device.stream_calls import HostHalf
from unisono.runtime.observe.failures import FailureCode, describe_on_device
from unisono.schedule.collective import COLLECTIVES, Collective, Holders

GRACE_S = 2.0
"""Groups wait so much longer than all ranks together, who know best who is missing."""
_LOOK_S = 0.005
_COPIES = Reduction("sum")
_NOTHING = np.empty(0, dtype=np.uint8)


Split = Callable[[int | None], HostHalf | None]
"""Makes communicators of the ranks that give the same number; all ranks call it.

With None a rank takes no part.
"""


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
    first: Launch | None = None
    wire: Wire | None = None
    last: Launch | None = None
    announced: CallOptions | None = None
    scratch: _native.CudaMemory | None = None


class GroupFailed(UnisonoError):
    """A group of the communicator has failed; which, and why, is found out then."""


class Levels:
    """The groups of a communicator on several hosts, as one rank knows them."""

    def __init__(self, host: HostHalf, ordinal: int, split: Split) -> None:
        """Made by all ranks together."""
        hosts = host.hosts_if_several
        self._all = _made(split(0))
        self.timeout_s = host.timeout_s
        self._ordinal = ordinal
        self.layout = Layout(hosts)
        self._hosts = hosts
        self.place = self.layout.places[host.rank]
        self._lane: HostHalf | None = None
        self._inside: HostHalf | None = None
        self.plane: DevicePlane | None = None
        if max(self.layout.sizes) > 1:
            self._inside = _made(split(hosts[host.rank]))
            self._lane = split(self.place if self.place < self.layout.lanes else None)
            self.plane = DevicePlane(self._inside, ordinal)

    def route(self, call: Call, reduction: Reduction, how: CallOptions) -> Route:
        """What a call does here; `how` has its timeout."""
        reduction.check(call.dtype)
        about = f"{describe_on_device(call, reduction.op)} {how.label}".rstrip()
        how = how._replace(label=about, async_op=True, stream=None)
        if not has_stages(self.layout, call.collective, how):
            return Route(call, wire=Wire(self._all, call, reduction, how))
        return self._staged(call, reduction, how)

    def _staged(self, call: Call, reduction: Reduction, how: CallOptions) -> Route:
        what = COLLECTIVES[call.collective]
        assert self._inside is not None
        shares = self.layout.shares(call.total, self._inside.world_size)
        here = self._is_root_here(call)
        begin, mine = sum(shares[: self.place]), shares[self.place]
        area, scratch = self._area(call, begin, mine)
        share = Buffer(None, area, (mine,), call.dtype, self._ordinal)
        limit = how.timeout_s if how.timeout_s is not None else self.timeout_s
        plain = CallOptions(timeout_s=limit + GRACE_S)
        inside = _Inside(self, call, reduction, plain, shares, share)
        wire = self._wire(what, call, reduction, share, plain, here=here)
        number = (
            1 if wire is None else Pieces(wire.call, wire.core.position, SLOT).number
        )
        return Route(
            call,
            inside.first(here=here),
            wire,
            inside.last(number, here=here),
            how,
            scratch,
        )

    def _is_root_here(self, call: Call) -> bool:
        return self._hosts[call.root] == self._hosts[self._all.rank]

    def _area(
        self, call: Call, begin: int, count: int
    ) -> tuple[int, _native.CudaMemory | None]:
        """Where this rank's share is: in the output, or in memory of its own."""
        item = call.dtype.itemsize
        if call.output is not None:
            return call.output.address + begin * item if count else 0, None
        made = _native.CudaMemory(self._ordinal, max(1, count * item))
        return made.address, made

    def _wire(
        self,
        what: Collective,
        call: Call,
        reduction: Reduction,
        share: Buffer,
        plain: CallOptions,
        *,
        here: bool,
    ) -> Wire | None:
        """The same call on a share, by the ranks of this lane."""
        if self._lane is None:
            return None
        root = 0
        if what.rooted:
            members = [self._all.world_ranks.index(r) for r in self._lane.world_ranks]
            root = next(
                i
                for i, r in enumerate(members)
                if self._hosts[r] == self._hosts[call.root]
            )
        reads = what.before is not Holders.ROOT or here
        writes = what.after is not Holders.ROOT or here
        made = Call(
            call.collective,
            share.count,
            share if reads else None,
            share if writes else None,
            None,
            None,
            root,
        )
        divisor = self._all.world_size if reduction.op == "mean" else 1
        op = _COPIES if reduction.op == "mean" else reduction
        return Wire(self._lane, made, op, plain._replace(async_op=True), divisor)

    def announce(self, how: CallOptions) -> Work:
        """Tell all ranks of a call in stages."""
        work: Work = self._all.run(barrier(_NOTHING), _COPIES, how)
        return work

    def launch(self, launch: Launch, stream: int) -> None:
        """Start a kernel."""
        assert self.plane is not None
        prepared, input_at, output_at, timeout_ns = launch
        number = self.plane.start(
            prepared,
            input_at,
            output_at,
            stream,
            stream,
            timeout_ns,
            0,
            None,
            queued=True,
        )
        if number is None:
            self.look()
            raise DeviceError("a rank of this host has closed its device half")

    def look(self) -> None:
        """Raise GroupFailed if a group has failed."""
        if self.plane is not None:
            self.plane.native.look()
        if any(_has_failed(core) for core in self._groups()):
            raise GroupFailed("a group of the communicator has failed")

    def _groups(self) -> list[HostHalf]:
        """All of them: first that of all ranks."""
        found = (self._all, self._inside, self._lane)
        return [core for core in found if core is not None]

    def explained(self, host: HostHalf, error: BaseException) -> BaseException:
        """Why a call has failed, which this rank knows by `error`.

        What the group of all ranks says comes first: it names the ranks as the caller
        does, and knows the calls of all. So it is given a moment to find out.
        """
        until = time.monotonic() + GRACE_S
        failing = _has_failed(host) or any(map(_has_failed, self._groups()))
        while failing and not _has_failed(self._all) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if _has_failed(self._all):
            own = isinstance(error, UnisonoError) and type(error) is not GroupFailed
            return error if own else self._all.failure(refused="a call")
        if not _has_failed(host) and (failed := self._failed_group()) is not None:
            code, culprit, _, _ = failed.native.failure()
            found = host.world_ranks.index(failed.world_ranks[culprit])
            host.native.abort_unreachable(found, code == FailureCode.TIMEOUT)
        if _has_failed(host):
            return host.failure(refused="a call between hosts")
        if isinstance(error, UnisonoError):
            return error
        return DeviceError(f"a call between hosts failed: {error}")

    def error(self) -> UnisonoError | None:
        """Why the group of all ranks has failed, if it has."""
        return self._all.failure(refused="a call") if _has_failed(self._all) else None

    def _failed_group(self) -> HostHalf | None:
        return next((core for core in self._groups() if _has_failed(core)), None)

    def fail(self, host: HostHalf) -> None:
        """Let the communicator and its groups fail, for all ranks."""
        known = next((c for c in (self._all, host) if _has_failed(c)), None)
        code, culprit = FailureCode.NONE, host.rank
        if known is not None:
            number, culprit, _, _ = known.native.failure()
            code = FailureCode(number)
        for core in (host, self._all):
            if not _has_failed(core):
                core.native.abort_unreachable(culprit, code == FailureCode.TIMEOUT)
        for core in self._groups():
            if not _has_failed(core):
                core.native.abort_unreachable(core.rank, False)

    def sent_bytes(self) -> int:
        """How many bytes this rank has sent in all groups."""
        natives = [core.native for core in self._groups()]
        return sum(c.sent_bytes() + c.sent_on_devices() for c in natives)

    def close(self) -> None:
        """Close all groups."""
        if self.plane is not None:
            self.plane.close()
        for core in reversed(self._groups()):
            core.close()


class _Inside:
    """The two stages of a call inside this host."""

    def __init__(
        self,
        levels: Levels,
        call: Call,
        reduction: Reduction,
        how: CallOptions,
        shares: list[int],
        share: Buffer,
    ) -> None:
        assert levels.plane is not None
        self._plane, self._levels = levels.plane, levels
        self._call, self._how, self._share = call, how, share
        self._op = _COPIES if reduction.op == "mean" else reduction
        self._shares = tuple(shares)
        self._what = COLLECTIVES[call.collective]

    def first(self, *, here: bool) -> Launch | None:
        """A share for each lane: of the sum, or of the root's data if it is here."""
        if self._what.before is Holders.EVERYWHERE:
            return self._launch("reduce_scatter", self._call.input, self._share, 1)
        if not here:
            return None
        return self._launch("scatter", self._call.input, self._share, 1)

    def last(self, pieces: int, *, here: bool) -> Launch | None:
        """All shares for each rank, or for the root if it is here.

        It may wait for the pieces of other lanes, each of which may take the timeout.
        """
        if self._what.after is Holders.EVERYWHERE:
            return self._launch("all_gather", self._share, self._call.output, pieces)
        if not here:
            return None
        return self._launch("gather", self._share, self._call.output, pieces)

    def _launch(
        self, name: str, source: Buffer | None, target: Buffer | None, times: int
    ) -> Launch:
        root = (
            self._levels.layout.places[self._call.root]
            if name in ("scatter", "gather")
            else 0
        )
        made = Call(name, self._shares, source, target, None, None, root)
        prepared = self._plane.prepared(made, self._op, CallOptions())
        limit = self._how.timeout_s or 0.0
        return Launch(prepared, *made.addresses, nanoseconds(limit * times))


def _made(core: HostHalf | None) -> HostHalf:
    assert core is not None
    return core


def _has_failed(core: HostHalf) -> bool:
    return core.native.failure()[0] != FailureCode.NONE
