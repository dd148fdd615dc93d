"""The same module on all ranks: parameters and buffers compared and broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from unisono.errors import BadArgument
from unisono.parallel.common.agreement import check_same
from unisono.parallel.common.flat import views
from unisono.parallel.common.placement import is_sharded
from unisono.runtime.communicator import Communicator

NamedParameters = list[tuple[str, nn.Parameter]]
BROADCAST_BYTES = 1 << 20
"""Tensors of this size and larger are sent in place; smaller ones are sent together."""


def broadcast_tensors(
    comm: Communicator, tensors: Sequence[Tensor], *, root: int = 0, label: str = ""
) -> None:
    """Give every rank the root's values, many small tensors in one message.

    Large tensors are sent in place: a temporary copy of megabytes would be freed to
    malloc, which then keeps a hole of that size.
    """
    with torch.no_grad():
        for batch in _batches(tensors):
            alone = len(batch) == 1 and batch[0].is_contiguous()
            flat = (
                batch[0].detach().view(-1)
                if alone
                else torch.cat([t.detach().reshape(-1) for t in batch])
            )
            comm.broadcast(flat, root=root, label=label)
            if comm.rank != root and not alone:
                for tensor, part in zip(batch, views(flat, batch), strict=True):
                    tensor.detach().copy_(part)


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Small tensors of one type and device together, and every large one by itself."""
    pending: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= BROADCAST_BYTES:
            yield [tensor]
            continue
        kind = tensor.dtype, tensor.device
        batch = pending.setdefault(kind, [])
        batch.append(tensor)
        if sum(t.nbytes for t in batch) >= BROADCAST_BYTES:
            yield pending.pop(kind)
    yield from pending.values()


def trainable_parameters(module: nn.Module, where: str) -> NamedParameters:
    """The parameters that get gradients, each once, with their names."""
    named = [(k, p) for k, p in module.named_parameters() if p.requires_grad]
    for name, param in named:
        if param.device.type not in ("cpu", "cuda") or param.layout != torch.strided:
            raise BadArgument(
                f"{where}: {name} is {param.layout} on {param.device}; "
                "expected a dense tensor on the CPU or on a CUDA device"
            )
        if param.device != named[0][1].device:
            raise BadArgument(
                f"{where}: {named[0][0]} is on {named[0][1].device} and {name} on "
                f"{param.device}; move the module to one device"
            )
    return named


def check_same_module(comm: Communicator, where: str, module: nn.Module) -> None:
    """Raise on every rank if the ranks have not built the same module."""
    settings = [
        f"{name}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        + ("" if t.requires_grad else ", frozen")
        for name, t in module.named_parameters()
    ]
    settings += [
        f"buffer {name}: {buffer.dtype}{list(buffer.shape)}"
        for name, buffer in module.named_buffers()
    ]
    check_same(comm, where, settings)


def sync_module_state(
    comm: Communicator, module: nn.Module, where: str, *, skip_sharded: bool = False
) -> None:
    """Give all ranks rank 0's parameters and buffers, if they have the same module."""
    check_same_module(comm, where, module)
    sharded = [name for name, p in module.named_parameters() if is_sharded(p, comm)]
    if sharded and not skip_sharded:
        raise BadArgument(
            f"{where}: {sharded[0]} is a different parameter on each of these ranks, "
            "as a shard or an expert is; use a communicator of ranks that have the "
            'same parameters, as mesh["dp"], or for experts DDP'
        )
    params = [p for p in module.parameters() if not is_sharded(p, comm)]
    state = [*params, *module.buffers()]
    broadcast_tensors(comm, state, label=f"{where}: initial state")
