"""Data parallelism in its simplest form: backward, then average the gradients.

Every rank has the whole model and its own part of the batch. The gradient of the mean
loss is the mean of the ranks' gradients, so one all_reduce for each parameter, after
backward, is enough. It is correct, and short enough to read in a minute. `ddp` does the
same with fewer, larger messages, while backward still runs.

    memory per rank   parameters + gradients + optimizer state, not sharded
    sent per step     2(n-1)/n of the gradients, in one message per parameter
"""

from __future__ import annotations

from typing import Any

from torch import nn

from unisono.parallel.common.module_state import sync_module_state
from unisono.runtime.communicator import Communicator


class PlainDDP(nn.Module):
    """A module whose ranks average their gradients; call `sync` after backward."""

    def __init__(
        self, module: nn.Module, comm: Communicator, *, reproducible: bool = False
    ) -> None:
        """Begin with rank 0's parameters; a collective call."""
        super().__init__()
        self.module, self.comm = module, comm
        self._options: Any = {"op": "mean", "reproducible": reproducible}
        sync_module_state(comm, module, "PlainDDP")

    def forward(self, *args: Any, **options: Any) -> Any:
        """The module's own forward pass."""
        return self.module(*args, **options)

    def sync(self) -> None:
        """Average every gradient over the ranks."""
        for name, param in self.module.named_parameters():
            if param.grad is not None:
                self.comm.all_reduce(param.grad, label=name, **self._options)
