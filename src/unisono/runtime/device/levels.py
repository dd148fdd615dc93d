"""The groups of a communicator on several hosts, for calls on CUDA arrays.

Ranks of one host reach each other through the memory of their devices, ranks of several
by the network. So, where hosts have several ranks, most calls have stages: inside
hosts, and between the ranks of a rail, one of each host (`routes.py`). There are as
many rails as the smallest host has ranks. Calls of other kinds, with an algorithm that
the caller names, or in the order of ranks (`reproducible`), are sent in pieces among
all ranks. A rail has two communicators, which its pieces take in turn; if every host
has one rank, so have all ranks.

A call in stages is announced to all ranks by a call without bytes, so that calls which
differ and ranks which do not come are found and named.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from unisono.errors import CollectiveMismatch, DeviceError, UnisonoError
from unisono.runtime.call.arguments import Call, barrier
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.work import Work
from unisono.runtime.device.host_half import HostHalf
from unisono.runtime.device.layout import Layout, has_stages
from unisono.runtime.device.pipeline import Wire
from unisono.runtime.device.plane import DevicePlane
from unisono.runtime.device.routes import Groups, Launch, Route, Staged
from unisono.runtime.observe.failures import FailureCode, describe_on_device

GRACE_S = 2.0
"""Groups wait so much longer than all ranks together, who know best who is missing."""
_LOOK_S = 0.005
_COPIES = Reduction("sum")
_NOTHING = np.empty(0, dtype=np.uint8)


Split = Callable[[int | None, str], HostHalf | None]
"""Makes communicators of the ranks that give the same number; all ranks call it.

With None a rank takes no part. The text is what it is called.
"""


class GroupFailed(UnisonoError):
    """A group of the communicator has failed; which, and why, is found out then."""


class Levels:
    """The groups of a communicator on several hosts, as one rank knows them."""

    def __init__(self, host: HostHalf, ordinal: int, split: Split) -> None:
        """Made by all ranks together."""
        hosts = host.hosts_if_several
        self._all: tuple[HostHalf, ...] = (_made(split(0, "cuda")),)
        self.timeout_s = host.timeout_s
        self.layout = Layout(hosts)
        place = self.layout.places[host.rank]
        self._rails: tuple[HostHalf, ...] = ()
        self._inside: HostHalf | None = None
        self.plane: DevicePlane | None = None
        here, rail = hosts[host.rank], place if place < self.layout.rails else None
        if max(self.layout.sizes) > 1:
            self._inside = _made(split(here, f"cuda host {here}"))
            names = f"cuda rail {place}", f"cuda rail {place}, in turn"
            rails = [split(rail, name) for name in names]
            self._rails = tuple(core for core in rails if core is not None)
            self.plane = DevicePlane(self._inside, ordinal)
        else:
            self._all += (_made(split(0, "cuda, in turn")),)

    def route(self, call: Call, reduction: Reduction, how: CallOptions) -> Route:
        """What a call does here; `how` has its timeout."""
        reduction.check(call.dtype)
        about = f"{describe_on_device(call, reduction.op)} {how.label}".rstrip()
        how = how._replace(label=about, async_op=True, stream=None)
        if not has_stages(self.layout, call.collective, how):
            return Route(call, wire=Wire(self._all, call, reduction, how))
        assert self.plane is not None
        limit = self.timeout_s if how.timeout_s is None else how.timeout_s
        at = self._all[0].position
        groups = Groups(at, self.layout, self.plane, self._rails)
        return Staged(groups, call, reduction, limit + GRACE_S).route(how)

    def announce(self, how: CallOptions) -> Work:
        """Tell all ranks of a call in stages."""
        work: Work = self._all[0].run(barrier(_NOTHING), _COPIES, how)
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
        """All of them: first those of all ranks."""
        inside = () if self._inside is None else (self._inside,)
        return [*self._all, *inside, *self._rails]

    def _told(self) -> HostHalf | None:
        """A group of all ranks that has failed, if one has.

        Of two, the one that has found out why: `fail` has aborted the other.
        """
        failed = [core for core in self._all if _has_failed(core)]
        failed.sort(key=lambda core: _code(core) is FailureCode.SEVERED)
        return failed[0] if failed else None

    def explained(self, host: HostHalf, error: BaseException) -> BaseException:
        """Why a call has failed, which this rank knows by `error`.

        What the group of all ranks says comes first: it names the ranks as the caller
        does, and knows the calls of all. So it is given a moment to find out.
        """
        until = time.monotonic() + GRACE_S
        failing = _has_failed(host) or any(map(_has_failed, self._groups()))
        while failing and self._told() is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if (told := self._told()) is not None:
            own = isinstance(error, UnisonoError) and type(error) is not GroupFailed
            if own and not isinstance(error, CollectiveMismatch):
                own = _code(told) is not FailureCode.MISMATCH
            return error if own else told.failure(refused="a call")
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
        told = self._told()
        return None if told is None else told.failure(refused="a call")

    def _failed_group(self) -> HostHalf | None:
        return next((core for core in self._groups() if _has_failed(core)), None)

    def fail(self, host: HostHalf) -> None:
        """Let the communicator and its groups fail, for all ranks."""
        known = self._told() or (host if _has_failed(host) else None)
        code, culprit = FailureCode.NONE, host.rank
        if known is not None:
            number, culprit, _, _ = known.native.failure()
            code = FailureCode(number)
        for core in (host, *self._all):
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


def _made(core: HostHalf | None) -> HostHalf:
    assert core is not None
    return core


def _code(core: HostHalf) -> FailureCode:
    return FailureCode(core.native.failure()[0])


def _has_failed(core: HostHalf) -> bool:
    return _code(core) is not FailureCode.NONE
