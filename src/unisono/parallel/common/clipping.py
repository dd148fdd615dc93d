"""Clips gradients by the norm of the whole model, on any mesh.

    clip_grad_norm_(model.parameters(), 1.0)        after backward, before the step

torch's function of that name takes the norm of the gradients on one rank. Where
parameters are sharded, that is a part of the norm, different on each rank; each rank
would scale by a different factor, and replicated parameters would diverge. Here all
ranks compute one sum along each axis,

    sum over parameters of |grad|^p · shards / ranks

where `ranks` is the size of the axis and `shards` is how many different shards its
ranks have: the shards of a sharded parameter are added up, and of a replicated one each
of n ranks contributes 1/n. The marks on parameters (`placement`) tell which is which.

The sums are taken in rank order, so all ranks of the mesh have the same bits of the
norm, and scale by the same factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from unisono.errors import BadArgument
from unisono.parallel.common.flat import CPU
from unisono.parallel.common.placement import shard_count, sharded_axes
from unisono.runtime.communicator import Communicator


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    comm: Communicator | None = None,
) -> Tensor:
    """Scale the gradients so that the norm of all of them is at most `max_norm`.

    All ranks that share the model call it, each with its own parameters; it returns
    the norm before clipping, the same bits on all, in float64 if a parameter is.
    `comm` adds ranks to reduce over: replicas, or all ranks of the mesh, which takes
    one sum and not one per axis.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not norm_type > 0:
        raise BadArgument(
            f"clip_grad_norm_: norm_type = {norm_type}: expected a positive number, or "
            "inf for the largest element"
        )
    axes = sharded_axes(params, comm)
    total = _total(params, axes, float(norm_type))
    scale = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            param.grad.mul_(scale.to(param.grad.dtype))
    double = any(param.dtype == torch.float64 for param in params)
    return total if double else total.to(torch.float32)


def _total(
    params: Sequence[Tensor], axes: Sequence[Communicator], norm_type: float
) -> Tensor:
    """The norm of the whole model's gradients, from each rank's part."""
    grads = [(p, p.grad) for p in params if p.grad is not None and p.grad.numel()]
    largest = norm_type == float("inf")
    device = params[0].device if params else CPU
    terms = [torch.zeros((), dtype=torch.float64, device=device)]
    for param, grad in grads:
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
        terms.append(norm if largest else norm.pow(norm_type) * _weight(param, axes))
    stacked = torch.stack(terms)
    total = (stacked.max() if largest else stacked.sum()).reshape(1)
    for axis in axes:
        label = f"norm {norm_type:g}"
        op = "max" if largest else "sum"
        total = axis.all_reduce(total, op=op, reproducible=True, label=label)
    return total[0] if largest else total[0].pow(1.0 / norm_type)


def _weight(param: Tensor, axes: Sequence[Communicator]) -> float:
    """The part of one copy of the parameter that this rank contributes."""
    weight = 1.0
    for axis in axes:
        weight *= shard_count(param, axis) / axis.world_size
    return weight
