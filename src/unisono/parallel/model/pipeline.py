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

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import BadArgument, unknown, whole_number
from unisono.parallel.common.agreement import close_on_error, setup_together
from unisono.parallel.common.flat import CPU
from unisono.parallel.common.marking import forbid_assign, mark_sharded
from unisono.parallel.common.module_state import sync_module_state
from unisono.parallel.model.pipeline_order import ORDERS
from unisono.parallel.model.pipeline_step import MicroBatches, PipelineStep
from unisono.runtime.call.shard_sizes import shard_sizes
from unisono.runtime.communicator import Communicator


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

    @property
    def _device(self) -> torch.device:
        """Where the layers of this stage are."""
        return next((p.device for p in self.parameters()), CPU)

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
                value = (
                    mine[name].clone()
                    if rank == self.comm.rank
                    else torch.empty(tuple(shape), dtype=kind, device=self._device)
                )
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
        parts = self._microbatches(x, target, loss)
        run = PipelineStep(self, self.comm, parts, loss, self._device)
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

    @torch.no_grad()
    def evaluate(
        self, x: Tensor | None = None, target: Tensor | None = None, loss: Any = None
    ) -> float:
        """The mean loss of a batch, on every rank, without backward.

        The arguments are those of `step`. Call `eval()` before, where layers differ.
        """
        run = self._forward_all(x, target, loss)
        total = torch.tensor([run.total], dtype=torch.float64)
        last = self.comm.world_size - 1
        return float(self.comm.broadcast(total, root=last, label="pipeline: loss"))

    @torch.no_grad()
    def predict(self, x: Tensor | None = None) -> Tensor | None:
        """The outputs for a batch that the first rank has; on the last rank only."""
        run = self._forward_all(x, None, None, predicts=True)
        return torch.cat(run.outputs) if self._last else None

    def _forward_all(
        self, x: Tensor | None, target: Tensor | None, loss: Any, predicts: bool = False
    ) -> PipelineStep:
        """All micro-batches through this stage."""
        parts = self._microbatches(x, target, loss, predicts)
        run = PipelineStep(self, self.comm, parts, loss, self._device)
        with close_on_error(self.comm):
            for number in range(self.microbatches):
                run.forward(number)
                run.held.clear()
            run.finish()
        return run

    def _microbatches(
        self,
        x: Tensor | None,
        target: Tensor | None,
        loss: Any,
        predicts: bool = False,
    ) -> MicroBatches:
        """The micro-batches of inputs and targets; on an error all ranks raise."""
        first, m = self.comm.rank == 0, self.microbatches
        needed = [("x", x)] if first else []
        if self._last and not predicts:
            needed += [("target", target), ("loss", loss)]
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
        return MicroBatches(xs, ys)


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
