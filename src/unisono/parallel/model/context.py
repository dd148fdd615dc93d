"""Context parallelism: attention over a sequence that is sharded over the ranks.

Everything in a transformer but attention treats each token by itself, so each rank can
keep 1/n of the tokens. In attention every query needs every key. Two methods:

    ring_attention         keys and values are sent around the ring; each rank computes
                           with its queries and the keys at hand, and combines the
                           partial softmaxes. Any number of heads.
    all_to_all_attention   each rank gets the whole sequence of h/n heads, computes, and
                           sends the result back (Ulysses).

Causal attention skips keys that come after the queries. If rank r had the r-th run of
tokens, the last rank would compute n times as much as the first. So the sequence is
split into 2n blocks, and a rank has one from the front and one from the back
("balanced"):

    n = 3:   0 1 2 3 4 5       rank 0: 0 5    rank 1: 1 4    rank 2: 2 3

`shard_sequence` shards so, and `positions` tells which tokens a rank has.

    sent per rank (KV: bytes of this rank's keys and values; X: of its queries)
    ring         forward (n-1) KV,         backward (2n-1) KV: keys and values again,
                                           and their gradients, back to their rank
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
from unisono.parallel.common.agreement import check_same, setup_together
from unisono.parallel.common.opaque import opaque
from unisono.parallel.common.shard_math import divide_evenly
from unisono.parallel.model.context_shards import blocks, token_order
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import fail_together

# --- the ring


@opaque
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
    """Attention of this rank's queries to the keys of all ranks: (..., heads, t, d).

    Keys and values may have fewer heads, of which each is for several heads of queries
    (grouped-query attention); only these are sent. `balanced` is how the
    sequence was sharded; it matters to causal attention only.
    """
    with fail_together(comm, "an error: attention's input"):
        _check_shapes("ring_attention", q, k, v, 2 if balanced and causal else 1)
    scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
    out: Tensor = _RingAttention.apply(q, k, v, comm, causal, balanced, scale)
    return out


class _RingAttention(Function):
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
        ring = _KeyValueRing(comm, causal, balanced, "forward", (q, k))
        q, k, v = (x.detach() for x in (q, k, v))
        queries, out = _wide(q), torch.zeros_like(_wide(q))
        log_sum = out.new_full(q.shape[:-1], -torch.inf)
        for pair, src in ring.rounds(torch.stack([k, v])):
            keys, values = (_for_each_query_head(x, q) for x in _wide(pair))
            for here, there, diagonal in ring.block_pairs(src, q.shape[-2]):
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
        ctx.arguments = comm, causal, balanced, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        comm, causal, balanced, scale = ctx.arguments
        ring = _KeyValueRing(comm, causal, balanced, "backward", (q, k))
        grad, queries = _wide(grads[0]), _wide(q)
        shift = (grad * out).sum(-1, keepdim=True)
        dq = torch.zeros_like(queries)
        kv_grads = queries.new_zeros(2, *k.shape)
        for pair, src in ring.rounds(torch.stack([k, v])):
            keys, values = (_for_each_query_head(x, q) for x in _wide(pair))
            dk, dv = kv_grads
            for here, there, diagonal in ring.block_pairs(src, q.shape[-2]):
                query, key = queries[..., here, :], keys[..., there, :]
                up = grad[..., here, :]
                scores = _scores(query, key, scale, diagonal)
                weights = (scores - log_sum[..., here].unsqueeze(-1)).exp()
                dv[..., there, :] += _for_each_key_head(weights.mT @ up, dv)
                tilt = up @ values[..., there, :].mT - shift[..., here, :]
                tilt = weights * tilt * scale
                dq[..., here, :] += tilt @ key
                dk[..., there, :] += _for_each_key_head(tilt.mT @ query, dk)
            kv_grads = ring.send_on(kv_grads)
        dk, dv = kv_grads
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 4


def _scores(q: Tensor, k: Tensor, scale: float, diagonal: bool) -> Tensor:
    """The products of queries and keys; on a diagonal block, none with later keys."""
    scores = (q @ k.mT) * scale
    if diagonal:
        later = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _wide(x: Tensor) -> Tensor:
    """At least 32 bits for sums; tensors are sent in their own type."""
    return x.float() if x.dtype.itemsize < 4 else x


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, each head as often as there are heads of queries for it."""
    if x.shape[:-2] == q.shape[:-2]:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _for_each_key_head(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient by heads of queries, summed to the heads of the keys or values."""
    if grad.shape[:-2] == x.shape[:-2]:
        return grad
    summed: Tensor = grad.unflatten(-3, (x.shape[-3], -1)).sum(-3)
    return summed


class _KeyValueRing:
    """Keys and values of all ranks in turn: from the left, on to the right."""

    def __init__(
        self,
        comm: Communicator,
        causal: bool,
        balanced: bool,
        direction: str,
        queries_and_keys: tuple[Tensor, Tensor],
    ) -> None:
        self.comm, self.causal, self.balanced = comm, causal, balanced
        sharding = "balanced" if balanced else "contiguous"
        masking = f"causal, {sharding}" if causal else "not causal"
        # Before anything is sent: a rank that is ahead, or has another shape, is named.
        q, k = queries_and_keys
        shapes = f"{list(q.shape)}, keys {list(k.shape)}"
        settings = f"{direction}: {q.dtype}{shapes}, {masking}"
        check_same(comm, "ring_attention", [settings])
        n = comm.world_size
        self.left, self.right = (comm.rank - 1) % n, (comm.rank + 1) % n

    def rounds(self, mine: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Every rank's keys and values, this rank's first, and the rank they are from.

        The next ones are transferred while the current ones are used.
        """
        n, rank = self.comm.world_size, self.comm.rank
        current = mine.contiguous()
        for hop in range(n):
            works, following = [], current
            if hop < n - 1:
                following = torch.empty_like(current)
                works = [
                    self.comm.recv(following, self.left, tag=hop, async_op=True),
                    self.comm.send(current, self.right, tag=hop, async_op=True),
                ]
            yield current, (rank - hop) % n
            for work in works:
                work.wait()
            current = following

    def send_on(self, grads: Tensor) -> Tensor:
        """Gradients follow their keys; after n hops they are back at their rank."""
        if self.comm.world_size == 1:
            return grads
        following, tag = torch.empty_like(grads), self.comm.world_size
        work = self.comm.recv(following, self.left, tag=tag, async_op=True)
        sent = self.comm.send(grads, self.right, tag=tag, async_op=True)
        work.wait()
        sent.wait()
        return following

    def block_pairs(self, src: int, length: int) -> Iterator[tuple[slice, slice, bool]]:
        """Which queries attend to which keys of src, and whether on the diagonal."""
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


# --- all-to-all


@opaque
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
    """The same as `ring_attention` for (b, h, t, d), where n divides the heads.

    If keys and values have fewer heads than queries, n divides these as well.
    """
    where, n = "all_to_all_attention", comm.world_size
    with setup_together(comm, where) as settings:
        _check_shapes(where, q, k, v, 2 if balanced and causal else 1)
        if q.dim() != 4:
            raise BadArgument(
                f"{where}: queries are {list(q.shape)}; expected (batch, heads, "
                "tokens, features)"
            )
        for x in (q, k, v):
            divide_evenly(f"{where}: heads", x.shape[1], n)
        settings.append(f"forward: {q.dtype}{list(q.shape)}, keys {list(k.shape)}")
    order = token_order(n * q.shape[2], n, balanced, q.device) if causal else None
    full = []
    for name, x in (("queries", q), ("keys", k), ("values", v)):
        x = functions.all_to_all(x, comm, 1, 2, label=f"{where}: {name}")
        full.append(x if order is None else x.index_select(2, order))
    grouped = q.shape[1] != k.shape[1]
    y = functional.scaled_dot_product_attention(
        full[0], full[1], full[2], is_causal=causal, scale=scale, enable_gqa=grouped
    )
    if order is not None:
        y = y.index_select(2, order.argsort())
    return functions.all_to_all(y, comm, 2, 1, label=f"{where}: result")


def _check_shapes(where: str, q: Tensor, k: Tensor, v: Tensor, parts: int) -> None:
    """Raise if these are not queries, keys and values of shapes and types that fit."""
    fits = q.dim() >= 2 and k.shape == v.shape
    if fits and q.shape != k.shape:  # fewer heads of keys and values
        fits = q.dim() >= 3 and q.dim() == k.dim()
        fits = fits and q.shape[:-3] == k.shape[:-3] and q.shape[-2:] == k.shape[-2:]
        fits = fits and k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0
    if not fits:
        raise BadArgument(
            f"{where}: queries {list(q.shape)}, keys {list(k.shape)} and values "
            f"{list(v.shape)}; expected all three of one shape (..., heads, tokens, "
            "features), or keys and values with a divisor of the queries' heads"
        )
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise BadArgument(
            f"{where}: queries {q.dtype}, keys {k.dtype}, values {v.dtype}; expected "
            "one type"
        )
    divide_evenly(
        f"{where}: this rank's tokens, in balanced halves", q.shape[-2], parts
    )
