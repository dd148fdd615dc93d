"""What the compiled adapter asks of Python for the calls that it makes by itself.

It asks once for what a kind of call needs, and from then on only where a call fails, or
where something is wanted of its work that the engine alone does not know.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from unisono.errors import UnisonoError, UsageError
from unisono.interop.torch.calls import OPS
from unisono.interop.torch.collectives import TorchCollectives
from unisono.interop.torch.dynamo import leave_out
from unisono.interop.torch.errors import for_torch
from unisono.interop.torch.tensors import DTYPE_OF, moved_as
from unisono.interop.torch.work import PendingCall
from unisono.runtime.call.work import Work as Part
from unisono.runtime.plan.plans import CODES


class PlannedCalls:
    """The calls of one group on dense tensors of the CPU, used as they are."""

    def __init__(self, calls: TorchCollectives) -> None:
        """`calls` makes all others."""
        self.calls = calls

    def plan_for(
        self, collective: str, dtype: torch.dtype, count: int, op: Any, root: int
    ) -> tuple[Any, Any] | None:
        """The communicator and the plan of a collective, both the core's own.

        None if the call needs more.
        """
        name, kind = OPS.get(op), DTYPE_OF.get(dtype)
        if name is None or kind is None:
            return None
        if collective == "barrier" and "cuda" in self.calls.devices:
            return None  # the device may have to be waited for
        core = self.calls.core
        try:
            return core.native, core.plan_of(collective, kind, count, name, root)
        except UnisonoError as error:
            raise for_torch(error) from None

    def message_for(self, name: str, dtype: torch.dtype) -> tuple[Any, int, int, int]:
        """The communicator, the codes of the call and of the type it is moved as.

        The last is how many elements of that type one of the tensor's has.
        """
        kind, times = moved_as(torch.empty(0, dtype=dtype, device="cpu"))
        return self.calls.core.native, CODES[name], kind.code, times

    def raise_failure(self, timeout_s: float) -> None:
        """Raise why a blocking call has failed."""
        raise for_torch(self.calls.core.failure(timeout_s))

    def pending(
        self, native: Any, what: str, timeout_s: float, outputs: Any
    ) -> PendingCall:
        """The work of a call that was begun without Python."""
        part = self._part(native, what, timeout_s)
        return PendingCall(outputs, [part], None, self.calls.completer)

    def leave(self, latest: Any) -> None:
        """Leave the group after the latest call, or None, has ended."""
        part = None
        if latest is not None:
            with suppress(UnisonoError):  # in a fork
                part = self._part(latest, "a call")
        self.calls.leave(part)

    def _part(self, native: Any, what: str, timeout_s: float | None = None) -> Part:
        core = self.calls.core
        if core.session.engine.forked():
            error = UsageError(
                f"{what}: this process is a fork of the rank that made the call; wait "
                "for it there"
            )
            raise for_torch(error)
        return Part(native, None, core, timeout_s, what, droppable=True)


leave_out(PlannedCalls)
