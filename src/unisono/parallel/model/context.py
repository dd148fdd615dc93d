"""Context parallelism: attention over a sequence of which each rank has a shard.

Everything in a transformer but attention works on each token by itself, so each rank
can keep 1/n of the tokens. In attention every query meets every key; two ways to that:

    ring_attention         keys and values travel the ring, from rank to rank; each
                           rank's queries meet them as they come, and the softmax is
                           combined on the way. Any number of heads.
    all_to_all_attention   tokens for heads: each rank gets the whole sequence of h/n
                           heads, attends, and sends it back (Ulysses).

Causal attention skips keys that come after the queries. Had rank r the r-th run of
tokens, the last rank would work n times as much as the first. So the sequence is cut
into 2n blocks, and a rank has one from the front and one from the back ("balanced"):

    n = 3:   0 1 2 3 4 5       rank 0: 0 5    rank 1: 1 4    rank 2: 2 3

`shard_sequence` cuts so, and `positions` tells which tokens a rank has.

    sent per rank (KV: bytes of this rank's keys and values; X: of its queries)
    ring         forward (n-1) KV,         backward (2n-1) KV: they travel again, and
                                           their gradients with them and home
    all_to_all   (n-1)/n of 2X + KV in each direction

Liu, Zaharia, Abbeel, "Ring attention with blockwise transformers" (2023); Brandon et
al., "Striped attention" (2023); Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from unisono.errors import BadArgument
from unisono.parallel.common import functions
from unisono.parallel.common.agreement import agree, heard, prepared
from unisono.parallel.model.sharded_layer import shared_out
from unisono.runtime.communicator import Communicator

# --- who has which tokens


def blocks(rank: int, n: int, balanced: bool = True) -> tuple[int, ...]:
    """The blocks of the sequence that a rank has, in its order."""
    return (rank, 2 * n - 1 - rank) if balanced else (rank,)


def positions(length: int, comm: Communicator, *, balanced: bool = True) -> Tensor:
    """Which tokens of a sequence of this length this rank has, in its order."""
    n = comm.world_size
    count = (2 if balanced else 1) * n
    size = shared_out("context: the sequence's length", length, count)
    mine = blocks(comm.rank, n, balanced)
    return torch.cat([torch.arange(size) + size * block for block in mine])


def shard_sequence(
    x: Tensor, comm: Communicator, *, dim: int = 1, balanced: bool = True
) -> Tensor:
    """This rank's tokens of a whole sequence that all have; nothing is sent."""
    return x.index_select(dim, positions(x.shape[dim], comm, balanced=balanced))


def whole_sequence(
    x: Tensor, comm: Communicator, *, dim: int = 1, balanced: bool = True
) -> Tensor:
    """All ranks' tokens in the order of the sequence, for the same use on all."""
    whole = functions.gather_from(x, comm, dim, label="whole_sequence")
    return whole.index_select(dim, _order(whole.shape[dim], comm.world_size, balanced))


def _order(length: int, n: int, balanced: bool) -> Tensor:
    """Where each token of the sequence lies, if all ranks' shards are joined."""
    held = [block for rank in range(n) for block in blocks(rank, n, balanced)]
    size = length // len(held)
    starts = torch.tensor(held).argsort() * size
    return (starts.unsqueeze(1) + torch.arange(size)).reshape(-1)


# --- the ring


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    comm: Communicator,
    *,
    causal: bool = False,
    balanced: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks: (..., t, d).

    `balanced` tells how the sequence was cut; it matters to causal attention only.
    """
    with heard(comm, "an error: attention's input"):
        _fit("ring_attention", q, k, v, 2 if balanced and causal else 1)
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    made: Tensor = _Ring.apply(q, k, v, comm, causal, balanced, scale)
    return made


class _Ring(Function):
    """Forward keeps the result and one number per query: the log of its sum."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        comm: Communicator,
        causal: bool,
        balanced: bool,
        scale: float,
    ) -> Tensor:
        ring = _Travel(comm, causal, balanced, "forward", q)
        q, k, v = (x.detach() for x in (q, k, v))
        queries, out = _wide(q), torch.zeros_like(_wide(q))
        log_sum = out.new_full(q.shape[:-1], -torch.inf)
        for pair, src in ring.visits(torch.stack([k, v])):
            keys, values = _wide(pair)
            for here, there, diagonal in ring.pairs(src, q.shape[-2]):
                query, key = queries[..., here, :], keys[..., there, :]
                scores = _scores(query, key, scale, diagonal)
                part = torch.logsumexp(scores, -1)
                old = log_sum[..., here]
                new = torch.logaddexp(old, part)
                weights = (scores - new.unsqueeze(-1)).exp()
                out[..., here, :] *= (old - new).exp().unsqueeze(-1)
                out[..., here, :] += weights @ values[..., there, :]
                log_sum[..., here] = new
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.told = comm, causal, balanced, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        comm, causal, balanced, scale = ctx.told
        ring = _Travel(comm, causal, balanced, "backward", q)
        grad, queries = _wide(grads[0]), _wide(q)
        shift = (grad * out).sum(-1, keepdim=True)
        dq = torch.zeros_like(queries)
        bag = queries.new_zeros(2, *k.shape)
        for pair, src in ring.visits(torch.stack([k, v])):
            keys, values = _wide(pair)
            dk, dv = bag
            for here, there, diagonal in ring.pairs(src, q.shape[-2]):
                query, key = queries[..., here, :], keys[..., there, :]
                up = grad[..., here, :]
                scores = _scores(query, key, scale, diagonal)
                weights = (scores - log_sum[..., here].unsqueeze(-1)).exp()
                dv[..., there, :] += weights.mT @ up
                tilt = up @ values[..., there, :].mT - shift[..., here, :]
                tilt = weights * tilt * scale
                dq[..., here, :] += tilt @ key
                dk[..., there, :] += tilt.mT @ query
            bag = ring.hand_on(bag)
        return dq.to(q.dtype), bag[0].to(k.dtype), bag[1].to(v.dtype), *[None] * 4


