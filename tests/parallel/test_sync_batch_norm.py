"""Batch norm over all ranks against batch norm of the whole batch."""

import pytest
import torch
from torch import nn

from unisono.errors import BadArgument
from unisono.parallel import DDP, SyncBatchNorm

SIZES = {1: [5], 2: [3, 4], 3: [2, 0, 5], 4: [1, 2, 3, 4]}


def batches(n, shape, dtype=torch.float64):
    source = torch.Generator().manual_seed(n)
    whole = torch.randn(sum(SIZES[n]), *shape, generator=source, dtype=dtype)
    return whole * 3 + 100, whole.roll(1, 0)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 4, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_equals_that_of_the_whole_batch(threads, n, shape, affine):
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}[len(shape)]
    whole, up = batches(n, shape)
    right = kind(3, affine=affine, dtype=torch.float64)
    x = whole.clone().requires_grad_()
    for _ in range(2):
        y = right(x)
    y.backward(up)
    begins = [sum(SIZES[n][:r]) for r in range(n)]

    def run(comm):
        mine = slice(begins[comm.rank], begins[comm.rank] + SIZES[n][comm.rank])
        norm = SyncBatchNorm(3, comm, affine=affine).double()
        part = whole[mine].clone().requires_grad_()
        for _ in range(2):
            out = norm(part)
        out.backward(up[mine])
        torch.testing.assert_close(out, y[mine])
        torch.testing.assert_close(part.grad, x.grad[mine])
        torch.testing.assert_close(norm.running_mean, right.running_mean)
        torch.testing.assert_close(norm.running_var, right.running_var)
        norm.eval()
        right_now = torch.nn.functional.batch_norm(
            part, right.running_mean, right.running_var, norm.weight, norm.bias
        )
        torch.testing.assert_close(norm(part), right_now)
        if affine:
            return norm.weight.grad, norm.bias.grad
        return None

    found = threads(n, run)
    if affine:
        weight, bias = (sum(parts) for parts in zip(*found, strict=True))
        torch.testing.assert_close(weight, right.weight.grad)
        torch.testing.assert_close(bias, right.bias.grad)


def test_batch_norm_sends_the_bytes_of_the_formula(threads):
    def run(comm):
        norm = SyncBatchNorm(6, comm)
        x = torch.ones(2, 6, requires_grad=True)
        before = comm.sent_bytes
        y = norm(x)
        forward = comm.sent_bytes - before
        y.sum().backward()
        return forward, comm.sent_bytes - before - forward

    # As small as this, everything goes to everybody.
    assert threads(3, run) == [(4 * 2 * (7 + 6), 4 * 2 * 12)] * 3


def test_convert_keeps_weights_and_trains_with_ddp(threads):
    def run(comm):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU())
        weight = net[1].weight
        net = SyncBatchNorm.convert(net, comm)
        assert isinstance(net[1], SyncBatchNorm)
        assert net[1].weight is weight
        model = DDP(net, comm)
        model(torch.full((2, 4), float(comm.rank))).sum().backward()
        return net[1].running_mean.clone()

    one, two = threads(2, run)
    assert torch.equal(one, two)


def test_half_precision_is_summed_in_float32(threads):
    def run(comm):
        norm = SyncBatchNorm(2, comm)
        x = (torch.randn(64, 2) * 0.1 + 300).bfloat16()
        y = norm(x)
        assert norm.running_mean.dtype == torch.float32
        return float(y.detach().float().mean())

    assert threads(2, run)[0] == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("shape", [(3,), (2, 4)])
def test_inputs_with_other_channels_are_refused(threads, shape):
    with pytest.raises(BadArgument, match=r"expected \(N, 3, ...\)"):
        threads(1, lambda comm: SyncBatchNorm(3, comm)(torch.ones(shape)))
