"""A vocabulary sharded over the ranks: its embedding, and the cross entropy.

Each rank has V/n words. In the embedding it looks up the tokens it has, puts zeros for
the others, and the sum over the ranks is the result. In the loss each rank has the
logits of its words, and the softmax needs three numbers per token from all ranks:

    the largest logit          all_reduce max     so that no exponential overflows
    the sum of exponentials    all_reduce sum  ┐
    the target's logit         all_reduce sum  ┘  in one message

Backward sends nothing: a rank's gradient is softmax minus target, for its own words.
Gathering the logits instead would send V numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from unisono.errors import BadArgument
from unisono.parallel.common import functions
from unisono.parallel.model.sharded_layer import Shard, ShardedLayer, Ties
from unisono.runtime.call.options import Options
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import fail_together


class VocabularyEmbedding(ShardedLayer):
    """An embedding of which this rank has some of the rows."""

    bias: None

    def __init__(
        self,
        embedding: nn.Embedding,
        comm: Communicator,
        *,
        ties: Ties | None = None,
        **options: Any,
    ) -> None:
        """Keep this rank's rows of `embedding`, which is the same on every rank."""
        super().__init__(comm, {"weight": Shard(0)}, options)
        if embedding.max_norm is not None or embedding.sparse:
            raise BadArgument(
                f"{self.where}: an embedding with max_norm or sparse gradients cannot "
                "be sharded; create it without them"
            )
        self.num_embeddings = embedding.num_embeddings
        self.register_shard("weight", embedding.weight, ties)
        self.first = comm.rank * self.weight.shape[0]
        self.padding_idx = embedding.padding_idx

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of these tokens, from the ranks that have them."""
        with fail_together(self.comm, "an error: tokens"):
            check_words(self.where, tokens, self.num_embeddings)
        mine, local = _mine(tokens, self.first, self.weight.shape[0])
        if self.padding_idx is not None:  # its row gets no gradient
            trains = (tokens != self.padding_idx).unsqueeze(-1)
            rows = functional.embedding(local, self.weight)
            rows = torch.where(trains, rows, rows.detach())
        else:
            rows = functional.embedding(local, self.weight)
        return self.reduce_output(rows * mine.unsqueeze(-1))

    def reduce_output(self, y: Tensor) -> Tensor:
        """The sum over the ranks."""
        return functions.all_reduce(y, self.comm, **self.options)


class _CrossEntropy(Function):
    """The loss of each token, from this rank's logits (T, V/n)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, comm: Communicator, options: Options
    ) -> Tensor:
        wide = logits.detach().float() if logits.dtype.itemsize < 4 else logits.detach()
        top = wide.max(dim=-1).values
        comm.all_reduce(top, op="max", **options)
        powers = (wide - top.unsqueeze(-1)).exp_()
        words = logits.shape[-1]
        mine, local = _mine(target, comm.rank * words, words)
        chosen = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1) - top
        sums = torch.stack([powers.sum(-1), chosen * mine])
        total, logit = comm.all_reduce(sums, **options)
        ctx.save_for_backward(powers.div_(total.unsqueeze(-1)), mine, local)
        ctx.dtype = logits.dtype
        loss: Tensor = total.log() - logit
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, mine, local = ctx.saved_tensors
        grad = softmax.clone()
        grad.scatter_add_(-1, local.unsqueeze(-1), -mine.to(grad.dtype).unsqueeze(-1))
        return (grad * grads[0].unsqueeze(-1)).to(ctx.dtype), None, None, None


def vocabulary_cross_entropy(
    logits: Tensor,
    target: Tensor,
    comm: Communicator,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    reproducible: bool = False,
) -> Tensor:
    """torch's cross_entropy of logits (..., V/n), sharded over the ranks by words.

    Every rank passes the same targets (...), which index the whole vocabulary, and gets
    the same loss.
    """
    where = "vocabulary_cross_entropy"
    with fail_together(comm, "an error: cross entropy"):
        counted, flat = _checked(where, logits, target, comm, ignore_index, reduction)
    options: Options = {"label": where, "reproducible": reproducible}
    rows = logits.reshape(-1, logits.shape[-1])
    losses: Tensor = _CrossEntropy.apply(rows, flat, comm, options)
    losses = losses * counted
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def _checked(
    where: str,
    logits: Tensor,
    target: Tensor,
    comm: Communicator,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """Which targets count, and all targets flattened, 0 where they do not count."""
    if logits.dim() < 1 or logits.shape[:-1] != target.shape:
        raise BadArgument(
            f"{where}: logits are {list(logits.shape)}, targets {list(target.shape)}; "
            "expected one target for each row of logits"
        )
    if reduction not in ("mean", "sum", "none"):
        raise BadArgument(
            f"{where}: reduction = {reduction!r}: expected mean, sum or none"
        )
    counted = (target != ignore_index).reshape(-1)
    flat = torch.where(counted, target.reshape(-1), 0)
    check_words(where, flat, logits.shape[-1] * comm.world_size)
    return counted, flat


def check_words(where: str, tokens: Tensor, words: int) -> None:
    """Raise if no rank has a token: its row would be zero without an error."""
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= words):
        raise BadArgument(
            f"{where}: tokens from {int(tokens.min())} to {int(tokens.max())}; the "
            f"vocabulary has {words} words, 0..{words - 1}"
        )


def _mine(tokens: Tensor, first: int, words: int) -> tuple[Tensor, Tensor]:
    """Which tokens this rank has, and their local indices (0 for the others)."""
    local = tokens - first
    mine = (local >= 0) & (local < words)
    return mine, torch.where(mine, local, 0)
