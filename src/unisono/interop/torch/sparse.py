"""all_reduce of sparse tensors: all ranks' entries, gathered and added."""

from __future__ import annotations

from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from unisono.interop.torch.errors import BadArgument
from unisono.interop.torch.group import GroupHandle


def all_reduce(group: GroupHandle, tensor: Tensor, op: Any) -> None:
    """The sum over all ranks, in place."""
    if op != dist.ReduceOp.SUM:
        raise BadArgument("all_reduce: a sparse tensor can only be summed")
    mine = tensor.coalesce()
    indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
    opts = c10d.AllgatherOptions()
    opts.asyncOp = False
    count = torch.tensor([len(values)])
    counts = torch.empty(group.size, dtype=torch.int64)
    group.all_gather_single(counts, count, opts)
    sizes = counts.tolist()

    def gathered(part: Tensor) -> Tensor:
        room = part.new_empty(sum(sizes), *part.shape[1:])
        group.allgather([list(torch.split(room, sizes))], [part], opts)
        return room

    total = torch.sparse_coo_tensor(
        gathered(indices).t(), gathered(values), tensor.shape, dtype=tensor.dtype
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
