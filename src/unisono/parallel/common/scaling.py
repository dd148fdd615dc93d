"""torch.amp.GradScaler over ranks that have different gradients: all skip, or none.

A scaler looks for overflows in the gradients that its optimizer has. Where parameters
are cut these are others on each rank, so the rank whose part has overflowed would skip
the step and lower its scale, and the others would go on: different weights and no
error. So what a scaler has found is agreed on: a maximum of one number along each axis
that the optimizer's parameters are cut over, which their marks tell (see `apart`).

torch asks nobody about that, neither the parameters nor a plain optimizer. Therefore
the one method through which every scaler looks at gradients is extended, once, when the
first parameter is marked. For optimizers without such parameters nothing changes.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from unisono.parallel.common.clipping import axes_of
from unisono.runtime.communicator import Communicator

Found = dict[torch.device, Tensor]
"""On each device, 1.0 if there is a gradient that is not finite."""
_INSTALLING = threading.Lock()  # ranks may be threads


def make_scalers_agree() -> None:
    """From now on scalers ask all ranks that an optimizer's parameters are cut over."""
    with _INSTALLING:
        theirs = GradScaler._unscale_grads_
        if hasattr(theirs, "unisono_theirs"):
            return

        @functools.wraps(theirs)
        def agreeing(
            self: GradScaler, optimizer: Optimizer, *args: Any, **options: Any
        ) -> Found:
            found = theirs(self, optimizer, *args, **options)
            return _agreed(optimizer, found)

        agreeing.unisono_theirs = theirs  # type: ignore[attr-defined]
        GradScaler._unscale_grads_ = agreeing  # type: ignore[method-assign]


@torch.no_grad()
def _agreed(optimizer: Optimizer, found: Found) -> Found:
    """The same, with what any of the ranks has found."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own = getattr(optimizer, "comm", None)
    comm = own if isinstance(own, Communicator) else None
    along = axes_of(params, comm, "GradScaler")
    if not along:
        return found
    mine = torch.zeros(1)
    for flag in found.values():
        mine = torch.maximum(mine, flag.detach().cpu().reshape(1))
    for axis in along:
        mine = axis.all_reduce(mine, op="max", label="overflow")
    if not found:  # this rank has no gradients, but skips with the others
        return {mine.device: mine[0]}
    for flag in found.values():
        flag.fill_(mine[0])
    return found
