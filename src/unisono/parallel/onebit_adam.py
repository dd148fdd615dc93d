"""1-bit Adam: momentum travels as signs, once the variance has settled.

    optimizer = OneBitAdam(model, comm, lr=1e-3, warmup=100)
    loss(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()

Adam divides by the root of the variance, so it is not linear in the gradients, and
error feedback on gradients does not carry over to it. But the variance changes little
after a while. So there are two phases:

    warm-up   Adam as ever, with the mean of all ranks' gradients
    signs     the variance stays as it is; each rank adds its own gradient to the
              momentum, and it is the momentum that all ranks average, as signs and a
              scale for each block, remembered at both ends (`runtime.remembered`)

    sent per step   2(n-1)/n of the parameters at first, then about a 26th of that

An element that had no gradient in warm-up has no variance to divide by: it is left
alone afterwards. One that had hardly any would be thrown about, since its block's signs
are as large for it as for its neighbours; so roots of variances are at least `floor` of
the root of their mean in the parameter.

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
from unisono.parallel.apart import keep_parameters
from unisono.parallel.compressed import load_memory, memory_of, summing
from unisono.parallel.flat import same_start, trainable, views
from unisono.parallel.pieces import refuse_closure
from unisono.parallel.scaling import make_scalers_agree
from unisono.runtime.communicator import Communicator
from unisono.runtime.stages import Staged


class OneBitAdam(Optimizer):
    """AdamW over the ranks of `comm`, of which little is sent after `warmup` steps.

    It takes the place of a strategy: the module is used as it is, and gradients meet in
    `step`. `codec` is any dense codec; the name is that of the usual one.
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
        """Begin with the first rank's parameters; all ranks together."""
        named = trainable(module, "OneBitAdam")
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
        same_start(comm, module, "OneBitAdam")
        keep_parameters(module, "OneBitAdam")
        told = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__([p for _, p in named], told)
        make_scalers_agree()  # on each rank's own gradients, over this:
        self.comm, self.warmup, self.floor = comm, warmup, floor
        self._params = [p for _, p in named]
        self._sum = summing(
            comm, f"{codec}+feedback", [tuple(p.shape) for p in self._params]
        )
        self.steps = 0
        self.momentum = torch.zeros(self._sum.count)
        self.variance = torch.zeros(self._sum.count)
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
        """This rank's own, in one tensor; zeros where there are none."""
        flat = torch.zeros(self._sum.count)
        for param, part in zip(self._params, views(flat, self._params), strict=True):
            if param.grad is not None:
                part.copy_(param.grad)
        return flat

    def _average(self, root: Tensor) -> None:
        """The mean of all ranks' momenta, as signs have it."""
        x = self.momentum.numpy()
        Staged(self._sum.reduce(x, label="momentum"), None, "1-bit Adam").wait()
        self.momentum /= self.comm.world_size
        self.momentum.masked_fill_(root == 0, 0.0)

    def _frozen(self, second: float) -> Tensor:
        """The roots of the variances as warm-up has left them, none of them tiny."""
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
        tensors |= memory_of(self.comm, {0: self._sum})
        return {"steps": self.steps, "options": group, "tensors": tensors}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where this rank was when it saved its state."""
        tensors = dict(state_dict["tensors"])
        momentum, variance = tensors.pop("momentum"), tensors.pop("variance")
        load_memory(self.comm, {0: self._sum}, tensors)
        self.momentum.copy_(momentum)
        self.variance.copy_(variance)
        self.steps, self._root = state_dict["steps"], None
        self.param_groups[0].update(state_dict["options"])
