"""torch's calls as calls of the engine. Both adapters use this.

Every method takes the tensors and options of torch's method of that name and returns
the work. A blocking call runs on the caller's thread; the others are queued for the
native progress thread, after everything that was called before. Calls on CUDA tensors
are launched by the device plane, on streams (`streams.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from unisono.errors import UnisonoError
from unisono.interop.torch import profiling, sparse
from unisono.interop.torch.allocation import TensorAllocator
from unisono.interop.torch.calls import OPS, CallBuilder, limit_of, overlap, shares
from unisono.interop.torch.dynamo import leave_out
from unisono.interop.torch.errors import BadArgument, for_torch
from unisono.interop.torch.rendezvous import GroupRendezvous
from unisono.interop.torch.stream_calls import StreamCallBuilder
from unisono.interop.torch.stream_work import StagedMessage, together
from unisono.interop.torch.streams import CallStreams, barrier_device
from unisono.interop.torch.tensors import (
    first_of,
    joined_to_read,
    known,
    moved_as,
    pinned_like,
    simple,
    to_host,
    to_read,
    to_write,
    type_of,
)
from unisono.interop.torch.work import (
    AnySourceRecv,
    CompletedWork,
    Completer,
    PendingCall,
)
from unisono.runtime.call.work import Work as Part
from unisono.runtime.core import Core

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_SMALL = 64
_LEAVING_S = 10.0


class TorchCollectives:
    """The calls of one group on one rank."""

    def __init__(
        self, rendezvous: GroupRendezvous, devices: Sequence[str] = ("cpu",)
    ) -> None:
        """No rank is connected yet, unless this is the group of all.

        `devices` are the kinds of devices whose tensors it serves.
        """
        self.devices = devices
        self._streams: dict[int, CallStreams] = {}  # by the number of the device
        self._used: torch.device | None = None  # by a collective
        self.rendezvous = rendezvous
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.timeout_s = rendezvous.timeout_s
        self.completer = Completer()
        self.tensors = TensorAllocator(rendezvous.communicator, devices)
        self.records = True  # for torch's profiler
        self.latest: Part | None = None  # of the calls in flight, which end in order
        # torch may keep only the C++ half of a small work, and ask it again later.
        self._kept: deque[PendingCall] = deque(maxlen=_SMALL)
        self._together: list[PendingCall] | None = None

    # --- reducing

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> PendingCall:
        """Each tensor, reduced over all ranks, in place."""
        if len(tensors) == 1 and not opts.asyncOp and simple(tensors[0]):
            op = OPS.get(opts.reduceOp.op)
            if op is not None:
                (x,) = tensors
                return self._now("all_reduce", tensors, x, x, x.numel(), opts, op)
        if len(tensors) == 1 and tensors[0].is_sparse and not tensors[0].is_cuda:
            op = opts.reduceOp.op
            return self._at_once(
                tensors, lambda: sparse.all_reduce(self, tensors[0], op)
            )
        with self._building(opts, tensors) as run:
            for tensor in tensors:
                x, op = run.reduced(tensor, opts.reduceOp, "all_reduce")
                at = x.data_ptr()
                run.call("all_reduce", type_of(x), x.numel(), at, at, op)
            return run.end()

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> PendingCall:
        """The same, for the root alone."""
        (tensor,) = tensors
        with self._building(opts, tensors) as run:
            if self.rank == opts.rootRank:
                x, op = run.reduced(tensor, opts.reduceOp, "reduce")
            else:
                x, op = run.scaled(to_read(tensor, "reduce"), opts.reduceOp)
            at, root = x.data_ptr(), opts.rootRank
            run.call("reduce", type_of(x), x.numel(), at, at, op, root)
            return run.end()

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> PendingCall:
        """One tensor for each rank, reduced over all ranks; uneven ones too."""
        with self._building(opts, outputs, inputs) as run:
            for output, parts in zip(outputs, inputs, strict=True):
                self._expect("reduce_scatter", parts)
                x = joined_to_read(parts, "reduce_scatter")
                counts = tuple(part.numel() for part in parts)
                run.reduce_scatter(output, x, counts, opts.reduceOp)
            return run.end()

    def reduce_scatter_single(
        self, output: Tensor, x: Tensor, opts: Any
    ) -> PendingCall:
        """Rows of one tensor, reduced; each rank gets its share."""
        op = OPS.get(opts.reduceOp.op)
        if op is not None and self._fits(opts, x, output, 1, self.size):
            count = x.numel()
            return self._now("reduce_scatter", [output], x, output, count, opts, op)
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> PendingCall:
        """The same for several."""
        with self._building(opts, outputs, inputs) as run:
            for output, x in zip(outputs, inputs, strict=True):
                if x.numel() != output.numel() * self.size:
                    raise BadArgument(
                        f"reduce_scatter: an input of {x.numel()} elements for an "
                        f"output of {output.numel()} on each of {self.size} ranks"
                    )
                counts = (output.numel(),) * self.size
                x = to_read(x, "reduce_scatter")
                run.reduce_scatter(output, x, counts, opts.reduceOp)
            return run.end()

    # --- copying

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> PendingCall:
        """The root's tensors on every rank."""
        with self._building(opts, tensors) as run:
            for tensor in tensors:
                x = run.written(tensor, "broadcast")
                kind, times = moved_as(x)
                at, root = x.data_ptr(), opts.rootRank
                run.call("broadcast", kind, x.numel() * times, at, at, root=root)
            return run.end()

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> PendingCall:
        """The tensors of all ranks on every rank, one output for each."""
        with self._building(opts, outputs, inputs) as run:
            for into, x in zip(outputs, inputs, strict=True):
                self._expect("all_gather", into)
                counts = tuple(part.numel() for part in into)
                run.all_gather(run.joined(into, "all_gather"), x, counts)
            return run.end()

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> PendingCall:
        """Several at once: `outputs` has a list for each rank."""
        self._expect("all_gather", outputs)
        turned = [[of[i] for of in outputs] for i in range(len(inputs))]
        return self.allgather(turned, inputs, opts)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any) -> PendingCall:
        """The tensors of all ranks on every rank, one after the other."""
        if self._fits(opts, x, output, self.size, 1):
            return self._now("all_gather", [output], x, output, output.numel(), opts)
        return self.all_gather_single_coalesced([output], [x], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> PendingCall:
        """The same for several."""
        with self._building(opts, outputs, inputs) as run:
            for output, x in zip(outputs, inputs, strict=True):
                if output.numel() != x.numel() * self.size:
                    raise BadArgument(
                        f"all_gather: an output of {output.numel()} elements for "
                        f"inputs of {x.numel()} on each of {self.size} ranks"
                    )
                counts = (x.numel(),) * self.size
                run.all_gather(run.written(output, "all_gather"), x, counts)
            return run.end()

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> PendingCall:
        """The tensors of all ranks on the root."""
        (tensor,) = inputs
        with self._building(opts, outputs, inputs) as run:
            x = run.keep(to_read(tensor, "gather"))
            kind, times = moved_as(x)
            count, into = x.numel() * times * self.size, 0
            if self.rank == opts.rootRank:
                self._expect("gather", outputs[0])
                _refuse_uneven("gather", outputs[0], x)
                into = run.joined(outputs[0], "gather").data_ptr()
            run.call("gather", kind, count, x.data_ptr(), into, root=opts.rootRank)
            return run.end()

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> PendingCall:
        """The root's tensors, one for each rank."""
        (output,) = outputs
        with self._building(opts, outputs, inputs) as run:
            y = run.written(output, "scatter")
            kind, times = moved_as(y)
            count, start = y.numel() * times * self.size, 0
            if self.rank == opts.rootRank:
                self._expect("scatter", inputs[0])
                _refuse_uneven("scatter", inputs[0], y)
                start = run.keep(joined_to_read(inputs[0], "scatter")).data_ptr()
            run.call("scatter", kind, count, start, y.data_ptr(), root=opts.rootRank)
            return run.end()

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> PendingCall:
        """One tensor for each rank, and one from each; any sizes."""
        self._expect("all_to_all", outputs)
        self._expect("all_to_all", inputs)
        with self._building(opts, outputs, inputs) as run:
            x = joined_to_read(inputs, "all_to_all")
            y = run.joined(outputs, "all_to_all")
            gives, gets = ([t.numel() for t in some] for some in (inputs, outputs))
            run.all_to_all(y, x, gives, gets, same=False)
            return run.end()

    def all_to_all_single(
        self,
        output: Tensor,
        x: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> PendingCall:
        """Rows of one tensor to all; without splits, as many to each."""
        same = not output_splits and not input_splits
        alike = same and x.dim() > 0 and x.shape[0] % self.size == 0
        if alike and self._fits(opts, x, output, 1, 1):
            return self._now("all_to_all", [output], x, output, x.numel(), opts)
        with self._building(opts, [output], x) as run:
            x, y = to_read(x, "all_to_all"), run.written(output, "all_to_all")
            gives = shares(x, input_splits, self.size)
            gets = shares(y, output_splits, self.size)
            run.all_to_all(y, x, gives, gets, same=same)
            return run.end()

    # --- the rest

    def barrier(self, opts: Any) -> PendingCall:
        """Wait until every rank has come here, and with a device its stream, too."""
        device = barrier_device(opts, self.devices, self._used)
        if device is not None:
            return self._device_barrier(device, opts)
        run = CallBuilder(self, opts, [])
        kind, _ = moved_as(_NOTHING)
        run.call("barrier", kind, 0, 0, 0)
        return run.end()

    def _device_barrier(self, device: torch.device, opts: Any) -> PendingCall:
        """An all_reduce of one element, whose work has the host wait, as NCCL's."""
        x = torch.zeros(1, device=device)
        with self._building(opts, [], x) as run:
            at = run.keep(x).data_ptr()
            run.call("all_reduce", type_of(x), 1, at, at)
            run.blocks = True
            return run.end()

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> PendingCall:
        """One message."""
        (tensor,) = tensors
        if tensor.is_cuda:
            x = to_host(tensor)
            return self._staged(tensors, self._begin("send", x, to, tag))
        part = self._begin("send", to_read(tensor, "send"), to, tag)
        return self.made(PendingCall(tensors, [part], None, self.completer), 0)

    def recv(self, tensors: Sequence[Tensor], src: int | None, tag: int) -> PendingCall:
        """One message, from `src` or from any rank."""
        (tensor,) = tensors
        if tensor.is_cuda:
            room = pinned_like(tensor)
            part = self._begin("recv", room, src, tag)
            return self._staged(tensors, part, room)
        y, finish = to_write(tensor, "recv")
        kind = AnySourceRecv if src is None else PendingCall
        part = self._begin("recv", y, src, tag)
        return self.made(kind(tensors, [part], finish, self.completer), 0)

    def _begin(self, name: str, x: Tensor, peer: int | None, tag: int) -> Part:
        """Begin to send or to receive, in the memory of the host."""
        try:
            call = getattr(self.rendezvous.communicator(), name)
            begun: Part = call(
                known(x), peer, tag=tag, async_op=True, timeout_s=self.timeout_s
            )
        except UnisonoError as error:
            raise for_torch(error) from None
        begun.allow_drop()  # as works of torch may be
        return begun

    def _staged(
        self, tensors: Sequence[Tensor], part: Part, room: Tensor | None = None
    ) -> PendingCall:
        streams = self._streams_of(tensors[0])
        work = StagedMessage(tensors, part, streams, self.completer, room)
        return self.made(work, 0)

    def _streams_of(self, tensor: Tensor) -> CallStreams:
        """Those of a CUDA tensor's device; BadArgument if the group serves none."""
        if "cuda" not in self.devices:
            raise BadArgument(
                f"the tensor is on {tensor.device}, but the group serves the CPU alone"
            )
        index = tensor.device.index
        found = self._streams.get(index)
        if found is None:
            found = self._streams.setdefault(index, CallStreams(tensor))
        return found

    def _building(self, opts: Any, outputs: Any, inputs: Any = ()) -> CallBuilder:
        """A builder for the device that the tensors are on."""
        some = first_of(outputs, inputs)
        if some is None or not some.is_cuda:
            return CallBuilder(self, opts, outputs)
        streams = self._streams_of(some)
        self._used = some.device
        return StreamCallBuilder(self, opts, outputs, inputs, streams)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """A barrier at which rank 0 names the missing ranks, through the store."""
        self.rendezvous.monitored_barrier(timeout, wait_all_ranks)

    def start_together(self) -> None:
        """Whatever is called from now on is one work in the end."""
        self._together = []

    def end_together(self) -> PendingCall:
        """That work."""
        works, self._together = self._together or [], None
        if (one := together(works)) is not None:
            return one
        parts = [part for work in works for part in work.parts]

        def finish() -> None:
            for work in works:
                work.wait()

        return PendingCall([], parts, finish if parts else None, self.completer)

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of calls that have none of their own."""
        self.timeout_s = timeout.total_seconds()

    def leave(self, begun: Part | None = None) -> None:
        """Leave the group when what was called has ended; the others count on it.

        `begun` is the latest call that the compiled adapter began by itself.
        """
        for part in (self.latest, begun):
            if part is not None and not part.done():
                with suppress(UnisonoError):
                    part.wait(_LEAVING_S)
        self.close()

    def close(self) -> None:
        """Leave the group at once."""
        self.completer.close()
        self.tensors.clear()
        self.rendezvous.close()
        for streams in self._streams.values():
            streams.clear()

    def _fits(self, opts: Any, x: Tensor, y: Tensor, more: int, fewer: int) -> bool:
        """Whether a blocking call can be made at once: y has more/fewer of x."""
        return (
            not opts.asyncOp
            and simple(x)
            and simple(y)
            and x.dtype is y.dtype
            and y.numel() * fewer == x.numel() * more
            and not overlap(x, y, y.numel())
        )

    def _now(
        self,
        collective: str,
        outputs: Any,
        x: Tensor,
        y: Tensor,
        counts: int,
        opts: Any,
        op: str = "sum",
    ) -> PendingCall:
        """A blocking call on tensors that can be used as they are."""
        record = self.begun(collective)
        self.start(
            *(collective, type_of(x), counts, x.data_ptr(), y.data_ptr()),
            op=op,
            timeout_s=limit_of(opts, self.timeout_s),
            keep=outputs,
        )
        if record is not None:
            profiling.end_of(record, elsewhere=False)()
        return self.made(CompletedWork(outputs), counts)

    def begun(self, collective: str) -> Any:
        """The profiler's record of a call that begins, unless the adapter has one."""
        return profiling.begun(collective) if self.records else None

    @property
    def core(self) -> Core:
        """That of the communicator, which is made on first use."""
        try:
            return self.rendezvous.communicator().core
        except UnisonoError as error:
            raise for_torch(error) from None

    def start(self, *call: Any, **how: Any) -> Part | None:
        """`Core.start`, whose errors are torch's as well."""
        try:
            return self.rendezvous.communicator().core.start(*call, **how)
        except UnisonoError as error:
            raise for_torch(error) from None

    def _expect(self, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self.size:
            raise BadArgument(
                f"{what}: a list of {self.size} tensors expected, got {len(tensors)}"
            )

    def _at_once(self, tensors: Any, run: Callable[[], None]) -> PendingCall:
        """Something that is not worth a queue."""
        try:
            run()
        except UnisonoError as error:
            raise for_torch(error) from None
        return CompletedWork(tensors)

    def made(self, work: PendingCall, elements: int) -> PendingCall:
        """Remember it as long as torch may ask for it."""
        if self._together is not None:
            self._together.append(work)
        if elements <= _SMALL:
            self._kept.append(work)
        return work


def _refuse_uneven(what: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    for tensor in tensors:
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise BadArgument(
                f"{what}: tensors of one type and size expected, got {tensor.dtype} × "
                f"{tensor.numel()} beside {like.dtype} × {like.numel()}"
            )


leave_out(TorchCollectives)
