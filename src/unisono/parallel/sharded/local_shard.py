"""What a rank has of a sharded parameter, and how to get from there to the whole.

Sharding cuts flat tensors, not parameters, so a rank may own all of a parameter, a run
of its elements, or nothing. To an optimizer a piece is a parameter of one dimension;
whatever works element by element does not see the difference. For people, files and
other world sizes everything is put together again under the parameter's own name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import BadArgument, UsageError
from unisono.parallel.common.flat import Named, shares
from unisono.runtime.communicator import Communicator

State = dict[str, Any]


@dataclass
class Piece:
    """The run of a parameter's elements that this rank owns.

    `param` has one dimension and may be empty; `counts` are the elements that each rank
    owns, in their order.
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

    def whole(self, part: Tensor) -> Tensor:
        """Put together what the ranks have of something shaped like the parameter."""
        flat = part.new_empty(sum(self.counts))
        label = f"whole {self.name}"
        self.comm.all_gather(part.detach(), out=flat, counts=self.counts, label=label)
        return flat.view(self.shape)

    def part(self, whole: Tensor) -> Tensor:
        """What this rank owns of it."""
        if whole.shape != self.shape:
            raise BadArgument(
                f"{self.name}: got a tensor of {list(whole.shape)}, the parameter has "
                f"{list(self.shape)}"
            )
        return whole.reshape(-1)[self.begin : self.begin + self.param.numel()]


def counts_in(begin: int, end: int, total: int, n: int) -> list[int]:
    """How much each of n ranks has of [begin, end) in a flat tensor of `total`."""
    bounds = list(accumulate(shares(total, n), initial=0))
    return [
        max(0, min(end, upper) - max(begin, lower)) for lower, upper in pairwise(bounds)
    ]


def whole_parameters(pieces: Sequence[Piece]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter in full, one at a time, on every rank."""
    for piece in pieces:
        yield piece.name, piece.whole(piece.param)


@torch.no_grad()
def load_parameters(pieces: Sequence[Piece], state: Mapping[str, Tensor]) -> None:
    """Take this rank's part of every parameter; nothing is sent."""
    for piece in pieces:
        piece.param.copy_(piece.part(state[piece.name]))


def module_state(module: nn.Module, pieces: Sequence[Piece]) -> State:
    """The plain state dict of a module that has these pieces; all ranks together."""
    state = dict(module.state_dict())
    whole = dict(whole_parameters(pieces))
    # A parameter that stands in several places has a name for each.
    at = {id(p.param): whole[p.name] for p in pieces}
    named = module.named_parameters(remove_duplicate=False)
    state.update({name: at[id(param)] for name, param in named})
    return state


def load_module_state(
    module: nn.Module, pieces: Sequence[Piece], state: Mapping[str, Any], strict: bool
) -> Any:
    """The way back; nothing is sent. Like torch, it tells which names do not fit."""
    known = module.state_dict()
    missing = [name for name in known if name not in state]
    unexpected = [name for name in state if name not in known]
    if strict and (missing or unexpected):
        raise BadArgument(
            f"FSDP.load_state_dict: missing {missing[:3]}, unexpected "
            f"{unexpected[:3]}; give the module's own names, or strict=False"
        )
    load_parameters([p for p in pieces if p.name in state], state)
    for name, buffer in module.named_buffers():
        if name in state:
            buffer.copy_(state[name])
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def optimizer_state(optimizer: Optimizer, pieces: Sequence[Piece]) -> State:
    """Its state with whole tensors under the parameters' names, on every rank."""
    state: State = {}
    for piece in pieces:
        mine = optimizer.state.get(piece.param, {})
        state[piece.name] = {
            key: piece.whole(value) if _shaped(value, piece) else _copied(value)
            for key, value in sorted(mine.items())
        }
    names = {piece.param: piece.name for piece in pieces}
    groups = [
        {**group, "params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    optimizer: Optimizer, pieces: Sequence[Piece], whole: State
) -> None:
    """Take this rank's part of a state that any number of ranks have saved."""
    by_name = {piece.name: piece for piece in pieces}
    told = [set(g["params"]) for g in whole["param_groups"]]
    names = {piece.param: piece.name for piece in pieces}
    mine = [{names[p] for p in g["params"]} for g in optimizer.param_groups]
    if told != mine:
        raise BadArgument(
            f"load_state_dict: the state has groups of {[len(t) for t in told]} "
            f"parameters, the optimizer has {[len(m) for m in mine]}, or other names; "
            "make the optimizer as it was when the state was saved"
        )
    for name, values in whole["state"].items():
        piece = by_name[name]
        optimizer.state[piece.param] = {
            key: piece.part(value).clone()
            if isinstance(value, Tensor) and value.shape == piece.shape
            else _copied(value)
            for key, value in values.items()
        }
    for group, said in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        group.update({k: v for k, v in said.items() if k != "params"})


def _shaped(value: object, piece: Piece) -> bool:
    """Whether it has an element for each of the piece's, and is no mere number."""
    return isinstance(value, Tensor) and value.shape == piece.param.shape


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def refuse_closure(closure: object, where: str) -> None:
    """A closure would run forward and backward as often as each rank likes."""
    if closure is not None:
        raise UsageError(
            f"{where}.step(closure): closures are not supported, since every rank must "
            "run forward and backward equally often; call them yourself, then step()"
        )


_WHOLE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


def refuse_whole(optimizer: object, where: str) -> None:
    """Some optimizers look at more than one element at a time."""
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    if name in _WHOLE:
        raise BadArgument(
            f"{where}: {name} needs whole parameters, and a rank has runs of their "
            "elements; use one that works element by element, such as AdamW or SGD"
        )


def refuse_strangers(groups: list[dict[str, Any]], named: Named) -> None:
    """Groups are of the module's own parameters, those that learn."""
    known = {param for _, param in named}
    strangers = [p for g in groups for p in g["params"] if p not in known]
    if strangers:
        raise BadArgument(
            f"ZeRO: groups have {len(strangers)} tensors that are not trainable "
            "parameters of the module"
        )


def is_plain(value: object) -> bool:
    """Whether an option reads the same on every rank that means the same."""
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, bool | int | float | str) for part in parts)
