"""Attention over a sharded sequence against dense attention, forward and backward."""

import pytest
import torch
from nets import NS, STEPS, same, weights
from sharded_nets import HEADS, LENGTH, Net, net, one_process, sgd, tokens
from torch.nn import functional

from unisono.errors import BadArgument, CollectiveMismatch
from unisono.parallel import (
    DDP,
    Mesh,
    all_to_all_attention,
    positions,
    ring_attention,
    shard_sequence,
    whole_sequence,
)
from unisono.parallel.model.context import _KeyValueRing
from unisono.parallel.model.context_shards import blocks

BOTH = {"ring": ring_attention, "all_to_all": all_to_all_attention}
SHAPE = 2, 12, 24, 4
EXCHANGED = 8
"""Bytes by which a rank tells another what it is about to do."""


def qkv(seed=3, dtype=torch.float64, shape=SHAPE):
    source = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=source, dtype=torch.float64) for _ in "qkvg"]
    return [4 * x.to(dtype) for x in drawn]


def dense(dtype=torch.float64, causal=False, scale=None):
    *three, up = qkv(dtype=dtype)
    inputs = [x.double().requires_grad_() for x in three]
    y = functional.scaled_dot_product_attention(*inputs, is_causal=causal, scale=scale)
    y.backward(up.double())
    return y.detach(), [x.grad for x in inputs]


def attend(comm, how, dtype=torch.float64, **options):
    balanced = options.get("balanced", True)
    q, k, v, up = (
        shard_sequence(x, comm, dim=2, balanced=balanced) for x in qkv(dtype=dtype)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    y = how(*inputs, comm, **options)
    y.backward(up)
    return [
        whole_sequence(x.detach(), comm, dim=2, balanced=balanced)
        for x in (y, *(x.grad for x in inputs))
    ]


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("balanced", [False, True])
def test_attention_equals_dense_attention(threads, n, how, causal, balanced):
    y, grads = dense(causal=causal)
    options = {"causal": causal, "balanced": balanced}
    for found in threads(n, lambda comm: attend(comm, BOTH[how], **options)):
        for mine, right in zip(found, [y, *grads], strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-4), (torch.bfloat16, 0.3)]
)
def test_attention_with_16_bit_types_and_given_scale(threads, how, dtype, limit):
    y, grads = dense(dtype, causal=True, scale=0.2)

    def run(comm):
        return attend(comm, BOTH[how], dtype, causal=True, scale=0.2)

    for found in threads(3, run):
        for mine, right in zip(found, [y, *grads], strict=True):
            assert mine.dtype == dtype
            torch.testing.assert_close(mine.double(), right, rtol=limit, atol=limit)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("causal", [False, True])
