"""Tensor parallelism: each layer's weights are cut, and all ranks work on every batch.

    plan = {
        **mlp_plan("blocks.*.mlp", up="0", down="2"),
        **attention_plan("blocks.*", qkv="qkv", out="out", heads="heads"),
        "words": Vocabulary(),
        "head": Column(),
    }
    parallelize(net, comm, plan)

Two ways to cut y = x Wᵀ + b, which make a pair (Megatron):

    ColumnLinear   W's rows: each rank has some of the outputs
                   forward nothing,           backward all_reduce of x's gradient
    RowLinear      W's columns: each rank has some of the inputs
                   forward all_reduce of y,   backward nothing

What lies between the two works on each feature (or each head) by itself, and so on
shards. A transformer's block has two such pairs: two all_reduces of the activation in
each direction, and none of weights. Every rank has every batch, and the same loss.

    memory per rank   1/n of the cut weights, their gradients and optimizer state
    sent per block    2 · 2(n-1)/n of the activation forward, and as much backward

Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using
model parallelism" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from unisono.errors import BadArgument
from unisono.parallel import functions
from unisono.parallel.agreement import heard, prepared
from unisono.parallel.apart import keep_parameters
from unisono.parallel.flat import same_start
from unisono.parallel.patterns import Plan, Step, resolved, tell
from unisono.parallel.sharded import Cut, Sharded, Ties, shared_out
from unisono.parallel.vocabulary import VocabularyEmbedding
from unisono.runtime.call.options import Options
from unisono.runtime.communicator import Communicator


class ColumnLinear(Sharded):
    """A linear layer of which this rank has some of the outputs.

    `parts` of equal size that lie one after the other in the outputs (3 for queries,
    keys and values) are cut each by itself. `gather`: every rank gets all outputs.
    """

    def __init__(
        self,
        linear: nn.Linear,
        comm: Communicator,
        *,
        parts: int = 1,
        gather: bool = False,
        ties: Ties | None = None,
        **how: Any,
    ) -> None:
        """Keep this rank's shard of `linear`, which is the same on every rank."""
        cut = Cut(0, parts)
        super().__init__(comm, {"weight": cut, "bias": cut}, how)
        self.gather = gather
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.take("weight", linear.weight, ties)
        self.take("bias", linear.bias, ties)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's outputs, or with `gather` all of them."""
        y = functional.linear(self.entered(x), self.weight, self.bias)
        if self.gather:
            return functions.gather_from(y, self.comm, -1, **self.how)
        return y

    def entered(self, x: Tensor) -> Tensor:
        """The input as it is needed here: whole."""
        return functions.copy_to(x, self.comm, **self.how)


