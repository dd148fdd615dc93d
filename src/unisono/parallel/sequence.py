"""Sequence parallelism: between the pairs of tensor parallelism, activations are cut.

Tensor parallelism leaves layer norms, dropouts and residuals whole on every rank: each
does the same work on the same numbers, and keeps them for backward. An all_reduce is a
reduce_scatter and an all_gather, though; so part the two, and let what lies between
work on shards of the sequence:

    tensor     | column | row | all_reduce  norm, dropout (whole)  | column | row | ...
    sequence   | column | row | reduce_scatter  norm, dropout (1/n)  all_gather | ...

The same bytes, and 1/n of those activations. What works on shards has parameters of
which each rank sees 1/n of the gradient: they are summed.

    plan = sequence_plan(plan, on_shards=["blocks.*.before", "norm"], enters="blocks.0")
    parallelize(net, comm, plan)

Where the sequence becomes shards: after a vocabulary embedding that the plan names, or
before a module that `enters` names. Where it ends: in the next column-parallel layer,
as the head. Dropouts on shards want another seed on each rank.

Korthikanti et al., "Reducing activation recomputation in large transformer models"
(2022).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from unisono.errors import BadArgument
from unisono.parallel import functions
from unisono.parallel.agreement import heard
from unisono.parallel.apart import is_apart
from unisono.parallel.patterns import Plan
from unisono.parallel.sharded import Sharded, Ties, shared_out
from unisono.parallel.tensor import (
    Column,
    ColumnLinear,
    Divide,
    Row,
    RowLinear,
    Vocabulary,
    expect,
)
from unisono.parallel.vocabulary import VocabularyEmbedding
from unisono.runtime.call.options import Options
from unisono.runtime.communicator import Communicator


class SequenceColumnLinear(ColumnLinear):
    """A ColumnLinear whose input is a shard of the sequence."""

    dim = 1

    def entered(self, x: Tensor) -> Tensor:
        """The whole sequence; backward, the sum of the shard's gradients."""
        return functions.all_gather(x, self.comm, self.dim, **self.how)


class SequenceRowLinear(RowLinear):
    """A RowLinear whose output is a shard of the sequence."""

    dim = 1

    def left(self, y: Tensor) -> Tensor:
        """The sum over the ranks, this rank's shard of it."""
        return _summed_shard(self, y, self.dim)


class SequenceEmbedding(VocabularyEmbedding):
    """A VocabularyEmbedding whose output is a shard of the sequence."""

    dim = 1

    def left(self, y: Tensor) -> Tensor:
        """The sum over the ranks, this rank's shard of it."""
        return _summed_shard(self, y, self.dim)


def _summed_shard(layer: Sharded, y: Tensor, dim: int) -> Tensor:
    check_length(layer.where, y, dim, layer.comm)
    return functions.reduce_scatter(y, layer.comm, dim, **layer.how)


@dataclass(frozen=True)
class SequenceColumn(Column):
    """Make the nn.Linear a SequenceColumnLinear."""

    dim: int = 1

    def apply(
        self, module: nn.Module, comm: Communicator, ties: Ties, how: Options
    ) -> nn.Module:
        """The layer that takes its place."""
        linear = expect(module, nn.Linear, self, how)
        made = SequenceColumnLinear(
            linear, comm, parts=self.parts, gather=self.gather, ties=ties, **how
        )
        made.dim = self.dim
        return made


@dataclass(frozen=True)
class SequenceRow:
    """Make the nn.Linear a SequenceRowLinear."""

    dim: int = 1

    def apply(
        self, module: nn.Module, comm: Communicator, ties: Ties, how: Options
    ) -> nn.Module:
        """The layer that takes its place."""
        linear = expect(module, nn.Linear, self, how)
        made = SequenceRowLinear(linear, comm, ties=ties, **how)
        made.dim = self.dim
        if made.bias is not None:  # it is added to a shard
            sum_gradient(made.bias, comm, {**how, "label": f"{made.where}.bias"})
        return made


@dataclass(frozen=True)
class SequenceVocabulary:
    """Make the nn.Embedding a SequenceEmbedding."""

    dim: int = 1

    def apply(
        self, module: nn.Module, comm: Communicator, ties: Ties, how: Options
    ) -> nn.Module:
        """The layer that takes its place."""
        embedding = expect(module, nn.Embedding, self, how)
        made = SequenceEmbedding(embedding, comm, ties=ties, **how)
        made.dim = self.dim
        return made


