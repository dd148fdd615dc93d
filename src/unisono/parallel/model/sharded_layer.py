"""Layers with a shard of their parameters: how a parameter is sharded and gathered.

    Shard(dim=0)             | rank 0 | rank 1 |          consecutive rows
    Shard(dim=0, parts=3)    | q0 k0 v0 | q1 k1 v1 |      a shard of each part

A tied parameter, which two layers share (as an embedding and the head), is sharded once
for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from unisono.parallel.common.marking import mark_sharded
from unisono.parallel.common.shard_math import divide_evenly
from unisono.runtime.call.options import Options
from unisono.runtime.communicator import Communicator


class Shard(NamedTuple):
    """A placement: the dim, and the number of parts that are sharded separately."""

    dim: int
    parts: int = 1

    def local(self, where: str, full: Tensor, comm: Communicator) -> Tensor:
        """This rank's shard of every part, in memory of its own."""
        n, size = comm.world_size, full.shape[self.dim]
        what = f"{where}, dim {self.dim} of {list(full.shape)}"
        divide_evenly(what, divide_evenly(what, size, self.parts), n)
        mine = [
            part.chunk(n, self.dim)[comm.rank]
            for part in full.detach().chunk(self.parts, self.dim)
        ]
        return torch.cat(mine, self.dim)

    def full(self, local: Tensor, comm: Communicator) -> Tensor:
        """The full tensor, from the shards of all ranks."""
        rows: Tensor = comm.all_gather(local.movedim(self.dim, 0).contiguous())
        by_rank = rows.view(comm.world_size, self.parts, -1, *rows.shape[1:])
        by_part = by_rank.transpose(0, 1).flatten(0, 2)
        return by_part.movedim(0, self.dim).contiguous()


Ties = dict[tuple[int, Shard | None], tuple[Tensor, nn.Parameter]]
"""Full parameters and their shards, by the full parameter's id and the placement."""


class ShardedLayer(nn.Module):
    """A layer with a shard of its parameters; `placements` tells which and how."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, comm: Communicator, placements: dict[str, Shard], options: object
    ) -> None:
        """`options` are those of its collectives: label, reproducible."""
        super().__init__()
        self.comm, self.placements = comm, placements
        self.options = cast(Options, options)

    @property
    def where(self) -> str:
        """The name of this layer in errors."""
        return self.options.get("label") or type(self).__name__

    def register_shard(
        self, name: str, full: Tensor | None, ties: Ties | None = None
    ) -> None:
        """Keep this rank's shard of a parameter, or all of it without a placement."""
        if full is None:
            self.register_parameter(name, None)
            return
        placement = self.placements.get(name)
        known = {} if ties is None else ties
        if (id(full), placement) not in known:
            param = cast(nn.Parameter, full)
            if placement is not None:
                local = placement.local(f"{self.where}.{name}", full, self.comm)
                param = nn.Parameter(local, full.requires_grad)
                mark_sharded(param, self.comm, of=full)
            # The full parameter is kept, so that no other object gets its id.
            known[id(full), placement] = full, param
        self.register_parameter(name, known[id(full), placement][1])


# --- full state dicts


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of the module before it was sharded; a collective call."""
    state = {k: v.detach() for k, v in module.state_dict().items()}
    for name, layer in module.named_modules():
        if isinstance(layer, ShardedLayer):
            for key, placement in layer.placements.items():
                full = f"{name}.{key}" if name else key
                if full in state:
                    state[full] = placement.full(state[full], layer.comm)
    return state


@torch.no_grad()
def load_whole_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load this rank's shards from a full state dict; nothing is sent."""
    mine = dict(state)
    for name, layer in module.named_modules():
        if isinstance(layer, ShardedLayer):
            for key, placement in layer.placements.items():
                full = f"{name}.{key}" if name else key
                if full in mine:
                    mine[full] = placement.local(full, mine[full], layer.comm)
    module.load_state_dict(mine)
