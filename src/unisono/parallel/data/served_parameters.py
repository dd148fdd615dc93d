"""A module's parameters and gradients as two flat tensors, split by server.

flat     | weight | bias | ...     |     parameters are views of it
grads    | weight | bias | ...     |     gradients too
spans    |  server 0  |  server 1  |     what each server steps

To the optimizer, a server's run of each parameter is a parameter (`LocalShard`); a rank
that does not serve has empty ones, so that all ranks have the same groups.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import BadArgument, whole_number
from unisono.parallel.common.agreement import setup_together
from unisono.parallel.common.flat import offsets, shared_zeros, views
from unisono.parallel.common.local_shard import LocalShard
from unisono.parallel.common.marking import mark_sharded
from unisono.parallel.common.module_state import sync_module_state, trainable_parameters
from unisono.parallel.common.optimizers import (
    refuse_not_elementwise,
    refuse_other_parameters,
)
from unisono.parallel.common.shard_math import overlap_sizes
from unisono.runtime.call.shard_sizes import shard_sizes
from unisono.runtime.communicator import Communicator

Span = tuple[int, int]
Groups = list[dict[str, Any]]


class ServedParameters:
    """What synchronous and asynchronous parameter servers have in common."""

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        servers: int,
        optimizer: Callable[..., Optimizer],
        options: dict[str, Any],
        groups: Groups | None = None,
    ) -> None:
        """Begin with rank 0's parameters; a collective call."""
        where = type(self).__name__
        self.module, self.comm = module, comm
        with setup_together(comm, where) as settings:
            self._check(servers, where)
            refuse_not_elementwise(optimizer, where)
            named = trainable_parameters(module, where)
            self.names = {param: name for name, param in named}
            self.params = list(self.names)
            refuse_other_parameters(groups or [], named, where)
            _check_dtypes(self.params, where)
            settings.append(f"{servers} servers")
        sync_module_state(comm, module, where)
        count = sum(param.numel() for param in self.params)
        kind = self.params[0].dtype, self.params[0].device
        self.flat = shared_zeros(comm, count, *kind)
        for param, view in zip(self.params, views(self.flat, self.params), strict=True):
            param.data = view.copy_(param.detach())
        self.grads = shared_zeros(comm, count, *kind)
        self._grad_views = views(self.grads, self.params)
        self.clear_grads()
        ends = accumulate(shard_sizes(count, servers), initial=0)
        self.spans: list[Span] = list(pairwise(ends))
        self.serving = comm.rank < servers
        self.span = self.spans[comm.rank] if self.serving else (count, count)
        self._make_shards(servers)
        with setup_together(comm, where):  # the optimizer may refuse its options
            self.inner = optimizer(self._local_groups(groups), **options)

    def _check(self, servers: int, where: str) -> None:
        """Raise if the number of servers is out of range."""
        n = self.comm.world_size
        if not 1 <= whole_number(f"{where}: servers", servers) <= n:
            raise BadArgument(f"{where}: servers = {servers}: expected 1..{n}")

    def _make_shards(self, servers: int) -> None:
        """This rank's run of every parameter, and where in its span it is."""
        self.local_shards: list[LocalShard] = []
        self._slices: list[slice] = []
        lower, upper = self.span
        idle = [0] * (self.comm.world_size - servers)
        for param, (begin, end) in zip(
            self.params, pairwise(offsets(self.params)), strict=True
        ):
            first = min(max(begin, lower), upper)
            last = max(min(end, upper), first)
            local = nn.Parameter(self.flat[first:last])
            mark_sharded(local, self.comm, of=param)
            counts = [*overlap_sizes(begin, end, self.flat.numel(), servers), *idle]
            self.local_shards.append(
                LocalShard(self.names[param], local, param.shape, counts, self.comm)
            )
            self._slices.append(slice(first - lower, last - lower))

    def _local_groups(self, groups: Groups | None) -> Groups:
        shards = [shard.param for shard in self.local_shards]
        local = dict(zip(self.params, shards, strict=True))
        every: Groups = [{"params": self.params}]
        chosen = every if groups is None else groups
        return [g | {"params": [local[p] for p in g["params"]]} for g in chosen]

    def collect_grads(self) -> Tensor:
        """The gradients in one flat tensor; zeros where there are none."""
        for param, view in zip(self.params, self._grad_views, strict=True):
            if param.grad is None:
                view.zero_()
            elif param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad)
            param.grad = view  # it has no memory of its own
        return self.grads

    def clear_grads(self) -> None:
        """Zeros; the gradients stay views of one flat tensor."""
        self.grads.zero_()
        for param, view in zip(self.params, self._grad_views, strict=True):
            param.grad = view

    def set_shard_grads(self, mine: Tensor) -> None:
        """Give the optimizer the gradients of this rank's span."""
        for shard, part in zip(self.local_shards, self._slices, strict=True):
            shard.param.grad = mine[part]

    def broadcast_parameters(self, label: str) -> None:
        """Give every rank each server's parameters."""
        for server, (begin, end) in enumerate(self.spans):
            part = self.flat[begin:end]
            self.comm.broadcast(part, root=server, algorithm="naive", label=label)


def _check_dtypes(params: list[nn.Parameter], where: str) -> None:
    dtypes: set[torch.dtype] = {param.dtype for param in params}
    if len(dtypes) != 1:
        raise BadArgument(f"{where}: expected parameters of one type, got {dtypes}")
