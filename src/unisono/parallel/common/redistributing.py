"""`comm.redistribute` with gradients.

    columns = redistribute(rows, comm, 0, 1)

The gradient goes the way back. A whole value is replicated: all ranks compute the same
with it, and its gradient is the same on each. So each rank's part of a whole gets its
part of the gradient, and each summand gets all of it.

    forward                    backward
    dimension to dimension     all_to_all back
    dimension to whole         nothing is sent: each takes its part
    whole to dimension         all_gather
    partial to whole           nothing is sent: the gradient of the sum
    partial to dimension       all_gather
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from torch import Tensor
from torch.autograd import Function

from unisono.parallel.common.opaque import opaque
from unisono.runtime.call.options import Options
from unisono.runtime.communicator import Communicator
from unisono.runtime.cuts import PARTIAL, as_cut


class _Redistribute(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Communicator,
        from_: Any,
        to: Any,
        shape: Sequence[int] | None,
        options: Options,
    ) -> Tensor:
        ctx.comm, ctx.from_, ctx.to, ctx.options = comm, from_, to, options
        ctx.shape = tuple(x.shape)
        made: Tensor = comm.redistribute(x, from_, to, shape=shape, **options)
        return made

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None, None, None, None]:
        cut = as_cut("from_", ctx.from_, len(ctx.shape))
        wanted, sizes = None if cut == PARTIAL else cut, None
        if isinstance(cut, int):  # parts may have been of any size
            sizes = ctx.comm.all_gather(np.array([ctx.shape[cut]])).tolist()
        back: Tensor = ctx.comm.redistribute(
            grads[0], ctx.to, wanted, sizes=sizes, **ctx.options
        )
        return back, None, None, None, None, None


@opaque
def redistribute(
    x: Tensor,
    comm: Communicator,
    from_: Any,
    to: Any,
    *,
    shape: Sequence[int] | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """As `comm.redistribute`; the gradient is redistributed back."""
    made: Tensor = _Redistribute.apply(x, comm, from_, to, shape, options)
    return made
