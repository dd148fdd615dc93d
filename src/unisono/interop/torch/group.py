"""What a call needs of the group that it is made on."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from unisono.interop.torch.work import Completer, PendingCall
from unisono.runtime.call.work import Work as Part
from unisono.runtime.core import Core


class GroupHandle(Protocol):
    """The part of `Collectives` that its calls use."""

    rank: int
    size: int
    latest: Part | None
    completer: Completer

    @property
    def timeout_s(self) -> float:
        """The limit of calls that have none of their own."""

    @property
    def core(self) -> Core:
        """That of the group's communicator."""

    def start(self, *call: Any, **how: Any) -> Part | None:
        """Begin or run one collective of the engine."""

    def begun(self, collective: str) -> Any:
        """The profiler's record of a call that begins."""

    def made(self, work: PendingCall, elements: int) -> PendingCall:
        """Remember a call in flight."""

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any) -> PendingCall:
        """As torch's `_allgather_base`."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> PendingCall:
        """As torch's `allgather`."""
