"""One call of torch's, as it becomes calls of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.dtypes import DType
from unisono.interop.torch import profiling
from unisono.interop.torch.errors import BadArgument
from unisono.interop.torch.group import GroupHandle
from unisono.interop.torch.tensors import (
    Finish,
    joined_to_write,
    moved_as,
    to_read,
    to_write,
    type_of,
)
from unisono.interop.torch.work import CompletedWork, PendingCall
from unisono.runtime.call.work import Work as Part

OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


class CallBuilder:
    """Gathers the calls, what must live until they are done, and what comes after.

    Those of tensors on the CPU; of others see `stream_calls.py`.
    """

    blocks = False  # whether the host waits for work on a device

    def __init__(self, group: GroupHandle, opts: Any, outputs: Any) -> None:
        """`opts` are torch's options of the call."""
        self._group = group
        self._outputs = outputs
        self._timeout_s = limit_of(opts, group.timeout_s)
        self._async: bool = opts.asyncOp
        self._parts: list[Part] = []
        self._finishes: list[Finish] = []
        self._holds: list[Tensor] = []
        self._elements = 0
        self._record: Any = None

    def __enter__(self) -> Self:
        """The calls are made inside."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """They are made."""

    def keep(self, tensor: Tensor) -> Tensor:
        """Hold on to a tensor until all is done; BadArgument if it is elsewhere."""
        if not tensor.is_cpu:
            raise BadArgument(
                f"tensors on cpu and {tensor.device} in one call, expected one device"
            )
        self._holds.append(tensor)
        return tensor

    def written(self, tensor: Tensor, what: str) -> Tensor:
        """Where a tensor's result is written."""
        y, finish = to_write(tensor, what)
        if finish is not None:
            self._finishes.append(finish)
        return self.keep(y)

    def joined(self, tensors: Sequence[Tensor], what: str) -> Tensor:
        """The same for several tensors in a row."""
        room, finish = joined_to_write(tensors, what)
        if finish is not None:
            self._finishes.append(finish)
        return self.keep(room)

    def reduced(self, tensor: Tensor, op: Any, what: str) -> tuple[Tensor, str]:
        """A tensor that is reduced in place, and by which operation."""
        x = self.written(tensor, what)
        if op.op == dist.ReduceOp.PREMUL_SUM:
            with torch.no_grad():
                x.detach().mul_(_factor(op))
            return x, "sum"
        return x, OPS[op.op]

    def scaled(self, x: Tensor, op: Any) -> tuple[Tensor, str]:
        """The same for one that is only read."""
        if op.op == dist.ReduceOp.PREMUL_SUM:
            return self.keep((x.detach() * _factor(op)).to(x.dtype)), "sum"
        return self.keep(x), OPS[op.op]

    def all_gather(self, into: Tensor, x: Tensor, counts: tuple[int, ...]) -> None:
        """One all_gather, of shares in a row."""
        rank = self._group.rank
        if into.dtype != x.dtype or counts[rank] != x.numel():
            raise BadArgument(
                f"all_gather: {x.dtype} × {x.numel()} for an output of "
                f"{into.dtype} × {counts[rank]}"
            )
        x = self.keep(to_read(x, "all_gather"))
        kind, times = moved_as(x)
        own = into.data_ptr() + sum(counts[:rank]) * x.element_size()
        if x.data_ptr() != own and overlap(x, into, sum(counts)):
            x = self.keep(x.clone())
        call_counts = even(tuple(times * count for count in counts))
        self.call("all_gather", kind, call_counts, x.data_ptr(), into.data_ptr())

    def reduce_scatter(
        self, output: Tensor, x: Tensor, counts: tuple[int, ...], op: Any
    ) -> None:
        """One reduce_scatter, of shares in a row."""
        if output.dtype != x.dtype:
            raise BadArgument(f"reduce_scatter: {x.dtype} into {output.dtype}")
        rank, total = self._group.rank, sum(counts)
        if output.numel() != counts[rank]:
            raise BadArgument(
                f"reduce_scatter: {counts[rank]} elements for an output of "
                f"{output.numel()}"
            )
        x, name = self.scaled(x, op)
        y = self.written(output, "reduce_scatter")
        own = x.data_ptr() + sum(counts[:rank]) * x.element_size()
        if y.data_ptr() != own and overlap(y, x, total):
            x = self.keep(x.flatten()[:total].clone())
        at = x.data_ptr()
        self.call("reduce_scatter", type_of(x), even(counts), at, y.data_ptr(), name)

    def all_to_all(
        self, y: Tensor, x: Tensor, gives: list[int], gets: list[int], *, same: bool
    ) -> None:
        """One all_to_all; unless all shares are the same, ranks exchange them first."""
        if y.dtype != x.dtype:
            raise BadArgument(f"all_to_all: {x.dtype} into {y.dtype}")
        if overlap(y, x, sum(gives)):
            x = x.flatten()[: sum(gives)].clone()
        self.keep(x)
        kind, times = moved_as(x)
        call_counts: int | tuple[int, ...] = sum(gives) * times
        if not same:
            matrix = self._all_counts(gives)
            rank = self._group.rank
            if [row[rank] for row in matrix] != gets:
                raise BadArgument(
                    f"all_to_all: outputs of {gets} elements, but the others send "
                    f"{[row[rank] for row in matrix]}"
                )
            call_counts = tuple(count * times for row in matrix for count in row)
        self.call("all_to_all", kind, call_counts, x.data_ptr(), y.data_ptr())

    def _all_counts(self, gives: list[int]) -> list[list[int]]:
        n = self._group.size
        mine = torch.tensor(gives, device="cpu")
        all_ranks = torch.empty(n, n, dtype=torch.int64, device="cpu")
        self._group.start(
            *("all_gather", type_of(mine), n * n),
            *(mine.data_ptr(), all_ranks.data_ptr()),
            timeout_s=self._timeout_s,
            keep=(mine, all_ranks),
        )
        counts: list[list[int]] = all_ranks.tolist()
        return counts

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
        """Make a call of the engine."""
        self._count(collective, counts)
        part = self._group.start(
            *(collective, kind, counts, input_at, output_at),
            op=op,
            root=root,
            async_op=self._async,
            timeout_s=self._timeout_s,
            keep=self._holds,
        )
        if part is not None:
            self._parts.append(part)
            self._group.latest = part

    def _count(self, collective: str, counts: int | tuple[int, ...]) -> None:
        """One more call; the first begins the record of all."""
        if self._record is None:
            self._record = self._group.begun(collective)
        self._elements += counts if isinstance(counts, int) else sum(counts)

    def end(self) -> PendingCall:
        """The work; what is done at once is brought home at once."""
        finishes = self._finishes
        if self._record is not None:
            end = profiling.end_of(self._record, elsewhere=self._async)
            finishes.append(end)
        if not self._parts:
            for finish in finishes:
                finish()
            return self._group.made(CompletedWork(self._outputs), self._elements)

        def finish_all() -> None:
            for finish in finishes:
                finish()

        work = PendingCall(
            self._outputs,
            self._parts,
            finish_all if finishes else None,
            self._group.completer,
        )
        return self._group.made(work, self._elements)


def limit_of(opts: Any, default_s: float) -> float:
    """The deadline in seconds; one that is not set is less than nothing."""
    limit = opts.timeout
    return default_s if limit.days < 0 or not limit else limit.total_seconds()


def shares(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """How many elements each rank's rows have."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise BadArgument(
                f"all_to_all: {rows} rows cannot be divided evenly among "
                f"{size} ranks; give split sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise BadArgument(
            f"all_to_all: split sizes {list(splits)} for {rows} rows and {size} ranks"
        )
    row = tensor.numel() // rows if rows else 0
    return [split * row for split in splits]


def even(counts: tuple[int, ...]) -> int | tuple[int, ...]:
    """Their sum if they are all the same, as the engine has it."""
    return sum(counts) if len(set(counts)) == 1 else counts


def overlap(one: Tensor, other: Tensor, elements: int) -> bool:
    """Whether one touches the first `elements` elements of another."""
    begin, end = one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()
    at = other.data_ptr()
    return begin < at + elements * other.element_size() and at < end


def _factor(op: Any) -> Any:
    """What a premultiplied sum multiplies by; torch 2.11 has no attribute for it."""
    return op.factor if hasattr(op, "factor") else op.__getstate__()[1]
