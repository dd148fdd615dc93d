"""Gradients and DDP's buckets in memory that the ranks of a host use in place.

They are what `comm.register` makes of them, with the communicator of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from unisono.errors import BadArgument
from unisono.interop.torch.rendezvous import GroupRendezvous
from unisono.runtime.call.registered import Registered
from unisono.runtime.communicator import Communicator


def communicator_of(group: Any = None) -> Communicator:
    """The communicator of a group, or of the default one; connects its ranks."""
    group = group or dist.group.WORLD
    found = GroupRendezvous.of(getattr(group, "group_name", ""))
    if found is None:
        raise BadArgument(f"{group!r} is not a group of the unisono backend")
    return found.communicator()


def register_gradients(model: nn.Module, group: Any = None) -> dict[str, Registered]:
    """Register the gradient of each parameter; those that are missing become zeros."""
    comm = communicator_of(group)
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        try:
            found[name] = comm.register(parameter.grad)
        except BadArgument as why:  # on a device, not contiguous, ...
            found[name] = Registered(False, str(why))
    return found


def register_buckets(
    ddp: DistributedDataParallel,
    hook: Callable[[Any, Any], Any] | None = None,
    state: Any = None,
) -> None:
    """Have each bucket registered when it is first reduced, and reduced by `hook`."""
    comm = communicator_of(ddp.process_group)

    def reduce(bucket: Any) -> Any:
        buffer = bucket.buffer()
        if not buffer.is_cuda:
            comm.register(buffer)
        if hook is None:
            return allreduce_hook(ddp.process_group, bucket)
        return hook(state, bucket)

    # torch refuses annotations that are text, as all are here.
    ddp.register_comm_hook(state, lambda state, bucket: reduce(bucket))
