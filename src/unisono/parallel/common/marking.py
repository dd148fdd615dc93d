"""Marks parameters as sharded, and keeps them in their modules.

Marks and hooks belong to parameter objects, so these must stay in their modules:
`load_state_dict(assign=True)` would replace them and is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.parallel.common.placement import ShardedOver, placements_of
from unisono.parallel.common.scaling import make_scalers_agree
from unisono.runtime.communicator import Communicator


def mark_sharded(
    param: nn.Parameter,
    comm: Communicator,
    *,
    of: Tensor | None = None,
    averaged: bool = False,
) -> nn.Parameter:
    """Mark that each rank of `comm` has a different shard of this parameter.

    `of` is the tensor that was sharded, whose own marks are kept. `averaged`: the
    caller averages the gradient over the ranks.
    """
    make_scalers_agree()
    before = placements_of(param if of is None else of)
    placements = (*before, ShardedOver(comm, averaged))
    param.unisono_placements = placements  # type: ignore[attr-defined]
    return param


def forbid_assign(module: nn.Module, where: str) -> None:
    """From now on refuse `load_state_dict(assign=True)` of the module and its parts."""
    for part in module.modules():
        part.register_load_state_dict_pre_hook(partial(_check_assign, where))


def _check_assign(
    where: str,
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *_: Any,
) -> None:
    """Before a module loads its state: values may change, parameter objects may not."""
    if metadata.get("assign_to_params_buffers", False):
        refuse_assign(where)


def refuse_assign(where: str) -> None:
    """The error for load_state_dict(assign=True)."""
    raise UsageError(
        f"load_state_dict(assign=True): {where} holds references to the module's "
        "parameters, and new ones would not be sharded, averaged or clipped; leave "
        f"assign out, which copies the values, or load the state before {where}"
    )
