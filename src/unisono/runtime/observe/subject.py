"""The part of a communicator's core that observers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from unisono import _native
from unisono.algorithms import Spec
from unisono.devices.arrays import DeviceView
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.call.work import CallsInFlight
from unisono.runtime.plan.plans import CallKind
from unisono.schedule.collective import Collective
from unisono.transports.session import Peer, Session


class DeviceCall(NamedTuple):
    """A call on an array of a device that is to be explained.

    `hosts` are those of the n ranks, if there are several; `nbytes` are those of the
    largest buffer that any rank holds.
    """

    n: int
    hosts: tuple[int, ...]
    what: Collective
    view: DeviceView
    nbytes: int
    root: int
    op: str
    how: CallOptions


class DeviceExplainer(Protocol):
    """The device half of a communicator, for `explain`."""

    def explain(self, call: DeviceCall) -> str:
        """What would run for a call on an array of a device."""


class ObservedCore(Protocol):
    """A communicator's core, for `explain`, the monitor and the traffic counter."""

    rank: int
    world_size: int
    name: str
    hosts: tuple[int, ...]
    hosts_if_several: tuple[int, ...]
    world_ranks: tuple[int, ...]
    native: _native.Comm
    in_flight: CallsInFlight
    session: Session
    closed: bool
    exceeded_s: float
    """The timeout of the call that broke the communicator on this rank, if any."""

    @property
    def device(self) -> DeviceExplainer:
        """Its device half."""

    @property
    def peers(self) -> list[Peer]:
        """Process and host of each rank."""

    @property
    def timeout_s(self) -> float:
        """The timeout of calls without one of their own."""

    @property
    def plans(self) -> Mapping[object, _native.Plan]:
        """The cached plans, by their keys."""

    @property
    def single_use(self) -> Iterable[object]:
        """Keys of plans that are not cached."""

    def spec(self, algorithm: str) -> Spec:
        """An algorithm, with its files as they were when it was first used here."""

    def kind(self, call: Call, reduction: Reduction, how: CallOptions) -> CallKind:
        """What the ranks must agree on in a call."""
