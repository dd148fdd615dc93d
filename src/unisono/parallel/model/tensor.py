"""Tensor parallelism: each layer's weights are sharded; all ranks have every batch.

    plan = {
        **mlp_plan("blocks.*.mlp", up="0", down="2"),
        **attention_plan("blocks.*", qkv="qkv", out="out", heads="heads"),
        "words": Vocabulary(),
        "head": Column(),
    }
    parallelize(net, comm, plan)

Two ways to shard y = x Wᵀ + b make a pair (Megatron):

    ColumnLinear   W's rows: each rank has some of the outputs
                   forward nothing,           backward all_reduce of x's gradient
    RowLinear      W's columns: each rank has some of the inputs
                   forward all_reduce of y,   backward nothing

Between the two, layers treat each feature (or each head) by itself, and so work on
shards. A transformer's block has two such pairs: two all_reduces of the activation in
each direction, and none of weights. Every rank has every batch, and the same loss.

    memory per rank   1/n of the sharded weights, their gradients and optimizer state
    sent per block    2 · 2(n-1)/n of the activation forward, and as much backward

Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using
model parallelism" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from unisono.errors import BadArgument
from unisono.parallel.common.agreement import setup_together
from unisono.parallel.common.marking import forbid_assign
from unisono.parallel.common.module_state import sync_module_state
from unisono.parallel.common.shard_math import divide_evenly
from unisono.parallel.model.linear import ColumnLinear, RowLinear, share_inputs
from unisono.parallel.model.patterns import (
    ParallelPlan,
    PlanEntry,
    log_matches,
    resolve_plan,
)
from unisono.parallel.model.sharded_layer import Ties
from unisono.parallel.model.vocabulary import VocabularyEmbedding
from unisono.runtime.call.options import Options
from unisono.runtime.communicator import Communicator

# --- styles: what a plan does with a module


@dataclass(frozen=True)
class Column:
    """Replace an nn.Linear by a ColumnLinear."""

    parts: int = 1
    gather: bool = False

    def apply(
        self,
        module: nn.Module,
        comm: Communicator,
        ties: Ties,
        options: Options,
    ) -> nn.Module:
        """The new layer."""
        linear = expect(module, nn.Linear, self, options)
        return ColumnLinear(
            linear, comm, parts=self.parts, gather=self.gather, ties=ties, **options
        )


@dataclass(frozen=True)
class Row:
    """Replace an nn.Linear by a RowLinear."""

    def apply(
        self,
        module: nn.Module,
        comm: Communicator,
        ties: Ties,
        options: Options,
    ) -> nn.Module:
        """The new layer."""
        return RowLinear(
            expect(module, nn.Linear, self, options), comm, ties=ties, **options
        )


@dataclass(frozen=True)
class Vocabulary:
    """Replace an nn.Embedding by a VocabularyEmbedding."""

    def apply(
        self,
        module: nn.Module,
        comm: Communicator,
        ties: Ties,
        options: Options,
    ) -> nn.Module:
        """The new layer."""
        embedding = expect(module, nn.Embedding, self, options)
        return VocabularyEmbedding(embedding, comm, ties=ties, **options)


@dataclass(frozen=True)
class Divide:
    """Divide an attribute of the module, as its number of heads, by that of ranks."""

    attribute: str

    def apply(
        self,
        module: nn.Module,
        comm: Communicator,
        ties: Ties,
        options: Options,
    ) -> nn.Module:
        """The module itself."""
        number = getattr(module, self.attribute, None)
        if not isinstance(number, int):
            raise BadArgument(
                f"{options['label']}: {self.attribute} is {number!r}; {self} needs a "
                "whole number"
            )
        mine = divide_evenly(
            f"{options['label']}.{self.attribute}", number, comm.world_size
        )
        setattr(module, self.attribute, mine)
        return module


def mlp_plan(where: str, *, up: str, down: str) -> dict[str, Any]:
    """The plan for an MLP: `up` by columns, `down` by rows."""
    return {f"{where}.{up}": Column(), f"{where}.{down}": Row()}


def attention_plan(
    where: str, *, qkv: str | tuple[str, ...], out: str, heads: str
) -> dict[str, Any]:
    """The plan for attention, sharded by heads.

    `qkv` is one layer whose output is queries, keys and values, or the names of three,
    which communicate once if they get the same input.
    `heads` is the attribute with the number of heads; the module's forward must take
    other sizes from its tensors.
    """
    one = isinstance(qkv, str)
    names = (qkv,) if isinstance(qkv, str) else qkv
    columns = {f"{where}.{name}": Column(parts=3 if one else 1) for name in names}
    return {**columns, f"{where}.{out}": Row(), where: Divide(heads)}


def parallelize(
    module: nn.Module,
    comm: Communicator,
    plan: ParallelPlan,
    *,
    reproducible: bool = False,
) -> nn.Module:
    """Shard the module's layers as the plan says, in place; a collective call.

    The plan maps names of modules, in which * matches any one component (see
    `patterns`), to Column, Row, Vocabulary, Divide or a style of `sequence`, or to a
    tuple of these. The number of modules that each pattern matches is logged. All ranks
    begin with rank 0's parameters. `reproducible`: the bits depend only on the inputs.
    """
    sync_module_state(comm, module, "parallelize", skip_sharded=True)
    with setup_together(comm, "parallelize") as settings:
        entries = list(resolve_plan(module, plan))
        settings += [f"{name}: {style}" for name, _, style in entries]
        settings.append(f"reproducible = {reproducible}")
    if comm.rank == 0:
        log_matches(entries, plan)
    with setup_together(comm, "parallelize"):  # a size may not be divisible
        return _applied(module, comm, entries, reproducible)


def _applied(
    module: nn.Module, comm: Communicator, entries: list[PlanEntry], reproducible: bool
) -> nn.Module:
    ties: Ties = {}
    done: dict[tuple[int, Any], tuple[nn.Module, nn.Module]] = {}
    for name, _, style in entries:
        options: Options = {"label": name, "reproducible": reproducible}
        old = module.get_submodule(name)
        if (id(old), style) not in done:  # a module may have several names
            new = style.apply(old, comm, ties, options)
            # Both are kept, so that no other object gets their ids.
            done[id(old), style] = done[id(new), style] = old, new
        _, new = done[id(old), style]
        if not name:
            module = new
        else:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, new)
    _check_ties(module, ties)
    share_inputs(module)
    forbid_assign(module, "parallelize")
    return module


def expect(module: nn.Module, kind: type[Any], style: object, options: Options) -> Any:
    """The module, if it is of the class that the style replaces."""
    if not isinstance(module, kind):
        raise BadArgument(
            f"parallelize: {options['label']} is a {type(module).__name__}, {style} is "
            f"for an nn.{kind.__name__}; change the plan"
        )
    return module


def _check_ties(module: nn.Module, ties: Ties) -> None:
    """Raise unless a tied parameter is sharded in the same way in all its layers."""
    shard_of: dict[int, int] = {}
    for (number, _), (_, shard) in ties.items():
        if shard_of.setdefault(number, id(shard)) != id(shard):
            raise BadArgument(
                "parallelize: two layers share a parameter, and the plan shards it in "
                "two ways; shard both along the same dim"
            )
    for name, param in module.named_parameters():
        if id(param) in shard_of and shard_of[id(param)] != id(param):
            raise BadArgument(
                f"parallelize: {name} is tied to a layer that the plan shards; name "
                "both in the plan"
            )