def _scores(q: Tensor, k: Tensor, scale: float, diagonal: bool) -> Tensor:
    """The products of queries and keys; on a diagonal block, none with later keys."""
    scores = (q @ k.mT) * scale
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _wide(x: Tensor) -> Tensor:
    """What travels may be of 16 bits; what is added up has 32 at least."""
    return x.float() if x.dtype.itemsize < 4 else x


class _Travel:
    """One round of keys and values: what comes from the left goes on to the right."""

    def __init__(
        self, comm: Communicator, causal: bool, balanced: bool, way: str, q: Tensor
    ) -> None:
        self.comm, self.causal, self.balanced = comm, causal, balanced
        cut = "balanced" if balanced else "in runs"
        how = f"causal, {cut}" if causal else "to all keys"
        # Before anything travels: a rank that is ahead, or has another shape, is named.
        agree(comm, "ring_attention", [f"{way}: {q.dtype}{list(q.shape)}, {how}"])
        n = comm.world_size
        self.left, self.right = (comm.rank - 1) % n, (comm.rank + 1) % n

    def visits(self, mine: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Every rank's keys and values, this rank's first, and whose they are.

        The next ones are under way while those at hand are used.
        """
        n, rank = self.comm.world_size, self.comm.rank
        at_hand = mine.contiguous()
        for hop in range(n):
            works, coming = [], at_hand
            if hop < n - 1:
                coming = torch.empty_like(at_hand)
                works = [
                    self.comm.recv(coming, self.left, tag=hop, async_op=True),
                    self.comm.send(at_hand, self.right, tag=hop, async_op=True),
                ]
            yield at_hand, (rank - hop) % n
            for work in works:
                work.wait()
            at_hand = coming

    def hand_on(self, bag: Tensor) -> Tensor:
        """Gradients follow the keys they belong to; after n hops they are at home."""
        if self.comm.world_size == 1:
            return bag
        coming, tag = torch.empty_like(bag), self.comm.world_size
        work = self.comm.recv(coming, self.left, tag=tag, async_op=True)
        sent = self.comm.send(bag, self.right, tag=tag, async_op=True)
        work.wait()
        sent.wait()
        return coming

    def pairs(self, src: int, length: int) -> Iterator[tuple[slice, slice, bool]]:
        """Which of this rank's queries meet which of src's keys; is it the diagonal?"""
        if not self.causal:
            yield slice(0, length), slice(0, length), False
            return
        n = self.comm.world_size
        mine = blocks(self.comm.rank, n, self.balanced)
        size = length // len(mine)
        for i, query in enumerate(mine):
            for j, key in enumerate(blocks(src, n, self.balanced)):
                if key <= query:
                    here = slice(i * size, (i + 1) * size)
                    yield here, slice(j * size, (j + 1) * size), key == query


# --- heads for tokens


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    comm: Communicator,
    *,
    causal: bool = False,
    balanced: bool = True,
    scale: float | None = None,
) -> Tensor:
    """The same as `ring_attention` for (b, h, t, d), where n divides the heads."""
    where, n = "all_to_all_attention", comm.world_size
    with prepared(comm, where) as told:
        _fit(where, q, k, v, 2 if balanced and causal else 1)
        if q.dim() != 4:
            raise BadArgument(
                f"{where}: queries are {list(q.shape)}; expected (batch, heads, "
                "tokens, features)"
            )
        for x in (q, k, v):
            shared_out(f"{where}: heads", x.shape[1], n)
        told.append(f"forward: {q.dtype}{list(q.shape)}, keys {list(k.shape)}")
    order = _order(n * q.shape[2], n, balanced) if causal else None
    whole = []
    for name, x in (("queries", q), ("keys", k), ("values", v)):
        x = functions.all_to_all(x, comm, 1, 2, label=f"{where}: {name}")
        whole.append(x if order is None else x.index_select(2, order))
    y = functional.scaled_dot_product_attention(
        whole[0], whole[1], whole[2], is_causal=causal, scale=scale
    )
    if order is not None:
        y = y.index_select(2, order.argsort())
    return functions.all_to_all(y, comm, 2, 1, label=f"{where}: result")


def _fit(where: str, q: Tensor, k: Tensor, v: Tensor, parts: int) -> None:
    """Raise if these are not queries, keys and values of one shard."""
    if q.shape != k.shape or k.shape != v.shape or q.dim() < 2:
        raise BadArgument(
            f"{where}: queries {list(q.shape)}, keys {list(k.shape)} and values "
            f"{list(v.shape)}; expected all three of one shape (..., tokens, features)"
        )
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise BadArgument(
            f"{where}: queries {q.dtype}, keys {k.dtype}, values {v.dtype}; expected "
            "one type"
        )
    shared_out(f"{where}: this rank's tokens, in balanced halves", q.shape[-2], parts)
