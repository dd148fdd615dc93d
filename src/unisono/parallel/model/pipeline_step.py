"""One batch in a pipeline: the messages of a stage, and what backward needs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.errors import BadArgument
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator

HEADER = 10
"""Numbers before every output: its type, its number of dims, and up to 8 dims."""
_TYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64

Loss = Callable[[Tensor, Tensor], Tensor]


class MicroBatches(NamedTuple):
    """Inputs on the first rank, targets on the last."""

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


class PipelineStep:
    """One batch: the inputs and outputs of this stage that backward needs."""

    def __init__(
        self,
        stage: Callable[[Tensor], Tensor],
        comm: Communicator,
        microbatches: MicroBatches,
        loss: Loss | None,
        device: torch.device,
    ) -> None:
        """Inputs arrive on `device`; without a loss the last stage keeps outputs."""
        self.stage, self.comm, self.loss = stage, comm, loss
        self.device = device
        self.microbatches = microbatches
        self.rank, self.n = self.comm.rank, self.comm.world_size
        self.total = 0.0
        self.outputs: list[Tensor] = []
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
        y = self.stage(x)
        if self.rank < self.n - 1:
            self._send_output(y.detach().contiguous(), number)
        elif self.loss is None:
            self.outputs.append(y)
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
        x = torch.empty(shape[:dims], dtype=_TYPES[kind], device=self.device)
        self.comm.recv(x, self.rank - 1, tag=2 * number)
        return x.requires_grad_(x.is_floating_point())