def test_fewer_heads_of_keys_and_values_equal_dense_attention(threads, n, how, causal):
    """Grouped queries: 12 heads of queries and 6 of keys, of which only 6 are sent."""

    def inputs():
        q, k, v, up = qkv()
        return [x.requires_grad_() for x in (q, k[:, :6].clone(), v[:, :6].clone())], up

    (q, k, v), up = inputs()
    y = functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )
    y.backward(up)
    right = [y.detach(), q.grad, k.grad, v.grad]

    def run(comm):
        whole, up = inputs()
        mine = [shard_sequence(x.detach(), comm, dim=2) for x in (*whole, up)]
        three = [x.requires_grad_() for x in mine[:3]]
        before = comm.sent_bytes
        y = BOTH[how](*three, comm, causal=causal)
        sent = comm.sent_bytes - before
        y.backward(mine[3])
        parts = [y.detach(), *(x.grad for x in three)]
        return [whole_sequence(x, comm, dim=2) for x in parts], sent

    x = 2 * 12 * (24 // n) * 4 * 8
    exchanged = (n - 1) * EXCHANGED
    for found, sent in threads(n, run):
        for mine, wanted in zip(found, right, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-10)
        bytes_sent = (n - 1) * x if how == "ring" else 3 * x * (n - 1) // n
        assert sent == bytes_sent + exchanged


def test_ring_attention_does_not_overflow(threads):
    """Scores of a thousand: the softmax is combined about its largest."""

    def run(comm):
        q, k, v, _ = (100 * shard_sequence(x, comm, dim=2) for x in qkv())
        return whole_sequence(ring_attention(q, k, v, comm, causal=True), comm, dim=2)

    q, k, v, _ = (100 * x for x in qkv())
    right = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for found in threads(3, run):
        torch.testing.assert_close(found, right)


def test_balanced_blocks_give_ranks_the_same_work():
    """Causal: every rank has as many pairs of blocks to work on, in every hop."""

    class At:
        def __init__(self, rank, n):
            self.rank, self.world_size = rank, n

    for n in NS:
        for rank in range(n):
            travel = object.__new__(_KeyValueRing)
            travel.comm, travel.causal, travel.balanced = At(rank, n), True, True
            work = [len(list(travel.block_pairs(src, 4))) for src in range(n)]
            assert work == [3 if src == rank else 2 for src in range(n)]
    assert [blocks(r, 3) for r in range(3)] == [(0, 5), (1, 4), (2, 3)]


@pytest.mark.parametrize("balanced", [False, True])
def test_positions_shard_and_whole_sequence_are_consistent(threads, balanced):
    def run(comm):
        at = positions(12, comm, balanced=balanced)
        x = torch.arange(24.0).view(2, 12).requires_grad_()
        mine = shard_sequence(x, comm, balanced=balanced)
        assert torch.equal(mine.detach(), x.detach()[:, at])
        whole = whole_sequence(mine, comm, balanced=balanced)
        assert torch.equal(whole.detach(), x.detach())
        (whole * 2).sum().backward()
        wanted = torch.zeros(2, 12)
        wanted[:, at] = 2
        assert torch.equal(x.grad, wanted)
        return at.tolist()

    found = threads(3, run)
    assert sorted(at for mine in found for at in mine) == list(range(12))


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("how", BOTH)
def test_attention_sends_the_bytes_of_the_formula(threads, n, how):
    def sent(comm):
        q, k, v, up = (shard_sequence(x, comm, dim=2) for x in qkv())
        inputs = [x.requires_grad_() for x in (q, k, v)]
        before = comm.sent_bytes
        y = BOTH[how](*inputs, comm, causal=True)
        forward = comm.sent_bytes - before
        y.backward(up)
        return forward, comm.sent_bytes - before - forward

    x = 2 * 12 * (24 // n) * 4 * 8
    exchanged = (n - 1) * EXCHANGED
    if how == "ring":
        home = n if n > 1 else 0
        right = (n - 1) * 2 * x + exchanged, (n - 1 + home) * 2 * x + exchanged
    else:
        right = 4 * x * (n - 1) // n + exchanged, 4 * x * (n - 1) // n
    assert threads(n, sent) == [right] * n


@pytest.mark.sweep
@pytest.mark.quick(dp=[2])
@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize(("dp", "n"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2)])
def test_context_parallel_training_on_a_mesh_equals_one_process(threads, how, dp, n):
    """cp1 to cp4 and dp2×cp2, 20 steps: what one process makes of all batches."""
    losses, right = one_process(replicas=dp)

    def run(comm):
        with Mesh(comm, dp=dp, cp=n) as mesh:
            cp = mesh["cp"]
            plain = net(Net, seed=comm.rank)
            for layer in plain.layers:
                layer.attend = lambda q, k, v: BOTH[how](q, k, v, cp, causal=True)
            model = DDP(plain, mesh.over("dp", "cp"))
            opt = sgd(model.parameters())
            at = positions(LENGTH, cp)
            mine = []
            for step in range(STEPS):
                opt.zero_grad()
                x, y = tokens(step, mesh.coordinates["dp"])
                out = model(x[:, at], at).flatten(0, 1)
                loss = functional.cross_entropy(out, y[:, at].flatten())
                loss.backward()
                opt.step()
                mine.append(loss.item())
            return mine, weights(plain)

    found = threads(n * dp, run)
    for _, state in found:
        same(state, right, 1e-11)
    means = [sum(step) / (n * dp) for step in zip(*(f[0] for f in found), strict=True)]
    assert means == pytest.approx(losses, rel=1e-11)


def in_a_process(rank):
    with rank.init() as comm:
        return [x.tolist() for x in attend(comm, ring_attention, causal=True)]


@pytest.mark.sweep
def test_attention_on_processes_equals_dense_attention(processes):
    y, grads = dense(causal=True)
    for found in processes(3, in_a_process):
        for mine, right in zip(found, [y, *grads], strict=True):
            mine = torch.tensor(mine, dtype=torch.float64)
            torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


# --- what cannot be


@pytest.mark.parametrize("how", BOTH)
def test_shapes_that_do_not_match_are_refused(threads, how):
    attention = BOTH[how]
    x = torch.zeros(1, HEADS, 4, 2)
    for args, exchanged in [
        ((x, x, x[..., :1]), "all three of one shape"),
        ((x, x[:, :5], x[:, :5]), "a divisor of the queries' heads"),
        ((x, x.double(), x), "expected one type"),
        ((x[..., :3, :],) * 3, "in balanced halves: 3 cannot be divided"),
    ]:
        with pytest.raises(BadArgument, match=exchanged):
            threads(2, lambda comm, a=args: attention(*a, comm, causal=True))


def test_heads_that_ranks_do_not_divide_are_refused(threads):
    x = torch.zeros(1, 3, 4, 2)
    with pytest.raises(BadArgument, match="heads: 3 cannot be divided evenly by 2"):
        threads(2, lambda comm: all_to_all_attention(x, x, x, comm))
    with pytest.raises(BadArgument, match=r"expected \(batch, heads, tokens, features"):
        threads(2, lambda comm: all_to_all_attention(x[0], x[0], x[0], comm))


def test_length_that_blocks_do_not_divide_is_refused(threads):
    with pytest.raises(BadArgument, match="length: 6 cannot be divided evenly by 4"):
        threads(2, lambda comm: shard_sequence(torch.zeros(1, 6), comm))


@pytest.mark.parametrize("how", BOTH)
def test_different_shapes_on_ranks_are_named(threads, how):
    def run(comm):
        x = torch.zeros(1, 2, 4 + 2 * comm.rank, 2)
        BOTH[how](x, x, x, comm)

    with pytest.raises(CollectiveMismatch, match=r"the ranks differ: .*\[1, 2, 4, 2\]"):
        threads(2, run)


def test_one_more_forward_on_a_rank_is_detected(threads):
    def run(comm, attention):
        x = torch.zeros(1, 2, 4, 2, requires_grad=True)
        y = attention(x, x, x, comm)
        if comm.rank == 1:
            y = attention(x, x, x, comm)
        y.sum().backward()

    with pytest.raises(CollectiveMismatch, match=r"rank 0 has backward: .*1 has forw"):
        threads(2, run, ring_attention)
    with pytest.raises(CollectiveMismatch, match="result, backward"):
        threads(2, run, all_to_all_attention)
