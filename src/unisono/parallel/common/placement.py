"""Where ranks have different parameters on purpose: a mark, set where they are cut.

    parallelize    a shard of a layer's parameter     apart over tp
    MoE            some of the experts                apart over ep
    Pipeline       some of the layers                 apart over pp
    FSDP, ZeRO     a piece of any of these            apart over dp as well

The mark says over which communicators a parameter is cut, in the order in which that
was done. Whoever averages, broadcasts or counts parameters asks it, and needs to know
nothing of the strategies that set it. What has no mark is the same on all ranks.

Marks and hooks belong to parameters, so these must stay: `load_state_dict(assign=True)`
puts others in their places and is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from unisono.errors import BadArgument, UsageError
from unisono.runtime.communicator import Communicator


class Apart(NamedTuple):
    """One cut: among whom, and whether the gradients need no averaging by others."""

    comm: Communicator
    averaged: bool = False

    def common(self, comm: Communicator) -> int:
        """How many ranks of `comm` have different parts by this cut; 1 is as none."""
        return max(1, len(set(self.comm.world_ranks) & set(comm.world_ranks)))


def cuts_of(param: Tensor) -> tuple[Apart, ...]:
    """How a parameter was cut, one after the other; nothing if it is whole."""
    cuts: tuple[Apart, ...] = getattr(param, "unisono_cuts", ())
    return cuts


def keep_apart(
    param: nn.Parameter,
    comm: Communicator,
    *,
    of: Tensor | None = None,
    averaged: bool = False,
) -> nn.Parameter:
    """Mark that each rank of `comm` has a part of its own here; `of` one cut before.

    `averaged`: its gradient is made that of the mean of all losses where it was cut.
    """
    from unisono.parallel.common.scaling import (
        make_scalers_agree,  # which reads the marks
    )

    make_scalers_agree()
    before = cuts_of(param if of is None else of)
    param.unisono_cuts = (*before, Apart(comm, averaged))  # type: ignore[attr-defined]
    return param


def is_apart(param: Tensor, comm: Communicator) -> bool:
    """Whether ranks of `comm` have different parameters here, on purpose."""
    return parts_in(param, comm) > 1


def parts_in(param: Tensor, comm: Communicator) -> int:
    """How many different parts of the parameter the ranks of `comm` have."""
    parts = 1
    for cut in cuts_of(param):
        parts *= cut.common(comm)
    return min(parts, comm.world_size)


def refuse_unaveraged(
    named: list[tuple[str, nn.Parameter]], comm: Communicator, where: str
) -> None:
    """Who averages over `comm` cannot leave out what nobody else averages."""
    for name, param in named:
        for cut in cuts_of(param):
            if cut.common(comm) > 1 and not cut.averaged:
                raise BadArgument(
                    f"{where}: ranks {list(cut.comm.world_ranks)} have a shard of "
                    f'{name} each; use ranks that have the same, as mesh["dp"]'
                )


def keep_parameters(module: nn.Module, where: str) -> None:
    """From now on refuse to load other parameters into the places of the module's."""
    for part in module.modules():
        part.register_load_state_dict_pre_hook(partial(_refuse_assign, where))


def _refuse_assign(
    where: str,
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *_: Any,
) -> None:
    """Before a module takes its state: the values may change, not the parameters."""
    if metadata.get("assign_to_params_buffers", False):
        refuse_assign(where)


def refuse_assign(where: str) -> None:
    """The error for load_state_dict(assign=True)."""
    raise UsageError(
        f"load_state_dict(assign=True): {where} knows the parameters that the module "
        "has, and others would be cut, averaged and clipped by nobody; leave assign "
        f"out, which copies the values, or load the state before {where}"
    )
