"""State dicts of an FSDP model and of its optimizer: full tensors, for any world size.

state = {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(adam)}
save_checkpoint("step_100.safetensors", state, comm)

state = load_checkpoint("step_100.safetensors")        on any number of ranks
model.load_state_dict(state["model"])
model.load_optimizer_state_dict(adam, state["optimizer"])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.errors import BadArgument
from unisono.parallel.common.local_shard import (
    LocalShard,
    full_module_state,
    full_optimizer_state,
    load_full_module_state,
    load_full_optimizer_state,
)
from unisono.parallel.common.marking import refuse_assign
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import fail_together


class FullState(nn.Module):
    """A wrapped module with local shards, and its full state."""

    module: nn.Module
    comm: Communicator

    @property
    def local_shards(self) -> list[LocalShard]:
        """This rank's elements of every parameter."""
        raise NotImplementedError

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Full tensors by the module's own names, on every rank; a collective call."""
        if args or options.get("prefix"):
            with fail_together(self.comm, "an error: state_dict"):
                raise BadArgument("FSDP.state_dict: takes no destination and no prefix")
        return full_module_state(self.module, self.local_shards)

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this rank's part of a full state dict; nothing is sent."""
        if assign:
            refuse_assign("FSDP")
        return load_full_module_state(
            self.module, self.local_shards, state, strict=strict
        )

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state of an optimizer of this model's parameters, by their names.

        On every rank; a collective call. It can be loaded in a world of any size.
        """
        return full_optimizer_state(optimizer, self._shards_of(optimizer))

    def load_optimizer_state_dict(
        self, optimizer: Optimizer, state: dict[str, Any]
    ) -> None:
        """Load this rank's part of a full optimizer state; nothing is sent."""
        load_full_optimizer_state(optimizer, self._shards_of(optimizer), state)

    def _shards_of(self, optimizer: Optimizer) -> list[LocalShard]:
        """The local shards that the optimizer steps."""
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        return [shard for shard in self.local_shards if shard.param in stepped]
