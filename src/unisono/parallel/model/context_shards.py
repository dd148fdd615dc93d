"""Which rank has which tokens of a sequence that is sharded over the ranks.

Balanced, the sequence is split into 2n blocks, and a rank has one from the front and
one from the back, so that causal attention is as much work on each rank:

    n = 3:   0 1 2 3 4 5       rank 0: 0 5    rank 1: 1 4    rank 2: 2 3
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.parallel.common import functions
from unisono.parallel.common.shard_math import divide_evenly
from unisono.runtime.communicator import Communicator


def blocks(rank: int, n: int, balanced: bool = True) -> tuple[int, ...]:
    """The blocks of the sequence that a rank has, in its order."""
    return (rank, 2 * n - 1 - rank) if balanced else (rank,)


def positions(length: int, comm: Communicator, *, balanced: bool = True) -> Tensor:
    """Which tokens of a sequence of this length this rank has, in its order."""
    n = comm.world_size
    count = (2 if balanced else 1) * n
    size = divide_evenly("context: the sequence's length", length, count)
    mine = blocks(comm.rank, n, balanced)
    return torch.cat([torch.arange(size) + size * block for block in mine])


def shard_sequence(
    x: Tensor, comm: Communicator, *, dim: int = 1, balanced: bool = True
) -> Tensor:
    """This rank's tokens of a whole sequence that all have; nothing is sent."""
    mine = positions(x.shape[dim], comm, balanced=balanced)
    return x.index_select(dim, mine.to(x.device))


def whole_sequence(
    x: Tensor, comm: Communicator, *, dim: int = 1, balanced: bool = True
) -> Tensor:
    """All ranks' tokens in the order of the sequence, replicated on all ranks."""
    whole = functions.gather_from(x, comm, dim, label="whole_sequence")
    order = token_order(whole.shape[dim], comm.world_size, balanced, x.device)
    return whole.index_select(dim, order)


def token_order(length: int, n: int, balanced: bool, device: torch.device) -> Tensor:
    """The index of each token of the sequence in the joined shards of all ranks."""
    held = [block for rank in range(n) for block in blocks(rank, n, balanced)]
    size = length // len(held)
    starts = torch.tensor(held, device=device).argsort() * size
    return (starts.unsqueeze(1) + torch.arange(size, device=device)).reshape(-1)
