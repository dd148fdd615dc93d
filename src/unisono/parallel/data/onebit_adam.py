"""1-bit Adam: momentum is sent as signs, once the variance is stable.

    optimizer = OneBitAdam(model, comm, lr=1e-3, warmup=100)
    loss(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()

Adam divides by the root of the variance, so it is not linear in the gradients, and
error feedback on gradients does not carry over to it. But after a while the variance
changes little. So there are two phases:

    warm-up   Adam, with the mean of all ranks' gradients
    signs     the variance is constant; each rank adds its own gradient to the momentum,
              and the ranks average the momentum, as signs and a scale for each block,
              with error feedback at both ends (`CodedSum`)

    sent per step   2(n-1)/n of the parameters at first, then about a 26th of that

An element that had no gradient in warm-up has no variance to divide by: it is not
updated afterwards. One with a very small variance would get steps that are too large,
since its block's scale applies to it, too; so roots of variances are at least `floor`
times the root mean square of those in the parameter.

Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's
convergence speed" (2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import BadArgument
from unisono.parallel.common.flat import CPU, views
from unisono.parallel.common.marking import forbid_assign
from unisono.parallel.common.module_state import sync_module_state, trainable_parameters
from unisono.parallel.common.optimizers import refuse_closure
from unisono.parallel.common.scaling import make_scalers_agree
from unisono.parallel.data.compression import (
    compressed_sum,
    feedback_state,
    load_feedback_state,
)
from unisono.runtime.communicator import Communicator
from unisono.runtime.stages import StagedWork


class OneBitAdam(Optimizer):
    """AdamW over the ranks of `comm`, which sends signs after `warmup` steps.

    It is a strategy by itself: the module is used as it is, and `step` averages over
    the ranks. `codec` may be any dense codec; the default gives the method its name.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup: int = 100,
        floor: float = 0.1,
        codec: str = "onebit",
    ) -> None:
        """Begin with rank 0's parameters; a collective call."""
        named = trainable_parameters(module, "OneBitAdam")
        if warmup < 1:
            raise BadArgument(
                f"OneBitAdam: warmup = {warmup}: expected 1 step at least, since the "
                "variance is learned there"
            )
        for name, param in named:
            if param.dtype is not torch.float32:
                raise BadArgument(
                    f"OneBitAdam: {name} is {param.dtype}; expected float32 parameters"
                )
        sync_module_state(comm, module, "OneBitAdam")
        forbid_assign(module, "OneBitAdam")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__([p for _, p in named], defaults)
        make_scalers_agree()  # gradients differ between ranks: over `comm`
        self.comm, self.warmup, self.floor = comm, warmup, floor
        self._params = [p for _, p in named]
        self._sum = compressed_sum(
            comm, f"{codec}+feedback", [tuple(p.shape) for p in self._params]
        )
        self.steps = 0
        self._device = self._params[0].device if self._params else CPU
        self.momentum = torch.zeros(self._sum.count, device=self._device)
        self.variance = torch.zeros(self._sum.count, device=self._device)
        self._root: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step, the same on every rank."""
        refuse_closure(closure, "OneBitAdam")
        group = self.param_groups[0]
        first, second = group["betas"]
        self.steps += 1
        grads = self._gradients()
        if self.steps <= self.warmup:
            self.comm.all_reduce(grads, op="mean", label="gradients")
            self.momentum.lerp_(grads, 1 - first)
            self.variance.mul_(second).addcmul_(grads, grads, value=1 - second)
            root = self.variance.sqrt() / (1 - second**self.steps) ** 0.5
        else:
            self.momentum.lerp_(grads, 1 - first)
            root = self._frozen(second)
            self._average(root)
        update = self.momentum / (1 - first**self.steps) / (root + group["eps"])
        for param, part in zip(self._params, views(update, self._params), strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.sub_(part, alpha=group["lr"])

    def _gradients(self) -> Tensor:
        """This rank's gradients in one tensor; zeros where there are none."""
        flat = torch.zeros(self._sum.count, device=self._device)
        for param, part in zip(self._params, views(flat, self._params), strict=True):
            if param.grad is not None:
                part.copy_(param.grad)
        return flat

    def _average(self, root: Tensor) -> None:
        """Average the momentum over the ranks, with the codec."""
        x = self.momentum.cpu()  # on the CPU that is the same memory
        stages = self._sum.reduce(x.numpy(), label="momentum")
        StagedWork(stages, None, "1-bit Adam").wait()
        if x is not self.momentum:
            self.momentum.copy_(x)
        self.momentum /= self.comm.world_size
        self.momentum.masked_fill_(root == 0, 0.0)

    def _frozen(self, second: float) -> Tensor:
        """The roots of the variances after warm-up, with a lower bound."""
        if self._root is None:
            at_end = self.variance / (1 - second**self.warmup)
            self._root = at_end.sqrt()
            for part in views(self._root, self._params):
                least = self.floor * part.square().mean().sqrt()
                part.copy_(torch.where(part > 0, part.clamp(min=least), part))
        return self._root

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: each rank saves its own. Tensors by name, and options."""
        group = {k: v for k, v in self.param_groups[0].items() if k != "params"}
        tensors = {"momentum": self.momentum.clone(), "variance": self.variance.clone()}
        tensors |= feedback_state(self.comm, {0: self._sum})
        return {"steps": self.steps, "options": group, "tensors": tensors}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state that this rank has saved."""
        tensors = dict(state_dict["tensors"])
        momentum, variance = tensors.pop("momentum"), tensors.pop("variance")
        load_feedback_state(self.comm, {0: self._sum}, tensors)
        self.momentum.copy_(momentum)
        self.variance.copy_(variance)
        self.steps, self._root = state_dict["steps"], None
        self.param_groups[0].update(state_dict["options"])
