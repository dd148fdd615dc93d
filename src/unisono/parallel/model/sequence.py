"""Sequence parallelism: activations between tensor parallel pairs are sharded.

Tensor parallelism replicates layer norms, dropouts and residuals: each rank computes
the same values, and keeps them for backward. But an all_reduce is a reduce_scatter and
an all_gather. Sequence parallelism separates the two, and what lies between them works
on shards of the sequence:

    tensor     | column | row | all_reduce  norm, dropout (replicated)  | column | ...
    sequence   | column | row | reduce_scatter  norm, dropout (1/n)  all_gather | ...

It sends the same bytes, and keeps 1/n of those activations. Parameters of modules that
work on shards have 1/n of the gradient on each rank: the gradients are summed.

    plan = sequence_plan(plan, on_shards=["blocks.*.before", "norm"], enters="blocks.0")
    parallelize(net, comm, plan)

The sequence is sharded after a vocabulary embedding that the plan names, or before the
module that `enters` names. It is gathered in the next column-parallel layer, as the
head. Dropouts on shards need a different seed on each rank.

Korthikanti et al., "Reducing activation recomputation in large transformer models"
(2022).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from unisono.errors import BadArgument
from unisono.parallel.common import functions
from unisono.parallel.common.placement import is_sharded
from unisono.parallel.common.shard_math import divide_evenly
from unisono.parallel.model.linear import ColumnLinear, RowLinear
from unisono.parallel.model.patterns import ParallelPlan
from unisono.parallel.model.sharded_layer import ShardedLayer, Ties
from unisono.parallel.model.tensor import (
    Column,
    Divide,
    Row,
    Vocabulary,
    expect,
)
from unisono.parallel.model.vocabulary import VocabularyEmbedding
from unisono.runtime.call.options import Options
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import fail_together


class SequenceColumnLinear(ColumnLinear):
    """A ColumnLinear whose input is a shard of the sequence."""

    dim = 1

    @property
    def input_key(self) -> Hashable:
        """Equal for layers that prepare an input alike."""
        return super().input_key, self.dim

    def prepare_input(self, x: Tensor) -> Tensor:
        """The whole sequence; backward, the sum of the shard's gradients."""
        return functions.all_gather(x, self.comm, self.dim, **self.options)


class SequenceRowLinear(RowLinear):
    """A RowLinear whose output is a shard of the sequence."""

    dim = 1

    def reduce_output(self, y: Tensor) -> Tensor:
        """This rank's shard of the sum over the ranks."""
        return _summed_shard(self, y, self.dim)


class SequenceEmbedding(VocabularyEmbedding):
    """A VocabularyEmbedding whose output is a shard of the sequence."""

    dim = 1

    def reduce_output(self, y: Tensor) -> Tensor:
        """This rank's shard of the sum over the ranks."""
        return _summed_shard(self, y, self.dim)


def _summed_shard(layer: ShardedLayer, y: Tensor, dim: int) -> Tensor:
    check_length(layer.where, y, dim, layer.comm)
    return functions.reduce_scatter(y, layer.comm, dim, **layer.options)


@dataclass(frozen=True)
class SequenceColumn(Column):
    """Replace an nn.Linear by a SequenceColumnLinear."""

    dim: int = 1

    def apply(
        self,
        module: nn.Module,
        comm: Communicator,
        ties: Ties,
        options: Options,
    ) -> nn.Module:
        """The new layer."""
        linear = expect(module, nn.Linear, self, options)
        layer = SequenceColumnLinear(
            linear, comm, parts=self.parts, gather=self.gather, ties=ties, **options
        )
        layer.dim = self.dim
        return layer


@dataclass(frozen=True)
class SequenceRow:
    """Replace an nn.Linear by a SequenceRowLinear."""

    dim: int = 1

    def apply(
        self,
        module: nn.Module,
        comm: Communicator,
        ties: Ties,
        options: Options,
    ) -> nn.Module:
        """The new layer."""
        linear = expect(module, nn.Linear, self, options)
        layer = SequenceRowLinear(linear, comm, ties=ties, **options)
        layer.dim = self.dim
        if layer.bias is not None:  # it is added to a shard
            sum_gradient(layer.bias, comm, {**options, "label": f"{layer.where}.bias"})
        return layer


@dataclass(frozen=True)
class SequenceVocabulary:
    """Replace an nn.Embedding by a SequenceEmbedding."""

    dim: int = 1

    def apply(
        self,
        module: nn.Module,
        comm: Communicator,
        ties: Ties,
        options: Options,
    ) -> nn.Module:
        """The new layer."""
        embedding = expect(module, nn.Embedding, self, options)
        layer = SequenceEmbedding(embedding, comm, ties=ties, **options)
        layer.dim = self.dim
        return layer


