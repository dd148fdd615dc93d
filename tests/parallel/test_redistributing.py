"""The gradient of a redistribution goes the way back."""

import pytest
import torch

from unisono.parallel import redistribute

N = 3


def whole():
    source = torch.Generator().manual_seed(3)
    return torch.randn((5, 7), generator=source, dtype=torch.float64)


def part(x, cut, rank):
    return x if cut is None else x.tensor_split(N, cut)[rank]


@pytest.mark.parametrize("given", [False, True], ids=["told", "shape"])
@pytest.mark.parametrize("new", [0, 1, None])
@pytest.mark.parametrize("old", [0, 1, None])
def test_gradients_are_those_of_one_process(threads, old, new, given):
    weight = whole().cos()

    def run(comm):
        x = part(whole(), old, comm.rank).clone().requires_grad_()
        shape = (5, 7) if given else None
        y = redistribute(x, comm, old, new, shape=shape)
        (y.sin() * part(weight, new, comm.rank)).sum().backward()
        wanted = part(whole().cos() * weight, old, comm.rank)
        torch.testing.assert_close(x.grad, wanted)

    threads(N, run)


@pytest.mark.parametrize("new", [0, 1, None])
def test_each_summand_gets_the_gradient_of_the_sum(threads, new):
    weight = whole().cos()

    def run(comm):
        x = whole().requires_grad_()
        y = redistribute(x, comm, "partial", new, label="scores")
        (y * part(weight, new, comm.rank)).sum().backward()
        torch.testing.assert_close(x.grad, weight)

    threads(N, run)


def test_gradients_of_parts_of_other_sizes_have_their_sizes(threads):
    sizes = [4, 0, 1]

    def run(comm):
        x = whole().split(sizes)[comm.rank].clone().requires_grad_()
        redistribute(x, comm, 0, 1).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))

    threads(N, run)
