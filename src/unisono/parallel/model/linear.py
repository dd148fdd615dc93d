"""Linear layers whose weights are sharded: by columns and by rows (Megatron).

ColumnLinear   W's rows: each rank has some of the outputs
               forward nothing,           backward all_reduce of x's gradient,
                                          one for all such layers on one x
RowLinear      W's columns: each rank has some of the inputs
               forward all_reduce of y,   backward nothing
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from unisono.errors import BadArgument
from unisono.parallel.common import functions
from unisono.parallel.model.sharded_layer import Shard, ShardedLayer, Ties
from unisono.parallel.model.shared_input import SharedInput
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import fail_together


class ColumnLinear(ShardedLayer):
    """A linear layer of which this rank has some of the outputs.

    `parts`: consecutive parts of equal size in the outputs (3 for queries, keys and
    values), each sharded by itself. `gather`: every rank gets all outputs.
    """

    def __init__(
        self,
        linear: nn.Linear,
        comm: Communicator,
        *,
        parts: int = 1,
        gather: bool = False,
        ties: Ties | None = None,
        **options: Any,
    ) -> None:
        """Keep this rank's shard of `linear`, which is the same on every rank."""
        cut = Shard(0, parts)
        super().__init__(comm, {"weight": cut, "bias": cut}, options)
        self.gather = gather
        self.shared: SharedInput | None = None
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_shard("weight", linear.weight, ties)
        self.register_shard("bias", linear.bias, ties)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's outputs, or with `gather` all of them."""
        prepare = self.prepare_input
        x = prepare(x) if self.shared is None else self.shared.prepare(x, prepare)
        y = functional.linear(x, self.weight, self.bias)
        if self.gather:
            return functions.gather_from(y, self.comm, -1, **self.options)
        return y

    @property
    def input_key(self) -> Hashable:
        """Equal for layers that prepare an input alike (see `shared_input`)."""
        return type(self), id(self.comm)

    def prepare_input(self, x: Tensor) -> Tensor:
        """The input, replicated on all ranks; its gradient is summed over them."""
        return functions.copy_to(x, self.comm, **self.options)


def share_inputs(module: nn.Module) -> None:
    """Let the column-parallel layers of each module prepare a common input once."""
    for parent in module.modules():
        if type(parent).forward is nn.Module.forward:  # a list, which is not called
            continue
        groups: dict[Hashable, list[ColumnLinear]] = {}
        for child in parent.children():
            if isinstance(child, ColumnLinear) and child.shared is None:
                groups.setdefault(child.input_key, []).append(child)
        for layers in groups.values():
            if len(layers) > 1:
                shared = SharedInput()
                parent.register_forward_hook(shared.clear, always_call=True)
                for layer in layers:
                    layer.shared = shared


class RowLinear(ShardedLayer):
    """A linear layer of which this rank has some of the inputs; all get the outputs."""

    def __init__(
        self,
        linear: nn.Linear,
        comm: Communicator,
        *,
        ties: Ties | None = None,
        **options: Any,
    ) -> None:
        """Keep this rank's shard of `linear`; the bias is replicated, added last."""
        super().__init__(comm, {"weight": Shard(1)}, options)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_shard("weight", linear.weight, ties)
        self.register_shard("bias", linear.bias, ties)

    def forward(self, x: Tensor) -> Tensor:
        """All outputs, from this rank's inputs and those of the others."""
        if x.shape[-1] != self.weight.shape[1]:
            with fail_together(self.comm, "an error: a row's input"):
                raise BadArgument(
                    f"{self.where}: the input has {x.shape[-1]} features, expected "
                    f"this rank's {self.weight.shape[1]} of {self.in_features}; they "
                    "come from a column-parallel layer before it that does not gather"
                )
        y = self.reduce_output(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    def reduce_output(self, y: Tensor) -> Tensor:
        """The sum over the ranks."""
        return functions.all_reduce(y, self.comm, **self.options)
