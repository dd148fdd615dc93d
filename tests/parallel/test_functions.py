"""Collectives with gradients against their adjoints."""

import pytest
import torch

from unisono.errors import CollectiveMismatch
from unisono.parallel.common import functions as f

N = 3


def parts(seed, shape=(6, 3, 3)):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source, dtype=torch.float64) for _ in range(N)]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("sum_over", ()),
        ("all_gather", (0,)),
        ("all_gather", (1,)),
        ("all_gather", (-1,)),
        ("reduce_scatter", (0,)),
        ("reduce_scatter", (2,)),
        ("all_to_all", (0, 1)),
        ("all_to_all", (1, 2)),
    ],
)
def test_each_function_is_the_adjoint_of_its_backward(threads, name, args):
    """<f(x), y> over all ranks is <x, f'(y)>, for random x and y."""
    xs = parts(1)

    def run(comm):
        x = xs[comm.rank].clone().requires_grad_()
        out = getattr(f, name)(x, comm, *args)
        source = torch.Generator().manual_seed(7 + comm.rank)
        y = torch.randn(out.shape, generator=source, dtype=torch.float64)
        out.backward(y)
        return float((out.detach() * y).sum()), float((x.detach() * x.grad).sum())

    forward, backward = zip(*threads(N, run), strict=True)
    assert sum(forward) == pytest.approx(sum(backward))


def test_functions_return_the_values_of_the_collectives(threads):
    xs = parts(2)

    def run(comm):
        x = xs[comm.rank]
        assert torch.equal(f.all_gather(x, comm, 1), torch.cat(xs, 1))
        total = xs[0] + xs[1] + xs[2]
        torch.testing.assert_close(f.all_reduce(x, comm), total)
        mine = total.chunk(N, 1)[comm.rank]
        torch.testing.assert_close(f.reduce_scatter(x, comm, 1), mine)
        swapped = torch.cat([y.chunk(N, 0)[comm.rank] for y in xs], 1)
        assert torch.equal(f.all_to_all(x, comm, 0, 1), swapped)
        back = f.all_to_all(f.all_to_all(x, comm, 0, 1), comm, 1, 0)
        assert torch.equal(back, x)
        assert torch.equal(f.copy_to(x, comm), x)

    threads(N, run)


def test_copy_to_and_all_reduce_are_a_tensor_parallel_pair(threads):
    """A sum of what ranks make of one value: copy_to before it, all_reduce after."""
    xs = parts(3)

    def run(comm):
        x = xs[0].clone().requires_grad_()
        weight = xs[comm.rank]
        f.all_reduce(f.copy_to(x, comm) * weight, comm).sum().backward()
        return x.grad

    for grad in threads(N, run):
        torch.testing.assert_close(grad, xs[0] + xs[1] + xs[2])


def test_exchange_sends_rows_to_given_ranks_and_gradients_back(threads):
    """Uneven shares, also none: the adjoint of sending is sending back."""
    counts = [[1, 0, 2], [0, 0, 0], [3, 1, 1]]

    def run(comm):
        sent = counts[comm.rank]
        received = [row[comm.rank] for row in counts]
        source = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(sum(sent), 2, generator=source, dtype=torch.float64)
        x.requires_grad_()
        out = f.exchange(x, comm, sent, received, label="rows")
        y = torch.randn(out.shape, generator=source, dtype=torch.float64)
        out.backward(y)
        back = f.exchange(out.detach(), comm, received, sent)
        assert torch.equal(back, x.detach())
        return float((out.detach() * y).sum()), float((x.detach() * x.grad).sum())

    forward, backward = zip(*threads(N, run), strict=True)
    assert sum(forward) == pytest.approx(sum(backward))


def test_scatter_to_and_gather_from_are_inverse(threads):
    xs = parts(4)

    def run(comm):
        x = xs[0].clone().requires_grad_()
        mine = f.scatter_to(x, comm, 1)
        assert torch.equal(mine, xs[0].chunk(N, 1)[comm.rank])
        whole = f.gather_from(mine * 2, comm, 1)
        assert torch.equal(whole, 2 * xs[0])
        whole.sin().sum().backward()
        return x.grad

    for grad in threads(N, run):
        torch.testing.assert_close(grad, 2 * (2 * xs[0]).cos())


def test_labels_differ_between_forward_and_backward(threads):
    def run(comm):
        x = torch.ones(3, requires_grad=True)
        y = f.sum_over(x, comm, label="here")
        if comm.rank == 1:
            f.sum_over(x, comm, label="here")
        y.sum().backward()

    with pytest.raises(CollectiveMismatch, match="here, backward"):
        threads(2, run)