@dataclass(frozen=True)
class OnShards:
    """The module works on shards: its parameters' gradients are summed."""

    def apply(
        self,
        module: nn.Module,
        comm: Communicator,
        ties: Ties,
        options: Options,
    ) -> nn.Module:
        """The module itself."""
        for name, param in module.named_parameters():
            if is_sharded(param, comm):
                raise BadArgument(
                    f"sequence_plan: on_shards names {options['label']}, whose {name} "
                    "is sharded over the ranks; name the modules inside that are not, "
                    "as norms"
                )
            sum_gradient(
                param, comm, {**options, "label": f"{options['label']}.{name}"}
            )
        return module


@dataclass(frozen=True)
class Enter:
    """The module's first input is replicated; pass it this rank's shard."""

    dim: int = 1
    once: ClassVar[bool] = True

    def apply(
        self,
        module: nn.Module,
        comm: Communicator,
        ties: Ties,
        options: Options,
    ) -> nn.Module:
        """The module itself."""
        _check_callable(module, options["label"])

        def shard_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if not args:
                with fail_together(comm, "an error: no input"):
                    raise BadArgument(
                        f"{options['label']}: the sequence enters here, in the first "
                        "positional argument, and there is none; pass it by position"
                    )
            check_length(options["label"], args[0], self.dim, comm)
            return functions.scatter_to(args[0], comm, self.dim, **options), *args[1:]

        module.register_forward_pre_hook(shard_input)
        return module


def _check_callable(module: nn.Module, where: str) -> None:
    """A list of modules is never called itself, so its input cannot be sharded."""
    if type(module).forward is nn.Module.forward:
        first = next((name for name, _ in module.named_children()), "0")
        raise BadArgument(
            f"sequence_plan: enters = {where!r} is a {type(module).__name__}, which "
            f"has no forward pass; name its first module, as '{where}.{first}'"
        )


def sequence_plan(
    plan: ParallelPlan, *, on_shards: Iterable[str], enters: str = "", dim: int = 1
) -> dict[str, Any]:
    """A plan of tensor parallelism, with the activations between its pairs sharded.

    `on_shards` are the modules with parameters between the pairs, as layer norms.
    `enters` is the module whose input is sharded, along `dim`; it must be a module that
    is called, which a ModuleList is not. Without it, the output of the vocabulary
    embedding is sharded.
    """
    changed: dict[str, Any] = {}
    for name, style in plan.items():
        if isinstance(style, Column):
            changed[name] = SequenceColumn(style.parts, style.gather, dim)
        elif isinstance(style, Row):
            changed[name] = SequenceRow(dim)
        elif isinstance(style, Vocabulary) and not enters:
            changed[name] = SequenceVocabulary(dim)
        else:
            changed[name] = style
    added: dict[str, Any] = {name: OnShards() for name in on_shards}
    if enters:
        added[enters] = Enter(dim)
    for name in sorted(set(added) & set(changed)):
        if not isinstance(changed[name], Divide):
            raise BadArgument(
                f"sequence_plan: {name!r} is in the plan already, as {changed[name]}; "
                "a sharded layer does not work on shards of the sequence"
            )
        added[name] = changed[name], added[name]
    return {**changed, **added}


def sum_gradient(param: nn.Parameter, comm: Communicator, options: Options) -> None:
    """From now on sum this parameter's gradient over the ranks.

    It is registered once, though the parameter may belong to several modules.
    """
    known = getattr(param, "unisono_summed", ())
    if not param.requires_grad or comm in known:
        return
    param.unisono_summed = (*known, comm)  # type: ignore[attr-defined]

    def summed(grad: Tensor) -> Tensor:
        total: Tensor = comm.all_reduce(grad.detach().clone(), **options)
        return total

    param.register_hook(summed)


def check_length(where: str, x: Tensor, dim: int, comm: Communicator) -> None:
    """Raise if the sequence cannot be divided evenly."""
    with fail_together(comm, "an error: sequence length"):
        if not -x.dim() <= dim < x.dim():
            raise BadArgument(
                f"{where}: {list(x.shape)} has no dim {dim}; pass the dim of the "
                "sequence as dim="
            )
        what = f"{where}: the sequence, dim {dim} of {list(x.shape)}"
        divide_evenly(what, x.shape[dim], comm.world_size)
