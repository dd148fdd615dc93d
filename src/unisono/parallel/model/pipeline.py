"""Pipeline parallelism: each rank has some of the layers; micro-batches pass through.

    pipe = Pipeline(nn.Sequential(...), comm, microbatches=8)
    loss = pipe.step(x, target, loss_fn)         # forward and backward of a whole batch
    optimizer.step()

Rank r has the r-th run of layers. A batch is split into m micro-batches, so that the
stages can compute at the same time; each sends its outputs to the right, and gradients
to the left. The order of each stage's actions is a table:

    gpipe   F0 F1 F2 F3 B0 B1 B2 B3                 all forward, then all backward
    1f1b    F0 F1 B0 F2 B1 F3 B2 B3  (stage 1 of 3) a backward as soon as there is one

Both idle for (n-1)/(m+n-1) of the time; 1f1b keeps at most n - r micro-batches'
activations on stage r, gpipe m. The gradient is that of the whole batch.

    sent per step   forward: m outputs, with a header of 80 bytes each; backward: m
                    gradients of inputs. Between neighbours only, and no weights

Huang et al., "GPipe" (2019); Narayanan et al., "PipeDream" (2019, the 1F1B order).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.errors import BadArgument, unknown, whole_number
from unisono.parallel.common.agreement import close_on_error, setup_together
from unisono.parallel.common.marking import forbid_assign, mark_sharded
from unisono.parallel.common.module_state import sync_module_state
from unisono.parallel.common.shard_math import shard_sizes
from unisono.parallel.model.pipeline_order import ORDERS
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator

HEADER = 10
"""Numbers before every output: its type, its number of dims, and up to 8 dims."""
_TYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64

Loss = Callable[[Tensor, Tensor], Tensor]


class Pipeline(nn.Module):
    """This rank's stage: consecutive layers, and the training step with the others.

    `at` lists the layers with which stages begin, if they are not to have equally many.
    `order` is "1f1b" or "gpipe". A stage that fails in a step closes its communicator,
    so that the others raise PeerLost and do not wait for its messages.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        comm: Communicator,
        *,
        microbatches: int,
        order: str = "1f1b",
        at: Sequence[int] | None = None,
    ) -> None:
        """Keep this rank's layers, with rank 0's values; a collective call."""
        super().__init__()
        self.comm = comm
        with setup_together(comm, "Pipeline") as settings:
            self.microbatches = whole_number("Pipeline: microbatches", microbatches)
            if order not in ORDERS:
                raise unknown("order of a pipeline", str(order), ORDERS)
            if self.microbatches < 1:
                raise BadArgument(
                    f"Pipeline: microbatches = {microbatches}: at least one"
                )
            ends = _ends(len(layers), comm.world_size, at)
            settings += [f"stages {ends}, {microbatches} micro-batches", order]
        self.order = order
        self._last = comm.rank == comm.world_size - 1
        sync_module_state(comm, layers, "Pipeline")
        begin, end = ends[comm.rank], ends[comm.rank + 1]
        # By their own numbers, so that the state dicts of all stages can be merged.
        self.layers = nn.ModuleDict({str(i): layers[i] for i in range(begin, end)})
        for param in self.layers.parameters():
            mark_sharded(param, comm)
        forbid_assign(self.layers, "Pipeline")

    def forward(self, x: Tensor) -> Tensor:
        """This stage only."""
        for layer in self.layers.values():
            x = layer(x)
        return x

    def whole_state(self) -> dict[str, Tensor]:
        """The state dict of all layers, on every rank; a collective call."""
        mine = {
            f"{number}.{name}": value.detach()
            for number, layer in self.layers.items()
            for name, value in layer.state_dict().items()
        }
        entries = [(k, str(v.dtype), list(v.shape)) for k, v in mine.items()]
        whole: dict[str, Tensor] = {}
        for rank, listed in enumerate(self.comm.all_gather_objects(entries)):
            for name, dtype, shape in listed:
                kind = getattr(torch, dtype.removeprefix("torch."))
                value = mine[name].clone() if name in mine else torch.empty(0)
                if rank != self.comm.rank:
                    value = torch.empty(tuple(shape), dtype=kind)
                whole[name] = self.comm.broadcast(value, root=rank, label=name)
        return whole

    def step(
        self, x: Tensor | None = None, target: Tensor | None = None, loss: Any = None
    ) -> float:
        """Forward and backward of a batch; the mean loss, on every rank.

        The first rank needs x, the last one target and loss (a function of outputs and
        targets, a mean over rows); what other ranks pass is ignored. Gradients
        accumulate.
        """
        run = _PipelineStep(self, self._microbatches(x, target, loss), loss)
        table = ORDERS[self.order](
            self.comm.rank, self.comm.world_size, self.microbatches
        )
        with close_on_error(self.comm):  # its neighbours wait in recv
            for action in table:
                if action.forward:
                    run.forward(action.number)
                else:
                    run.backward(action.number)
            run.finish()
        total = torch.tensor([run.total], dtype=torch.float64)
        last = self.comm.world_size - 1
        return float(self.comm.broadcast(total, root=last, label="pipeline: loss"))

    def _microbatches(
        self, x: Tensor | None, target: Tensor | None, loss: Any
    ) -> _MicroBatches:
        """The micro-batches of inputs and targets; on an error all ranks raise."""
        first, m = self.comm.rank == 0, self.microbatches
        needed = [("x", x)] if first else []
        needed += [("target", target), ("loss", loss)] if self._last else []
        with setup_together(self.comm, "Pipeline.step"):
            for name, value in needed:
                if value is None:
                    raise BadArgument(
                        f"Pipeline.step: {name} is missing on rank {self.comm.rank}"
                    )
                if isinstance(value, Tensor) and len(value) < m:
                    raise BadArgument(
                        f"Pipeline.step: {name} has {len(value)} rows for {m} "
                        "micro-batches"
                    )
        xs = x.tensor_split(m) if first and x is not None else ()
        ys = target.tensor_split(m) if self._last and target is not None else ()
        return _MicroBatches(xs, ys)


