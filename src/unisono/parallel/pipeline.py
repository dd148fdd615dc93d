"""Pipeline parallelism: each rank has some of the layers, and micro-batches flow by.

    pipe = Pipeline(nn.Sequential(...), comm, microbatches=8)
    loss = pipe.step(x, target, loss_fn)         # forward and backward of a whole batch
    optimizer.step()

Rank r has the r-th run of layers. A batch is cut into m micro-batches, so that the
stages can work at once; each sends its outputs on to the right, and gradients back to
the left. In which order, is a table of what each stage does, one after the other:

    gpipe   F0 F1 F2 F3 B0 B1 B2 B3                 all forward, then all backward
    1f1b    F0 F1 B0 F2 B1 F3 B2 B3  (stage 1 of 3) a backward as soon as there is one

Both idle for (n-1)/(m+n-1) of the time; 1f1b keeps at most n - r micro-batches'
activations on stage r, gpipe m. The gradient is that of the whole batch.

    sent per step   forward: m outputs, with a header of 80 bytes each; backward: m
                    gradients of inputs. Between neighbours only, and nothing of weights

Huang et al., "GPipe" (2019); Narayanan et al., "PipeDream" (2019, the 1F1B order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.errors import BadArgument, unknown, whole_number
from unisono.parallel.agreement import or_leaves, prepared
from unisono.parallel.apart import keep_apart, keep_parameters
from unisono.parallel.flat import same_start, shares
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator

HEADER = 10
"""Numbers before every output: its type, its number of dims, and up to 8 dims."""
_TYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64

Loss = Callable[[Tensor, Tensor], Tensor]


class Action(NamedTuple):
    """One thing that a stage does: forward or backward of one micro-batch."""

    forward: bool
    number: int

    def __str__(self) -> str:
        """As in the table: F0, B3."""
        return f"{'F' if self.forward else 'B'}{self.number}"


def gpipe(stage: int, n: int, m: int) -> list[Action]:
    """All micro-batches forward, then all backward."""
    return [Action(way, i) for way in (True, False) for i in range(m)]


def one_forward_one_backward(stage: int, n: int, m: int) -> list[Action]:
    """As many forward as stages follow, then by turns, then the rest backward."""
    ahead = min(n - 1 - stage, m)
    turns = [
        action for i in range(m - ahead) for action in ((True, ahead + i), (False, i))
    ]
    first = [(True, i) for i in range(ahead)]
    last = [(False, i) for i in range(m - ahead, m)]
    return [Action(*action) for action in (*first, *turns, *last)]


ORDERS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


class Pipeline(nn.Module):
    """This rank's run of the layers, and the steps it takes with the others.

    `at` are the numbers of the layers where a new stage begins, if they shall not have
    equally many. `order` is "1f1b" or "gpipe". A stage that fails in a step closes its
    communicator, so that the others raise PeerLost and do not wait for its messages.
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
        """Keep this rank's layers, with the first rank's values; all ranks together."""
        super().__init__()
        self.comm = comm
        with prepared(comm, "Pipeline") as told:
            self.microbatches = whole_number("Pipeline: microbatches", microbatches)
            if order not in ORDERS:
                raise unknown("order of a pipeline", str(order), ORDERS)
            if self.microbatches < 1:
                raise BadArgument(
                    f"Pipeline: microbatches = {microbatches}: at least one"
                )
            ends = _ends(len(layers), comm.world_size, at)
            told += [f"stages {ends}, {microbatches} micro-batches", order]
        self.order = order
        self._last = comm.rank == comm.world_size - 1
        same_start(comm, layers, "Pipeline")
        begin, end = ends[comm.rank], ends[comm.rank + 1]
        # Under their own numbers, so that state dicts of stages make that of the whole.
        self.layers = nn.ModuleDict({str(i): layers[i] for i in range(begin, end)})
        for param in self.layers.parameters():
            keep_apart(param, comm)
        keep_parameters(self.layers, "Pipeline")

    def forward(self, x: Tensor) -> Tensor:
        """This stage alone."""
        for layer in self.layers.values():
            x = layer(x)
        return x

    def whole_state(self) -> dict[str, Tensor]:
        """The state dict of all layers, on every rank; all ranks together."""
        mine = {
            f"{number}.{name}": value.detach()
            for number, layer in self.layers.items()
            for name, value in layer.state_dict().items()
        }
        told = [(k, str(v.dtype), list(v.shape)) for k, v in mine.items()]
        whole: dict[str, Tensor] = {}
        for rank, listed in enumerate(self.comm.all_gather_objects(told)):
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

        The first rank needs x, the last one target and loss (of outputs and targets, a
        mean over rows); what others give is not looked at. Gradients add up.
        """
        run = _Step(self, self._parts(x, target, loss), loss)
        table = ORDERS[self.order](
            self.comm.rank, self.comm.world_size, self.microbatches
        )
        with or_leaves(self.comm):  # its neighbours wait for messages
            for action in table:
                if action.forward:
                    run.forward(action.number)
                else:
                    run.backward(action.number)
            run.finish()
        total = torch.tensor([run.total], dtype=torch.float64)
        last = self.comm.world_size - 1
        return float(self.comm.broadcast(total, root=last, label="pipeline: loss"))

    def _parts(self, x: Tensor | None, target: Tensor | None, loss: Any) -> _Parts:
        """The micro-batches of inputs and targets; all ranks hear of a mistake."""
        first, m = self.comm.rank == 0, self.microbatches
        needed = [("x", x)] if first else []
        needed += [("target", target), ("loss", loss)] if self._last else []
        with prepared(self.comm, "Pipeline.step"):
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
        return _Parts(xs, ys)


class _Parts(NamedTuple):
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


class _Step:
    """One batch on its way: what came in and went out of this stage."""

    def __init__(self, pipe: Pipeline, parts: _Parts, loss: Loss | None) -> None:
        self.pipe, self.comm, self.parts, self.loss = pipe, pipe.comm, parts, loss
        self.rank, self.n = self.comm.rank, self.comm.world_size
        self.total = 0.0
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.most_held = 0
        # Messages leave while this stage goes on; they need their memory until then.
        self.leaving: list[tuple[Work, Tensor]] = []

    def forward(self, number: int) -> None:
        """Get a micro-batch, let the stage work on it, and send the result on."""
        x = self.parts.inputs[number] if self.rank == 0 else self._receive(number)
        y = self.pipe(x)
        if self.rank < self.n - 1:
            self._send_output(y.detach().contiguous(), number)
        else:
            y = self._weighted_loss(y, number)
        self.held[number] = x, y
        self.most_held = max(self.most_held, len(self.held))

    def backward(self, number: int) -> None:
        """Get the gradient of the output, and send that of the input back."""
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
        """Wait until all has left."""
        for work, _ in self.leaving:
            work.wait()
        self.leaving.clear()

    def _weighted_loss(self, y: Tensor, number: int) -> Tensor:
        """This micro-batch's part of the mean over the whole batch."""
        assert self.loss is not None
        target = self.parts.targets[number]
        if len(y) != len(target):
            raise BadArgument(
                f"Pipeline.step: micro-batch {number} has {len(y)} rows of outputs and "
                f"{len(target)} of targets; give x and target with as many rows"
            )
        rows = sum(len(part) for part in self.parts.targets)
        share = self.loss(y, target) * (len(target) / rows)
        self.total += float(share.detach())
        return share

    def _send_output(self, y: Tensor, number: int) -> None:
        if y.dtype not in _TYPES or y.dim() > HEADER - 2:
            raise BadArgument(
                f"Pipeline: stage {self.rank} gives {y.dtype}{list(y.shape)}; between "
                f"stages travel tensors of up to {HEADER - 2} dims, of "
                f"{', '.join(str(t) for t in _TYPES)}"
            )
        header = [_TYPES.index(y.dtype), y.dim(), *y.shape]
        header += [0] * (HEADER - len(header))
        self._send(torch.tensor(header), self.rank + 1, 2 * number)
        self._send(y, self.rank + 1, 2 * number)

    def _send(self, x: Tensor, dst: int, tag: int) -> None:
        while self.leaving and self.leaving[0][0].done():
            self.leaving.pop(0)[0].wait()  # which raises what went wrong
        work = self.comm.send(x, dst, tag=tag, async_op=True)
        self.leaving.append((work, x))

    def _receive(self, number: int) -> Tensor:
        header = torch.empty(HEADER, dtype=torch.int64)
        self.comm.recv(header, self.rank - 1, tag=2 * number)
        kind, dims, *shape = header.tolist()
        x = torch.empty(shape[:dims], dtype=_TYPES[kind])
        self.comm.recv(x, self.rank - 1, tag=2 * number)
        return x.requires_grad_(x.is_floating_point())


def _ends(count: int, n: int, at: Sequence[int] | None) -> list[int]:
    """Where the stages begin and end among so many layers."""
    if at is None:
        ends = list(accumulate(shares(count, n), initial=0))
    else:
        ends = [0, *(whole_number("Pipeline: at", i) for i in at), count]
    if len(ends) != n + 1 or any(a >= b for a, b in pairwise(ends)):
        raise BadArgument(
            f"Pipeline: {count} layers, at = {at}: expected {n - 1} numbers that rise "
            f"and leave at least one layer to each of {n} stages"
        )
    return ends


def table(order: str, n: int, m: int) -> Iterator[str]:
    """What each stage does, one line for each: to look at."""
    for stage in range(n):
        yield " ".join(str(action) for action in ORDERS[order](stage, n, m))
