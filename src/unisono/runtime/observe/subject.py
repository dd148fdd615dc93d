"""What observers read of a communicator: the part of its core they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from unisono import _native
from unisono.algorithms import Spec
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.options import How
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.plan.plans import Kind
from unisono.transports.session import Peer, Session


class Subject(Protocol):
    """A communicator's core, as `explain`, the monitor and the traffic count see it."""

    rank: int
    world_size: int
    name: str
    hosts: tuple[int, ...]
    hosts_if_several: tuple[int, ...]
    world_ranks: tuple[int, ...]
    native: _native.Comm
    transport: Session
    closed: bool
    exceeded_s: float
    """The limit of the call by which this rank broke the communicator, if it did."""

    @property
    def peers(self) -> list[Peer]:
        """Who the ranks are."""

    @property
    def timeout_s(self) -> float:
        """The limit of a call that is given none of its own."""

    @property
    def plans(self) -> Mapping[object, _native.Plan]:
        """Those that are kept, by what they follow from."""

    @property
    def single_use(self) -> Iterable[object]:
        """Keys of plans that were not kept."""

    def spec(self, algorithm: str) -> Spec:
        """An algorithm, with what its files held when it was first used here."""

    def kind(self, call: Call, reduction: Reduction, how: How) -> Kind:
        """What the ranks must agree on in a call."""
