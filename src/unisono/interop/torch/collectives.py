"""torch's calls as calls of the engine. Both adapters use this.

Every method takes the tensors and options of torch's method of that name and returns
the work. A blocking call runs on the caller's thread; the others are queued for the
native progress thread, after everything that was called before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from unisono.errors import BadArgument, UnisonoError
from unisono.interop.torch import profiling, sparse
from unisono.interop.torch.calls import OPS, CallBuilder, limit_of, overlap, shares
from unisono.interop.torch.dynamo import leave_out
from unisono.interop.torch.rendezvous import GroupRendezvous
from unisono.interop.torch.tensors import (
    Finish,
    joined_to_read,
    known,
    moved_as,
    simple,
    to_read,
    to_write,
    type_of,
)
from unisono.interop.torch.work import (
    AnySourceRecv,
    CompletedWork,
    Completer,
    PendingCall,
    for_torch,
)
from unisono.runtime.call.work import Work as Part

_NOTHING = torch.empty(0, dtype=torch.uint8)
_SMALL = 64
_LEAVING_S = 10.0


class TorchCollectives:
    """The calls of one group on one rank."""

    def __init__(self, rendezvous: GroupRendezvous) -> None:
        """No rank is connected yet, unless this is the group of all."""
        self.rendezvous = rendezvous
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.timeout_s = rendezvous.timeout_s
        self.completer = Completer()
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
        if len(tensors) == 1 and tensors[0].is_sparse:
            op = opts.reduceOp.op
            return self._at_once(
                tensors, lambda: sparse.all_reduce(self, tensors[0], op)
            )
        run = CallBuilder(self, opts, tensors)
        for tensor in tensors:
            x, op = run.reduced(tensor, opts.reduceOp, "all_reduce")
            at = x.data_ptr()
            run.call("all_reduce", type_of(x), x.numel(), at, at, op)
        return run.end()

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> PendingCall:
        """The same, for the root alone."""
        run = CallBuilder(self, opts, tensors)
        (tensor,) = tensors
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
        run = CallBuilder(self, opts, outputs)
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
        run = CallBuilder(self, opts, outputs)
        for output, x in zip(outputs, inputs, strict=True):
            if x.numel() != output.numel() * self.size:
                raise BadArgument(
                    f"reduce_scatter: an input of {x.numel()} elements for an output "
                    f"of {output.numel()} on each of {self.size} ranks"
                )
            counts = (output.numel(),) * self.size
            x = to_read(x, "reduce_scatter")
            run.reduce_scatter(output, x, counts, opts.reduceOp)
        return run.end()

    # --- copying

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> PendingCall:
        """The root's tensors on every rank."""
        run = CallBuilder(self, opts, tensors)
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
        run = CallBuilder(self, opts, outputs)
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
        run = CallBuilder(self, opts, outputs)
        for output, x in zip(outputs, inputs, strict=True):
            if output.numel() != x.numel() * self.size:
                raise BadArgument(
                    f"all_gather: an output of {output.numel()} elements for inputs of "
                    f"{x.numel()} on each of {self.size} ranks"
                )
            counts = (x.numel(),) * self.size
            run.all_gather(run.written(output, "all_gather"), x, counts)
        return run.end()

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> PendingCall:
        """The tensors of all ranks on the root."""
        run = CallBuilder(self, opts, outputs)
        (tensor,) = inputs
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
        run = CallBuilder(self, opts, outputs)
        (output,) = outputs
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
        run = CallBuilder(self, opts, outputs)
        self._expect("all_to_all", outputs)
        self._expect("all_to_all", inputs)
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
        run = CallBuilder(self, opts, [output])
        x, y = to_read(x, "all_to_all"), run.written(output, "all_to_all")
        gives = shares(x, input_splits, self.size)
        gets = shares(y, output_splits, self.size)
        run.all_to_all(y, x, gives, gets, same=same)
        return run.end()

    # --- the rest

    def barrier(self, opts: Any) -> PendingCall:
        """Wait until every rank has come here."""
        run = CallBuilder(self, opts, [])
        kind, _ = moved_as(_NOTHING)
        run.call("barrier", kind, 0, 0, 0)
        return run.end()

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> PendingCall:
        """One message."""
        (tensor,) = tensors
        x = to_read(tensor, "send")
        return self._message(PendingCall, tensors, None, "send", x, to, tag)

    def recv(self, tensors: Sequence[Tensor], src: int | None, tag: int) -> PendingCall:
        """One message, from `src` or from any rank."""
        (tensor,) = tensors
        y, finish = to_write(tensor, "recv")
        kind = AnySourceRecv if src is None else PendingCall
        return self._message(kind, tensors, finish, "recv", y, src, tag)

    def _message(
        self,
        kind: type[PendingCall],
        tensors: Sequence[Tensor],
        finish: Finish | None,
        name: str,
        x: Tensor,
        peer: int | None,
        tag: int,
    ) -> PendingCall:
        x = known(x)
        try:
            call = getattr(self.rendezvous.communicator(), name)
            part = call(x, peer, tag=tag, async_op=True, timeout_s=self.timeout_s)
        except UnisonoError as error:
            raise for_torch(error) from None
        return self.made(kind(tensors, [part], finish, self.completer), 0)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """A barrier at which rank 0 names the missing ranks, through the store."""
        self.rendezvous.monitored_barrier(timeout, wait_all_ranks)

    def start_together(self) -> None:
        """Whatever is called from now on is one work in the end."""
        self._together = []

    def end_together(self) -> PendingCall:
        """That work."""
        works, self._together = self._together or [], None
        parts = [part for work in works for part in work.parts]

        def finish() -> None:
            for work in works:
                work.wait()

        return PendingCall([], parts, finish if parts else None, self.completer)

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of calls that have none of their own."""
        self.timeout_s = timeout.total_seconds()

    def leave(self) -> None:
        """Leave the group when what was called has ended; the others count on it."""
        if self.latest is not None and not self.latest.done():
            with suppress(UnisonoError):
                self.latest.wait(_LEAVING_S)
        self.close()

    def close(self) -> None:
        """Leave the group at once."""
        self.completer.close()
        self.rendezvous.close()

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
