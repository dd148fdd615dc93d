"""Gradients clipped by the norm of the whole model, however it is spread out.

    clip_grad_norm_(model.parameters(), 1.0)        after backward, before the step

torch's function of that name takes the norm of what this rank has. Where parameters
are cut that is a part of it, another one on each rank, and each would scale by another
factor: what is the same on all ranks would not stay so. Here every rank gives what it
has to one sum along each axis,

    sum over parameters of |grad|^p · parts / ranks

where `ranks` are those of the axis and `parts` how many different parts they have: the
shards of a parameter that is cut there are added up, and of what is the same on all, n
ranks give an n-th each. The marks on parameters (see `apart`) say which is which.

The sums are taken in rank order whatever lies between the ranks, so all ranks of the
mesh have the same bits of the norm, and scale by the same factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from unisono.errors import BadArgument
from unisono.parallel.common.placement import cuts_of, parts_in
from unisono.runtime.communicator import Communicator


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    comm: Communicator | None = None,
) -> Tensor:
    """Scale the gradients so that the norm of all of them is at most `max_norm`.

    All ranks that share the model call it together, each with what it has; it returns
    the norm before, the same bits on all. `comm` has further ranks that belong to it:
    replicas, or all ranks of the mesh, which then takes one sum and not one per axis.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not norm_type > 0:
        raise BadArgument(
            f"clip_grad_norm_: norm_type = {norm_type}: expected a positive number, or "
            "inf for the largest element"
        )
    along = axes_of(params, comm)
    total = _total(params, along, float(norm_type))
    scale = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            param.grad.mul_(scale.to(param.grad.dtype))
    norm: Tensor = total.to(torch.float32)
    return norm


def axes_of(
    params: Sequence[Tensor],
    comm: Communicator | None = None,
    where: str = "clip_grad_norm_",
) -> list[Communicator]:
    """The communicators to add up along, one after the other; `comm` is the last.

    Cuts that were made first come first: stages of a pipeline may differ in how their
    layers are cut, but not in what comes after that.
    """
    place: dict[Communicator, int] = {}
    for param in params:
        for i, cut in enumerate(cuts_of(param)):
            place[cut.comm] = max(i, place.get(cut.comm, 0))
    found = sorted(place, key=lambda axis: place[axis])
    if comm is not None:
        found = [*(axis for axis in found if axis is not comm), comm]
    kept: list[Communicator] = []
    for axis in sorted(found, key=lambda axis: -axis.world_size):
        if not any(_within(axis, other, where) for other in kept):
            kept.append(axis)
    return [axis for axis in found if axis in kept and axis.world_size > 1]


def _within(axis: Communicator, other: Communicator, where: str) -> bool:
    """Whether a sum along `other` includes that along `axis`."""
    mine, theirs = set(axis.world_ranks), set(other.world_ranks)
    if mine <= theirs:
        return True
    if len(mine & theirs) > 1:
        raise BadArgument(
            f"{where}: parameters are spread over ranks {sorted(mine)} and over "
            f"{sorted(theirs)}, which share some; give the communicator of all ranks "
            "of the mesh as comm= to unisono.parallel.clip_grad_norm_, and to a scaler "
            "as the optimizer's attribute comm"
        )
    return False


def _total(
    params: Sequence[Tensor], along: Sequence[Communicator], norm_type: float
) -> Tensor:
    """The norm of the whole, from what each rank has of it."""
    grads = [(p, p.grad) for p in params if p.grad is not None and p.grad.numel()]
    largest = norm_type == float("inf")
    given = [torch.zeros((), dtype=torch.float64)]
    for param, grad in grads:
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
        given.append(norm if largest else norm.pow(norm_type) * _share(param, along))
    listed = torch.stack(given)
    mine = (listed.max() if largest else listed.sum()).reshape(1)
    for axis in along:
        label = f"norm {norm_type:g}"
        op = "max" if largest else "sum"
        mine = axis.all_reduce(mine, op=op, reproducible=True, label=label)
    return mine[0] if largest else mine[0].pow(1.0 / norm_type)


def _share(param: Tensor, along: Sequence[Communicator]) -> float:
    """How much of a copy of the parameter this rank stands for."""
    share = 1.0
    for axis in along:
        share *= parts_in(param, axis) / axis.world_size
    return share