class _MicroBatches(NamedTuple):
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


class _PipelineStep:
    """One batch: the inputs and outputs of this stage that backward needs."""

    def __init__(
        self, pipe: Pipeline, microbatches: _MicroBatches, loss: Loss | None
    ) -> None:
        self.pipe, self.comm, self.loss = pipe, pipe.comm, loss
        self.microbatches = microbatches
        self.rank, self.n = self.comm.rank, self.comm.world_size
        self.total = 0.0
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.most_held = 0
        # Messages that are being sent, with the tensors that must stay alive.
        self.sending: list[tuple[Work, Tensor]] = []

    def forward(self, number: int) -> None:
        """Receive a micro-batch, run the stage, and send the output on."""
        x = (
            self.microbatches.inputs[number]
            if self.rank == 0
            else self._receive(number)
        )
        y = self.pipe(x)
        if self.rank < self.n - 1:
            self._send_output(y.detach().contiguous(), number)
        else:
            y = self._weighted_loss(y, number)
        self.held[number] = x, y
        self.most_held = max(self.most_held, len(self.held))

    def backward(self, number: int) -> None:
        """Receive the gradient of the output, and send that of the input back."""
        x, y = self.held.pop(number)
        if self.rank == self.n - 1:
            y.backward()
        else:
            grad = torch.empty_like(y, memory_format=torch.contiguous_format)
            self.comm.recv(grad, self.rank + 1, tag=2 * number + 1)
            if y.requires_grad:
                y.backward(grad)
        if self.rank > 0:
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            self._send(grad.contiguous(), self.rank - 1, 2 * number + 1)

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()

    def _weighted_loss(self, y: Tensor, number: int) -> Tensor:
        """This micro-batch's part of the mean over the whole batch."""
        assert self.loss is not None
        target = self.microbatches.targets[number]
        if len(y) != len(target):
            raise BadArgument(
                f"Pipeline.step: micro-batch {number} has {len(y)} rows of outputs and "
                f"{len(target)} of targets; give x and target with as many rows"
            )
        rows = sum(len(part) for part in self.microbatches.targets)
        part = self.loss(y, target) * (len(target) / rows)
        self.total += float(part.detach())
        return part

    def _send_output(self, y: Tensor, number: int) -> None:
        if y.dtype not in _TYPES or y.dim() > HEADER - 2:
            raise BadArgument(
                f"Pipeline: stage {self.rank} outputs {y.dtype}{list(y.shape)}; "
                f"expected a tensor of up to {HEADER - 2} dims, of one of "
                f"{', '.join(str(t) for t in _TYPES)}"
            )
        header = [_TYPES.index(y.dtype), y.dim(), *y.shape]
        header += [0] * (HEADER - len(header))
        self._send(torch.tensor(header), self.rank + 1, 2 * number)
        self._send(y, self.rank + 1, 2 * number)

    def _send(self, x: Tensor, dst: int, tag: int) -> None:
        while self.sending and self.sending[0][0].done():
            self.sending.pop(0)[0].wait()  # raises its error, if any
        work = self.comm.send(x, dst, tag=tag, async_op=True)
        self.sending.append((work, x))

    def _receive(self, number: int) -> Tensor:
        header = torch.empty(HEADER, dtype=torch.int64)
        self.comm.recv(header, self.rank - 1, tag=2 * number)
        kind, dims, *shape = header.tolist()
        x = torch.empty(shape[:dims], dtype=_TYPES[kind])
        self.comm.recv(x, self.rank - 1, tag=2 * number)
        return x.requires_grad_(x.is_floating_point())


def _ends(count: int, n: int, at: Sequence[int] | None) -> list[int]:
    """Where the stages begin and end."""
    if at is None:
        ends = list(accumulate(shard_sizes(count, n), initial=0))
    else:
        ends = [0, *(whole_number("Pipeline: at", i) for i in at), count]
    if len(ends) != n + 1 or any(a >= b for a, b in pairwise(ends)):
        raise BadArgument(
            f"Pipeline: {count} layers, at = {at}: expected {n - 1} ascending numbers "
            f"that leave at least one layer to each of {n} stages"
        )
    return ends
