"""Batch norm over the batch of all ranks, as if it were on one rank.

Mean and variance are those of all ranks' inputs in this step. They are computed in two
passes, since the difference of large squares loses digits: first the sum and the number
of elements, then the sum of squares about the common mean. Ranks may have batches of
different sizes, also empty ones.

    forward    all_reduce of C + 1 numbers, then of C
    backward   all_reduce of 2C: the mean gradient, and its product with the input
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.errors import BadArgument
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import fail_together


class _Normalise(Function):
    """x to zero mean and unit variance over all ranks; also returns the statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, comm: Communicator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x.detach().float() if x.dtype.itemsize < 4 else x.detach()
        channels = x.shape[1]
        number = wide.new_tensor([wide.numel() // channels])
        sums = comm.all_reduce(torch.cat([wide.sum(dims), number]), label="mean")
        count = sums[-1]
        mean = sums[:-1] / count
        centered = wide - _along(mean, x)
        squares = (centered * centered).sum(dims)
        var = comm.all_reduce(squares, label="variance") / count
        scale = torch.rsqrt(var + eps)
        normal = centered * _along(scale, x)
        ctx.save_for_backward(normal, scale, count)
        ctx.comm, ctx.dims = comm, dims
        ctx.mark_non_differentiable(mean, var, count)
        return normal.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        normal, scale, count = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        sums = torch.stack([grad.sum(ctx.dims), (grad * normal).sum(ctx.dims)])
        ctx.comm.all_reduce(sums, label="gradient of batch norm")
        shift, tilt = (sums / count).unbind(0)
        flat = grad - _along(shift, grad) - normal * _along(tilt, grad)
        return (flat * _along(scale, grad)).to(grads[0].dtype), None, None


class SyncBatchNorm(_BatchNorm):
    """nn.BatchNorm for inputs (N, C, ...), with the statistics of all ranks."""

    def __init__(
        self,
        num_features: int,
        comm: Communicator,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        """The arguments of torch's class, and a communicator."""
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.comm = comm

    @classmethod
    def convert(cls, module: nn.Module, comm: Communicator) -> nn.Module:
        """The module with every batch norm in it replaced; weights are kept."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            made = cls(
                module.num_features,
                comm,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
            )
            made._parameters.update(module._parameters)
            made._buffers.update(module._buffers)
            made.train(module.training)
            return made
        for name, child in module.named_children():
            setattr(module, name, cls.convert(child, comm))
        return module

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise BadArgument(
                f"SyncBatchNorm: the input is {list(input.shape)}, expected (N, "
                f"{self.num_features}, ...)"
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise; in evaluation, with the running statistics, nothing is sent."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        with fail_together(self.comm, "an error: batch norm's input"):
            self._check_input_dim(input)
        normal, mean, var, count = _Normalise.apply(input, self.eps, self.comm)
        if self.training and self.running_mean is not None:
            self._update_running_stats(mean, var, float(count))
        if self.affine:
            weight, bias = _along(self.weight, input), _along(self.bias, input)
            normal = normal * weight + bias
        made: Tensor = normal
        return made

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, var: Tensor, count: float) -> None:
        """Update the running statistics, with the unbiased variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / max(count - 1.0, 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def _along(values: Tensor, like: Tensor) -> Tensor:
    """One value per channel, shaped to be combined with (N, C, ...)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))
