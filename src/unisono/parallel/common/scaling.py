"""torch.amp.GradScaler over ranks with different gradients: all skip a step, or none.

A scaler looks for overflows in its optimizer's gradients. Where parameters are sharded,
gradients differ between ranks: the rank whose shard overflowed would skip the step and
lower its scale, and the others would not, so weights would diverge without an error.
So ranks reduce what their scalers found: a maximum of one number along each axis that
the optimizer's parameters are sharded over (see `placement`).

torch has no hook for this, neither in parameters nor in plain optimizers. Therefore the
one method with which every scaler looks at gradients is replaced, once, when the first
parameter is marked as sharded. Optimizers without such parameters are not affected.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from unisono.parallel.common.placement import sharded_axes
from unisono.runtime.communicator import Communicator

FoundInf = dict[torch.device, Tensor]
"""On each device, 1.0 if there is a gradient that is not finite."""
_INSTALLING = threading.Lock()  # ranks may be threads


def make_scalers_agree() -> None:
    """From now on scalers reduce over all ranks that parameters are sharded over."""
    with _INSTALLING:
        original = GradScaler._unscale_grads_
        if hasattr(original, "unisono_original"):
            return

        @functools.wraps(original)
        def agreeing(
            self: GradScaler, optimizer: Optimizer, *args: Any, **options: Any
        ) -> FoundInf:
            found_inf = original(self, optimizer, *args, **options)
            return _reduced(optimizer, found_inf)

        agreeing.unisono_original = original  # type: ignore[attr-defined]
        GradScaler._unscale_grads_ = agreeing  # type: ignore[method-assign]


@torch.no_grad()
def _reduced(optimizer: Optimizer, found_inf: FoundInf) -> FoundInf:
    """The maximum of what all ranks have found."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own = getattr(optimizer, "comm", None)
    comm = own if isinstance(own, Communicator) else None
    axes = sharded_axes(params, comm, "GradScaler")
    if not axes:
        return found_inf
    largest = torch.zeros(1)
    for flag in found_inf.values():
        largest = torch.maximum(largest, flag.detach().cpu().reshape(1))
    for axis in axes:
        largest = axis.all_reduce(largest, op="max", label="overflow")
    if not found_inf:  # this rank has no gradients, but skips with the others
        return {largest.device: largest[0]}
    for flag in found_inf.values():
        flag.fill_(largest[0])
    return found_inf
