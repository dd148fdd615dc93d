"""The local shard of a parameter, and full state dicts from all ranks' shards.

ZeRO and FSDP shard flat tensors, not parameters, so a rank may have all of a parameter,
a run of its elements, or nothing. To an optimizer a local shard is a parameter with one
dimension; an optimizer that works element by element gives the same result. State dicts
have full tensors under the parameter's own name, so that files are independent of the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import BadArgument
from unisono.runtime.communicator import Communicator

State = dict[str, Any]


@dataclass
class LocalShard:
    """The run of a parameter's elements that this rank has.

    `param` has one dimension and may be empty; `counts` are the elements that each rank
    has, in rank order.
    """

    name: str
    param: nn.Parameter
    shape: torch.Size
    counts: list[int]
    comm: Communicator

    @property
    def begin(self) -> int:
        """Where in the flattened parameter it begins."""
        return list(accumulate(self.counts, initial=0))[self.comm.rank]

    def full_tensor(self, local: Tensor) -> Tensor:
        """All-gather a tensor that is sharded as the parameter is."""
        flat = local.new_empty(sum(self.counts))
        label = f"full {self.name}"
        self.comm.all_gather(local.detach(), out=flat, counts=self.counts, label=label)
        return flat.view(self.shape)

    def local_part(self, full: Tensor) -> Tensor:
        """This rank's elements of a tensor that is shaped like the full parameter."""
        if full.shape != self.shape:
            raise BadArgument(
                f"{self.name}: got a tensor of {list(full.shape)}, the parameter has "
                f"{list(self.shape)}"
            )
        return full.reshape(-1)[self.begin : self.begin + self.param.numel()]


def full_parameters(shards: Sequence[LocalShard]) -> Iterator[tuple[str, Tensor]]:
    """Every full parameter, one at a time, on every rank."""
    for shard in shards:
        yield shard.name, shard.full_tensor(shard.param)


@torch.no_grad()
def load_local_shards(
    shards: Sequence[LocalShard], state: Mapping[str, Tensor]
) -> None:
    """Copy this rank's elements of every parameter; nothing is sent."""
    for shard in shards:
        shard.param.copy_(shard.local_part(state[shard.name]))


def full_module_state(module: nn.Module, shards: Sequence[LocalShard]) -> State:
    """The state dict of a module with full parameters; a collective call."""
    state = dict(module.state_dict())
    full = dict(full_parameters(shards))
    # A tied parameter has several names, and a local shard for the first of them.
    by_param = {id(shard.param): full[shard.name] for shard in shards}
    named = module.named_parameters(remove_duplicate=False)
    state.update({name: by_param[id(param)] for name, param in named})
    return state


def load_full_module_state(
    module: nn.Module,
    shards: Sequence[LocalShard],
    state: Mapping[str, Any],
    strict: bool,
) -> Any:
    """Load a full state dict; nothing is sent. Returns names that do not fit."""
    known = module.state_dict()
    missing = [name for name in known if name not in state]
    unexpected = [name for name in state if name not in known]
    if strict and (missing or unexpected):
        raise BadArgument(
            f"FSDP.load_state_dict: missing {missing[:3]}, unexpected "
            f"{unexpected[:3]}; give the module's own names, or strict=False"
        )
    load_local_shards([s for s in shards if s.name in state], state)
    for name, buffer in module.named_buffers():
        if name in state:
            buffer.copy_(state[name])
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def full_optimizer_state(optimizer: Optimizer, shards: Sequence[LocalShard]) -> State:
    """Its state with full tensors under the parameters' names, on every rank."""
    state: State = {}
    for shard in shards:
        local = optimizer.state.get(shard.param, {})
        state[shard.name] = {
            key: shard.full_tensor(value).view(_shape_in_state(shard))
            if _is_sharded(value, shard)
            else _copied(value)
            for key, value in sorted(local.items())
        }
    names = {shard.param: shard.name for shard in shards}
    groups = [
        {**group, "params": in_group}
        for group, in_group in zip(
            optimizer.param_groups, _names_in_groups(optimizer, names), strict=True
        )
    ]
    return {"state": state, "param_groups": groups}


def load_full_optimizer_state(
    optimizer: Optimizer, shards: Sequence[LocalShard], full: State
) -> None:
    """Load this rank's part of a state that any number of ranks have saved."""
    by_name = {shard.name: shard for shard in shards}
    saved = [set(group["params"]) for group in full["param_groups"]]
    names = {shard.param: shard.name for shard in shards}
    mine = [set(in_group) for in_group in _names_in_groups(optimizer, names)]
    if saved != mine:
        raise BadArgument(
            f"load_state_dict: the state has groups of {[len(s) for s in saved]} "
            f"parameters, the optimizer has {[len(m) for m in mine]}, or other names; "
            "make the optimizer as it was when the state was saved"
        )
    for name, values in full["state"].items():
        shard = by_name[name]
        optimizer.state[shard.param] = {
            key: shard.local_part(value.view(shard.shape)).to(
                shard.param.device, copy=True
            )
            if isinstance(value, Tensor) and value.shape == _shape_in_state(shard)
            else _copied(value)
            for key, value in values.items()
        }
    for group, loaded in zip(optimizer.param_groups, full["param_groups"], strict=True):
        group.update({k: v for k, v in loaded.items() if k != "params"})


def _names_in_groups(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> list[list[str]]:
    """The names of the parameters in each group of an optimizer."""
    groups = [group["params"] for group in optimizer.param_groups]
    others = [param for group in groups for param in group if param not in names]
    if others:
        raise BadArgument(
            f"optimizer state: {len(others)} of its parameters are not local shards of "
            "this model; make the optimizer of the parameters of the wrapped model"
        )
    return [[names[param] for param in group] for group in groups]


def _shape_in_state(shard: LocalShard) -> torch.Size:
    """The shape of a state with an element for each of the parameter's.

    Of a parameter without dims it has one, unlike a number such as Adam's step.
    """
    return shard.shape or torch.Size([1])


def _is_sharded(value: object, shard: LocalShard) -> bool:
    """Whether it has an element for each of the shard's, and is not a single number."""
    return isinstance(value, Tensor) and value.shape == shard.param.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
