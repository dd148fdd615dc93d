"""Parameter servers: some ranks have the parameters, workers send them gradients.

    every step     workers push gradients, the server steps, workers pull parameters

Large models were first trained this way, and it shows why all_reduce replaced it: the
server's link carries all ranks' bytes, while the other links are idle most of the time.

                         a server sends        a worker sends
    central              (n-1) P               P
    sharded over s       (n-1) P/s             P, a part to each server
    (all_reduce)         2(n-1)/n P            2(n-1)/n P

With as many servers as ranks it is an all_reduce: P/n to every rank and back.

    memory per rank   parameters + gradients; a server also 1/s of the optimizer state

`async_parameter_server` has servers that do not wait for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import BadArgument, UsageError
from unisono.parallel.common.agreement import setup_together
from unisono.parallel.common.clipping import clip_grad_norm_
from unisono.parallel.common.local_shard import (
    full_optimizer_state,
    load_full_optimizer_state,
)
from unisono.parallel.common.optimizers import refuse_closure
from unisono.parallel.common.shard_math import divide_evenly
from unisono.parallel.data.served_parameters import ServedParameters
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import fail_together


class ParameterServer(ServedParameters, Optimizer):
    """Synchronous: all ranks are workers, and the first `servers` ranks also serve.

        server = ParameterServer(model, comm, torch.optim.SGD, lr=0.1)
        loss(model(x), y).backward(); server.step(); server.zero_grad()

    The results are those of DDP, to the bit if `reproducible`. `groups` are parameter
    groups as torch has them, of the module's own parameters; learning rate schedulers
    take it as an optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        optimizer: Callable[..., Optimizer],
        *,
        servers: int = 1,
        groups: Iterable[dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """Begin with rank 0's parameters; a collective call."""
        chosen = None if groups is None else list(groups)
        ServedParameters.__init__(
            self, module, comm, servers, optimizer, options, chosen
        )
        Optimizer.__init__(self, self.inner.param_groups, self.inner.defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._pushed: int | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Push the gradients, step on the servers, pull the parameters."""
        with fail_together(self.comm, "an error: a closure"):
            refuse_closure(closure, "ParameterServer")
        self._push()
        self._pushed = None
        self.inner.step()
        self.broadcast_parameters("pull")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of the averaged gradients; returns it.

        After backward and before the step; it pushes the gradients to the servers.
        """
        self._push()
        mine = [shard.param for shard in self.local_shards]
        norm = clip_grad_norm_(mine, max_norm, norm_type)
        self._pushed = self.grads._version
        return norm

    @torch.no_grad()
    def _push(self) -> None:
        """Average the gradients on the servers, once in a step."""
        if self._pushed is not None:
            with fail_together(self.comm, "an error: a later backward"):
                self._check_unchanged(self._pushed)
            return
        grads = self.collect_grads()
        for server, (begin, end) in enumerate(self.spans):
            self.comm.reduce(
                grads[begin:end],
                root=server,
                op="mean",
                algorithm="naive",  # all ranks send to the server; summed in rank order
                label="push",
            )
        begin, end = self.span
        self.set_shard_grads(grads[begin:end])
        self._pushed = grads._version

    def _check_unchanged(self, version: int) -> None:
        if self.collect_grads()._version != version:
            raise UsageError(
                "ParameterServer: gradients have changed after clip_grad_norm_, which "
                "sends them to the servers; call backward before it, then step()"
            )

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients; their memory is kept."""
        self._pushed = None
        self.clear_grads()

    def state_dict(self) -> dict[str, Any]:
        """The full state by the parameters' names, on every rank; a collective call.

        It can be loaded with any number of ranks and servers, and by ZeRO.
        """
        return full_optimizer_state(self.inner, self.local_shards)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a full state; nothing is sent."""
        load_full_optimizer_state(self.inner, self.local_shards, state_dict)

    def scatter(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of a batch that rank 0 has; a collective call.

            x, y = server.scatter(x, y) if comm.rank == 0 else server.scatter()

        Rank 0 gives tensors with as many rows each, which the ranks divide evenly, so
        that the mean of their gradients is that of the batch.
        """
        n, root = self.comm.world_size, self.comm.rank == 0
        with setup_together(self.comm, "ParameterServer.scatter"):
            if bool(batch) != root:
                raise BadArgument(
                    f"ParameterServer.scatter: rank {self.comm.rank} gave "
                    f"{len(batch)} tensors; rank 0 gives the batch, the others nothing"
                )
            for i, tensor in enumerate(batch):
                what = f"ParameterServer.scatter: rows of tensor {i}"
                divide_evenly(what, tensor.shape[0] if tensor.dim() else 1, n)
        shapes = [(t.dtype, tuple(t.shape)) for t in batch]
        named = [(str(dtype).removeprefix("torch."), shape) for dtype, shape in shapes]
        parts = []
        for i, (dtype, shape) in enumerate(self.comm.broadcast_object(named)):
            kind = getattr(torch, dtype)
            part = self.flat.new_empty((shape[0] // n, *shape[1:]), dtype=kind)
            whole = batch[i].detach().to(part.device).contiguous() if root else None
            self.comm.scatter(whole, out=part, label=f"batch, tensor {i}")
            parts.append(part)
        return tuple(parts)