class RowLinear(Sharded):
    """A linear layer of which this rank has some of the inputs; all get the outputs."""

    def __init__(
        self,
        linear: nn.Linear,
        comm: Communicator,
        *,
        ties: Ties | None = None,
        **how: Any,
    ) -> None:
        """Keep this rank's shard of `linear`; the bias is not cut, and added last."""
        super().__init__(comm, {"weight": Cut(1)}, how)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.take("weight", linear.weight, ties)
        self.take("bias", linear.bias, ties)

    def forward(self, x: Tensor) -> Tensor:
        """All outputs, from this rank's inputs and those of the others."""
        if x.shape[-1] != self.weight.shape[1]:
            with heard(self.comm, "an error: a row's input"):
                raise BadArgument(
                    f"{self.where}: the input has {x.shape[-1]} features, expected "
                    f"this rank's {self.weight.shape[1]} of {self.in_features}; they "
                    "come from a column-parallel layer before it that does not gather"
                )
        y = self.left(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    def left(self, y: Tensor) -> Tensor:
        """The output as it is needed after this: the sum over the ranks."""
        return functions.all_reduce(y, self.comm, **self.how)


# --- what a plan says of a module


@dataclass(frozen=True)
class Column:
    """Make the nn.Linear a ColumnLinear."""

    parts: int = 1
    gather: bool = False

    def apply(
        self, module: nn.Module, comm: Communicator, ties: Ties, how: Options
    ) -> nn.Module:
        """The layer that takes its place."""
        linear = expect(module, nn.Linear, self, how)
        return ColumnLinear(
            linear, comm, parts=self.parts, gather=self.gather, ties=ties, **how
        )


@dataclass(frozen=True)
class Row:
    """Make the nn.Linear a RowLinear."""

    def apply(
        self, module: nn.Module, comm: Communicator, ties: Ties, how: Options
    ) -> nn.Module:
        """The layer that takes its place."""
        return RowLinear(expect(module, nn.Linear, self, how), comm, ties=ties, **how)


@dataclass(frozen=True)
class Vocabulary:
    """Make the nn.Embedding a VocabularyEmbedding."""

    def apply(
        self, module: nn.Module, comm: Communicator, ties: Ties, how: Options
    ) -> nn.Module:
        """The layer that takes its place."""
        embedding = expect(module, nn.Embedding, self, how)
        return VocabularyEmbedding(embedding, comm, ties=ties, **how)


@dataclass(frozen=True)
class Divide:
    """Divide a number that the module keeps, as its heads, by the number of ranks."""

    attribute: str

    def apply(
        self, module: nn.Module, comm: Communicator, ties: Ties, how: Options
    ) -> nn.Module:
        """The module itself."""
        number = getattr(module, self.attribute, None)
        if not isinstance(number, int):
            raise BadArgument(
                f"{how['label']}: {self.attribute} is {number!r}; {self} needs a whole "
                "number"
            )
        mine = shared_out(f"{how['label']}.{self.attribute}", number, comm.world_size)
        setattr(module, self.attribute, mine)
        return module


def mlp_plan(where: str, *, up: str, down: str) -> dict[str, Any]:
    """The plan for a perceptron: `up` by columns, `down` by rows."""
    return {f"{where}.{up}": Column(), f"{where}.{down}": Row()}


def attention_plan(
    where: str, *, qkv: str | tuple[str, ...], out: str, heads: str
) -> dict[str, Any]:
    """The plan for attention: whole heads on each rank.

    `qkv` is one layer that makes queries, keys and values, one after the other, or the
    names of three. `heads` is the attribute that has the number of heads; the module's
    forward must take other sizes from its tensors.
    """
    one = isinstance(qkv, str)
    names = (qkv,) if isinstance(qkv, str) else qkv
    columns = {f"{where}.{name}": Column(parts=3 if one else 1) for name in names}
    return {**columns, f"{where}.{out}": Row(), where: Divide(heads)}


def parallelize(
    module: nn.Module, comm: Communicator, plan: Plan, *, reproducible: bool = False
) -> nn.Module:
    """Cut the module's layers as the plan says, in place; all ranks together.

    The plan maps names of modules, in which * stands for any one component (see
    `patterns`), to Column, Row, Vocabulary, Divide or what `sequence` has, or to a
    tuple of these. How many modules each pattern matches is logged. All begin with the
    first rank's parameters. `reproducible`: the bits depend on nothing but the inputs.
    """
    same_start(comm, module, "parallelize", leaves_apart=True)
    with prepared(comm, "parallelize") as told:
        todo = list(resolved(module, plan))
        told += [f"{name}: {style}" for name, _, style in todo]
        told.append(f"reproducible = {reproducible}")
    if comm.rank == 0:
        tell(todo, plan)
    with prepared(comm, "parallelize"):  # a layer may refuse to be cut
        return _applied(module, comm, todo, reproducible)


def _applied(
    module: nn.Module, comm: Communicator, todo: list[Step], reproducible: bool
) -> nn.Module:
    ties: Ties = {}
    done: dict[tuple[int, Any], tuple[nn.Module, nn.Module]] = {}
    for name, _, style in todo:
        how: Options = {"label": name, "reproducible": reproducible}
        old = module.get_submodule(name)
        if (id(old), style) not in done:  # a module may stand in several places
            made = style.apply(old, comm, ties, how)
            # Both are kept, so that nobody else gets their identity.
            done[id(old), style] = done[id(made), style] = old, made
        _, made = done[id(old), style]
        if not name:
            module = made
        else:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, made)
    _no_tie_broken(module, ties)
    keep_parameters(module, "parallelize")
    return module


def expect(module: nn.Module, kind: type[Any], style: object, how: Options) -> Any:
    """The module, if it is of the kind that the style is for."""
    if not isinstance(module, kind):
        raise BadArgument(
            f"parallelize: {how['label']} is a {type(module).__name__}, {style} is for "
            f"an nn.{kind.__name__}; change the plan"
        )
    return module


def _no_tie_broken(module: nn.Module, ties: Ties) -> None:
    """A parameter that two layers share is cut in both, and in the same way."""
    cut: dict[int, int] = {}
    for (number, _), (_, shard) in ties.items():
        if cut.setdefault(number, id(shard)) != id(shard):
            raise BadArgument(
                "parallelize: two layers share a parameter, and the plan cuts it in "
                "two ways; cut both along the same dim"
            )
    for name, param in module.named_parameters():
        if id(param) in cut and cut[id(param)] != id(param):
            raise BadArgument(
                f"parallelize: {name} is shared with a layer that the plan cuts; name "
                "both in the plan"
            )