@dataclass(frozen=True)
class OnShards:
    """The module works on shards: its parameters' gradients are summed."""

    def apply(
        self, module: nn.Module, comm: Communicator, ties: Ties, how: Options
    ) -> nn.Module:
        """The module itself."""
        for name, param in module.named_parameters():
            if is_apart(param, comm):
                raise BadArgument(
                    f"sequence_plan: on_shards names {how['label']}, whose {name} is "
                    "cut over the ranks; name the modules inside that are not, as norms"
                )
            sum_gradient(param, comm, {**how, "label": f"{how['label']}.{name}"})
        return module


@dataclass(frozen=True)
class Enter:
    """The module's first input is whole, and it shall have this rank's shard of it."""

    dim: int = 1
    once: ClassVar[bool] = True

    def apply(
        self, module: nn.Module, comm: Communicator, ties: Ties, how: Options
    ) -> nn.Module:
        """The module itself."""
        _refuse_uncalled(module, how["label"])

        def cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if not args:
                with heard(comm, "an error: no input"):
                    raise BadArgument(
                        f"{how['label']}: the sequence enters here, in the first "
                        "positional argument, and there is none; pass it by position"
                    )
            check_length(how["label"], args[0], self.dim, comm)
            return functions.scatter_to(args[0], comm, self.dim, **how), *args[1:]

        module.register_forward_pre_hook(cut)
        return module


def _refuse_uncalled(module: nn.Module, where: str) -> None:
    """A list of modules is never called itself, so nothing can be cut before it."""
    if type(module).forward is nn.Module.forward:
        first = next((name for name, _ in module.named_children()), "0")
        raise BadArgument(
            f"sequence_plan: enters = {where!r} is a {type(module).__name__}, which "
            f"has no forward pass; name its first module, as '{where}.{first}'"
        )


def sequence_plan(
    plan: Plan, *, on_shards: Iterable[str], enters: str = "", dim: int = 1
) -> dict[str, Any]:
    """A plan of tensor parallelism, with the activations between its pairs cut.

    `on_shards` are the modules with parameters that lie between the pairs, as layer
    norms; `enters` is the module before which the sequence becomes shards; it is the
    tensors' `dim`. It must be called itself, as a list is not. Without it, that is
    where the vocabulary embedding ends.
    """
    made: dict[str, Any] = {}
    for name, style in plan.items():
        if isinstance(style, Column):
            made[name] = SequenceColumn(style.parts, style.gather, dim)
        elif isinstance(style, Row):
            made[name] = SequenceRow(dim)
        elif isinstance(style, Vocabulary) and not enters:
            made[name] = SequenceVocabulary(dim)
        else:
            made[name] = style
    added: dict[str, Any] = {name: OnShards() for name in on_shards}
    if enters:
        added[enters] = Enter(dim)
    for name in sorted(set(added) & set(made)):
        if not isinstance(made[name], Divide):
            raise BadArgument(
                f"sequence_plan: {name!r} is in the plan already, as {made[name]}; a "
                "layer that is cut does not work on shards of the sequence"
            )
        added[name] = made[name], added[name]
    return {**made, **added}


def sum_gradient(param: nn.Parameter, comm: Communicator, how: Options) -> None:
    """From now on this parameter's gradient is the sum of all ranks'.

    Once is enough, though the parameter may stand in several modules.
    """
    known = getattr(param, "unisono_summed", ())
    if not param.requires_grad or comm in known:
        return
    param.unisono_summed = (*known, comm)  # type: ignore[attr-defined]

    def summed(grad: Tensor) -> Tensor:
        whole: Tensor = comm.all_reduce(grad.detach().clone(), **how)
        return whole

    param.register_hook(summed)


def check_length(where: str, x: Tensor, dim: int, comm: Communicator) -> None:
    """Raise if the sequence cannot be cut evenly."""
    with heard(comm, "an error: sequence length"):
        if not -x.dim() <= dim < x.dim():
            raise BadArgument(
                f"{where}: {list(x.shape)} has no dim {dim}; say with dim= which is "
                "the sequence"
            )
        told = f"{where}: the sequence, dim {dim} of {list(x.shape)}"
        shared_out(told, x.shape[dim], comm.world_size)
