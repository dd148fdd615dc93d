"""Layers of which each rank has a shard: how a parameter is cut and put together.

    Cut(dim=0)             | rank 0 | rank 1 |                rows one after the other
    Cut(dim=0, parts=3)    | q0 k0 v0 | q1 k1 v1 |            some of each part

A parameter that two layers share (an embedding and the head) is cut once for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from unisono.errors import BadArgument
from unisono.parallel.apart import keep_apart
from unisono.runtime.call.options import Options
from unisono.runtime.communicator import Communicator


class Cut(NamedTuple):
    """Along which dim a parameter is cut, and how many parts of it separately."""

    dim: int
    parts: int = 1

    def shard(self, where: str, whole: Tensor, comm: Communicator) -> Tensor:
        """This rank's share of every part, in memory of its own."""
        n, size = comm.world_size, whole.shape[self.dim]
        shared_out(f"{where}, dim {self.dim} of {list(whole.shape)}", size, self.parts)
        each = size // self.parts
        shared_out(f"{where}, dim {self.dim} of {list(whole.shape)}", each, n)
        mine = [
            part.chunk(n, self.dim)[comm.rank]
            for part in whole.detach().chunk(self.parts, self.dim)
        ]
        return torch.cat(mine, self.dim)

    def whole(self, shard: Tensor, comm: Communicator) -> Tensor:
        """The shards of all ranks put together, as before they were cut."""
        rows: Tensor = comm.all_gather(shard.movedim(self.dim, 0).contiguous())
        by_rank = rows.view(comm.world_size, self.parts, -1, *rows.shape[1:])
        by_part = by_rank.transpose(0, 1).flatten(0, 2)
        return by_part.movedim(0, self.dim).contiguous()


Ties = dict[tuple[int, Cut | None], tuple[Tensor, nn.Parameter]]
"""Whole parameters that were cut, and what came of them: by identity and cut."""


class Sharded(nn.Module):
    """A layer that has a shard of its parameters; `cuts` tells which and how."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, comm: Communicator, cuts: dict[str, Cut], how: object) -> None:
        """`how` are options of its collectives: label, reproducible."""
        super().__init__()
        self.comm, self.cuts = comm, cuts
        self.how = cast(Options, how)

    @property
    def where(self) -> str:
        """What errors call this layer."""
        return self.how.get("label") or type(self).__name__

    def take(self, name: str, whole: Tensor | None, ties: Ties | None = None) -> None:
        """Keep this rank's shard of a parameter, or all of it if it is not cut."""
        if whole is None:
            self.register_parameter(name, None)
            return
        cut = self.cuts.get(name)
        known = {} if ties is None else ties
        if (id(whole), cut) not in known:
            made = cast(nn.Parameter, whole)
            if cut is not None:
                shard = cut.shard(f"{self.where}.{name}", whole, self.comm)
                made = nn.Parameter(shard, whole.requires_grad)
                keep_apart(made, self.comm, of=whole)
            # The whole one is kept too, so that nobody else gets its identity.
            known[id(whole), cut] = whole, made
        self.register_parameter(name, known[id(whole), cut][1])


def shared_out(where: str, number: int, n: int) -> int:
    """number / n, or the error for a dim that cannot be divided."""
    if number % n:
        raise BadArgument(
            f"{where}: {number} cannot be divided evenly by {n}; choose sizes that "
            f"are multiples of {n}, or another number of ranks"
        )
    return number // n


# --- plain state


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of the module before it was cut; all ranks together."""
    state = {k: v.detach() for k, v in module.state_dict().items()}
    for name, owner in module.named_modules():
        if isinstance(owner, Sharded):
            for key, cut in owner.cuts.items():
                full = f"{name}.{key}" if name else key
                if full in state:
                    state[full] = cut.whole(state[full], owner.comm)
    return state


@torch.no_grad()
def load_whole_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take this rank's shards from a plain state dict; nothing is sent."""
    mine = dict(state)
    for name, owner in module.named_modules():
        if isinstance(owner, Sharded):
            for key, cut in owner.cuts.items():
                full = f"{name}.{key}" if name else key
                if full in mine:
                    mine[full] = cut.shard(full, mine[full], owner.comm)
    module.load_state_dict(mine)
