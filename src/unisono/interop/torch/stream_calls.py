"""One call of torch's on CUDA tensors, as it becomes calls of the device plane."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from torch import Tensor

from unisono.dtypes import DType
from unisono.errors import UnisonoError
from unisono.interop.torch import profiling
from unisono.interop.torch.calls import CallBuilder
from unisono.interop.torch.errors import BadArgument, for_torch
from unisono.interop.torch.group import GroupHandle
from unisono.interop.torch.stream_work import StreamWork
from unisono.interop.torch.streams import CallStreams
from unisono.interop.torch.work import PendingCall
from unisono.runtime.call.arguments import Call
from unisono.runtime.call.buffers import Buffer
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import as_reduction
from unisono.runtime.core import Core

_INPUT_OF_ROOT = ("broadcast", "scatter")
_OUTPUT_OF_ROOT = ("reduce", "gather")


class StreamCallBuilder(CallBuilder):
    """The same on the stream of the call: nothing of it waits for the device."""

    def __init__(
        self,
        group: GroupHandle,
        opts: Any,
        outputs: Any,
        inputs: Any,
        streams: CallStreams,
    ) -> None:
        """All tensors are on the device of `streams`."""
        super().__init__(group, opts, outputs)
        self._streams = streams
        self._turn = streams.turn(asynchronous=self._async)
        self._used = [outputs, inputs, opts]
        self._name = ""

    def __enter__(self) -> Self:
        """What torch does inside is on the call's stream."""
        self._turn.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The current stream is as it was."""
        self._turn.__exit__(kind, error, trace)

    def keep(self, tensor: Tensor) -> Tensor:
        """Hold on to a tensor; BadArgument if it is on another device."""
        device = self._streams.device
        if tensor.device != device:
            raise BadArgument(
                f"tensors on {device} and {tensor.device} in one call, expected one "
                "device"
            )
        self._holds.append(tensor)
        return tensor

    def call(
        self,
        collective: str,
        kind: DType,
        counts: int | tuple[int, ...],
        input_at: int,
        output_at: int,
        op: str = "sum",
        root: int = 0,
    ) -> None:
        """Launch a call."""
        self._count(collective, counts)
        self._name = collective
        call = _call_on(
            self._streams.mark,
            *(collective, kind, counts, input_at, output_at),
            root=root,
            is_root=root == self._group.rank,
        )
        how = CallOptions(timeout_s=self._timeout_s)
        try:
            self._group.core.run(call, as_reduction(op), how)
        except UnisonoError as error:
            raise for_torch(error) from None

    def end(self) -> PendingCall:
        """The work; results are brought home on the same stream, behind the calls."""
        for finish in self._finishes:
            finish()
        if self._record is not None:
            profiling.end_of(self._record, elsewhere=self._async)()
        held = [*self._used, *self._holds]
        core, name = self._group.core, self._name
        work = StreamWork(
            self._outputs,
            self._turn.ended(held, marked=self.blocks),
            held,
            lambda: _check(core, name),
            blocks=self.blocks,
            name=name,
        )
        return self._group.made(work, self._elements)


def _call_on(
    mark: Tensor,
    collective: str,
    kind: DType,
    counts: int | tuple[int, ...],
    input_at: int,
    output_at: int,
    *,
    root: int,
    is_root: bool,
) -> Call:
    """A call on addresses. `mark` is on their device, whose current stream is taken.

    A rank that is not the root has no input of some collectives, no output of others.
    """
    count = counts if isinstance(counts, int) else sum(counts)

    def buffer(at: int, of_root: tuple[str, ...]) -> Buffer | None:
        if collective in of_root and not is_root:
            return None
        return Buffer(mark, at, (count,), kind, mark.device.index)

    x, y = buffer(input_at, _INPUT_OF_ROOT), buffer(output_at, _OUTPUT_OF_ROOT)
    return Call(collective, counts, x, y, None, None, root)


def _check(core: Core, name: str) -> None:
    """Raise if the group has failed; one that was left has not."""
    if not core.closed:
        core.device.check(core, name)
