"""DDP and PlainDDP: results against one process, and the bytes they send."""

import numpy as np
import pytest
import torch
from nets import NS, Gpt, Mlp, alone, batch, loss_of, made, same, sgd, train, weights
from torch import nn

import unisono
from unisono.errors import BadArgument, CollectiveMismatch, PeerLost, UsageError
from unisono.parallel import DDP, PlainDDP

pytestmark = pytest.mark.one_in(3)

TINY = 0.0005  # MB: several buckets even for small modules


def run(comm, kind, options):
    model = DDP(made(kind, seed=comm.rank), comm, **options)
    losses = train(comm, model, sgd(model.parameters()), kind)
    return losses, weights(model.module)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("kind", [Mlp, Gpt])
@pytest.mark.parametrize("cap", [25, TINY])
def test_ddp_has_the_bits_of_one_process(threads, n, kind, cap):
    options = {"bucket_cap_mb": cap, "reproducible": True}
    losses, right = alone(kind, n)
    for rank, (mine, found) in enumerate(threads(n, run, kind, options)):
        assert mine == [step[rank] for step in losses]
        same(found, right)


@pytest.mark.parametrize("overlap", [True, False])
def test_ddp_not_reproducible_equals_one_process_within_rounding(threads, overlap):
    _, right = alone(Gpt, 3)
    for _, found in threads(3, run, Gpt, {"overlap": overlap, "bucket_cap_mb": TINY}):
        same(found, right, 1e-5)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_plain_ddp_has_the_bits_of_one_process(threads, n):
    def plain(comm):
        model = PlainDDP(made(Mlp, seed=comm.rank), comm, reproducible=True)
        train(comm, model, sgd(model.parameters()), Mlp, after=model.sync)
        return weights(model.module)

    _, right = alone(Mlp, n)
    for found in threads(n, plain):
        same(found, right)


def on_processes(rank):
    torch.set_num_threads(1)
    with rank.init(timeout_s=30) as comm:
        _, found = run(comm, Gpt, {"bucket_cap_mb": TINY, "reproducible": True})
    same(found, alone(Gpt, rank.n)[1])


def test_ddp_on_processes_has_the_bits_of_one_process(processes):
    processes(2, on_processes)


# --- bytes


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("cap", [25, TINY])
def test_ddp_sends_the_bytes_of_its_buckets(threads, n, cap):
    """2(n-1)/n of P, to the element: what a rank adds up, and what it hands out."""

    def sent(comm):
        model = DDP(made(Gpt), comm, bucket_cap_mb=cap)
        opt = sgd(model.parameters())
        train(comm, model, opt, Gpt, steps=2)  # buckets are in order from now on
        before = comm.sent_bytes
        train(comm, model, opt, Gpt, steps=1)
        sizes = [b.count for b in model._buckets.buckets]
        return comm.sent_bytes - before, sizes

    for rank, (bytes_sent, sizes) in enumerate(threads(n, sent)):
        assert sum(sizes) == sum(p.numel() for p in made(Gpt).parameters())
        right = 0
        for size in sizes:
            mine = size // n + (rank < size % n)
            direct = size * 4 > 8192  # smaller ones are added up by every rank itself
            right += (size - mine) + (n - 1) * mine if direct else (n - 1) * size
        assert bytes_sent == (4 * right if n > 2 else 4 * (n - 1) * sum(sizes))


def test_ddp_sends_the_bytes_of_the_formula(threads):
    def sent(comm):
        model = DDP(nn.Linear(64, 64, bias=False), comm, bucket_cap_mb=25)
        for _ in range(2):  # the order of the buckets is broadcast once
            model(torch.ones(1, 64)).sum().backward()
        before = comm.sent_bytes
        model(torch.ones(1, 64)).sum().backward()
        return comm.sent_bytes - before

    n, p = 4, 64 * 64
    assert threads(n, sent) == [2 * (n - 1) * p // n * 4] * n


# --- buckets


def test_buckets_follow_the_order_of_gradients(threads):
    def order(comm):
        model = DDP(made(Mlp), comm, bucket_cap_mb=TINY)
        names = [[b.names for b in model._buckets.buckets]]
        train(comm, model, sgd(model.parameters()), Mlp, steps=2)
        names.append([b.names for b in model._buckets.buckets])
        for bucket in model._buckets.buckets:
            for param, place in zip(bucket.params, bucket.views, strict=True):
                assert param.grad.data_ptr() == place.data_ptr()
        return names

    first, then = threads(2, order)[0]
    assert first[0][0].startswith("norm")
    flat = [name for names in then for name in names]
    used = ["last", "norm", "middle", "first"]
    assert [name.split(".")[0] for name in flat][::2] == used
    assert len(then) > 1


def test_gradients_are_views_of_buckets_and_not_copied_again(threads):
    def run(comm):
        model = DDP(made(Mlp), comm)
        x, y = batch(Mlp, 0, comm.rank)
        for _ in range(2):
            loss_of(model(x), y).backward()
        at = {n: p.grad.data_ptr() for n, p in model.named_parameters()}
        model.zero_grad(set_to_none=False)
        loss_of(model(x), y).backward()
        assert at == {n: p.grad.data_ptr() for n, p in model.named_parameters()}

    threads(1, run)


def test_buckets_are_reduced_before_backward_ends(threads):
    """The first bucket's collective is begun before the first layer's gradient."""

    def run(comm):
        model = DDP(made(Gpt), comm, bucket_cap_mb=TINY)
        events = []
        launch = model._buckets._launch
        model._buckets._launch = lambda b: (events.append(b.number), launch(b))
        words = model.module.words.weight
        words.register_post_accumulate_grad_hook(lambda p: events.append("end"))
        train(comm, model, sgd(model.parameters()), Gpt, steps=1)
        return events

    for events in threads(2, run):
        assert events.index("end") >= len(events) - 2
        assert len(events) > 3


def test_buckets_have_one_dtype_each(threads):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3).double()
            self.c = nn.Linear(3, 3)

        def forward(self, x):
            return self.c(self.b(self.a(x).double()).float())

    def run(comm):
        model = DDP(made(Mixed), comm)
        model(torch.full((1, 3), float(comm.rank))).sum().backward()
        types = {b.dtype for b in model._buckets.buckets}
        assert types == {torch.float32, torch.float64}
        return [p.grad.clone() for p in model.parameters()]

    found = threads(2, run)
    whole = made(Mixed)
    (whole(torch.tensor([[0.0] * 3, [1.0] * 3])).sum() / 2).backward()
    for mine in found:
        for grad, p in zip(mine, whole.parameters(), strict=True):
            torch.testing.assert_close(grad, p.grad)


# --- accumulation, unused parameters, buffers, uneven inputs


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 3])
def test_no_sync_accumulates_without_sending(threads, n):
    def run(comm):
        model = DDP(made(Mlp), comm, reproducible=True)
        opt = sgd(model.parameters())
        for step in range(5):
            opt.zero_grad()
            with model.no_sync():
                before = comm.sent_bytes
                x, y = batch(Mlp, 2 * step, comm.rank)
                loss_of(model(x), y).backward()
                assert step < 2 or comm.sent_bytes == before
            x, y = batch(Mlp, 2 * step + 1, comm.rank)
            loss_of(model(x), y).backward()
            opt.step()
        return weights(model.module)

    _, right = alone(Mlp, n, steps=5, passes=2)
    for found in threads(n, run):
        same(found, right)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.never = nn.Linear(2, 2)

    def forward(self, x, which):
        return (self.one if which else self.two)(x)


def test_unused_parameters_have_gradients_where_any_rank_used_them(threads):
    def run(comm):
        model = DDP(made(Branches), comm, find_unused_parameters=True)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 2), comm.rank == 0).sum().backward()
        return {n: p.grad for n, p in model.module.named_parameters()}

    for grads in threads(2, run):
        assert grads["never.weight"] is None
        assert grads["never.bias"] is None
        assert torch.equal(grads["one.bias"], torch.full((2,), 0.5))
        assert torch.equal(grads["two.bias"], torch.full((2,), 0.5))


def test_unexpected_unused_parameters_are_named(threads):
    def run(comm):
        model = DDP(made(Branches), comm)
        with pytest.raises(UsageError, match=r"4 parameters got no gradient.*never"):
            model(torch.ones(1, 2), True).sum().backward()

    threads(2, run)


def test_buffers_are_those_of_rank_0(threads):
    def run(comm):
        model = DDP(nn.BatchNorm1d(3), comm)
        source = torch.Generator().manual_seed(comm.rank)
        for _ in range(3):
            model(torch.randn(8, 3, generator=source)).sum().backward()
        model(torch.zeros(8, 3))
        return model.module.running_mean.clone()

    one, two = threads(2, run)
    assert torch.equal(one, two)


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_join_with_uneven_inputs_equals_one_process(threads, by_all, options):
    """Rank r has r steps; whoever is done contributes nothing."""
    n = 4

    def run(comm):
        model = DDP(made(Mlp), comm, bucket_cap_mb=TINY, reproducible=True, **options)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=by_all):
            for step in range(comm.rank):
                opt.zero_grad()
                x, y = batch(Mlp, step, comm.rank)
                loss_of(model(x), y).backward()
                opt.step()
        comm.barrier()
        return weights(model.module)

    model = made(Mlp)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(n - 1):
        opt.zero_grad()
        active = range(step + 1, n)
        for rank in active:
            x, y = batch(Mlp, step, rank)
            (loss_of(model(x), y) / (n if by_all else len(active))).backward()
        opt.step()
    for found in threads(n, run):
        same(found, weights(model), 1e-6)


def test_join_with_even_inputs_changes_nothing(threads):
    def run(comm):
        model = DDP(made(Mlp), comm, reproducible=True)
        with model.join():
            train(comm, model, sgd(model.parameters()), Mlp)
        return weights(model.module)

    _, right = alone(Mlp, 2)
    for found in threads(2, run):
        same(found, right)


# --- what cannot be


def test_different_modules_on_ranks_are_named(threads):
    def run(comm):
        with pytest.raises(CollectiveMismatch) as raised:
            DDP(nn.Linear(3, 4 + comm.rank), comm)
        return str(raised.value)

    one, two = threads(2, run)
    assert one == two
    assert "rank 0 has weight: float32[4, 3], rank 1 has weight: float32[5, 3]" in one


def test_ranks_in_different_steps_are_named(threads):
    """Rank 0 makes a step more: its buckets do not fit those of the next step."""

    def run(comm):
        model = DDP(nn.Linear(4, 4), comm)
        for _ in range(2 + (comm.rank == 0)):
            model.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
        comm.all_reduce(np.zeros(1))

    with pytest.raises(CollectiveMismatch, match="bucket 0, even step"):
        threads(2, run)


def test_rank_that_closes_is_named(threads):
    def run(comm):
        model = DDP(nn.Linear(4, 4), comm)
        if comm.rank == 1:
            comm.close()
            return None
        with pytest.raises(PeerLost) as raised:
            model(torch.ones(1, 4)).sum().backward()
        return raised.value.ranks

    assert threads(2, run)[0] == (1,)


@pytest.mark.parametrize("cap", [0, -1])
def test_bucket_size_of_zero_is_refused(threads, cap):
    with pytest.raises(BadArgument, match="bucket_cap_mb"):
        threads(1, lambda comm: DDP(nn.Linear(2, 2), comm, bucket_cap_mb=cap))


def test_sparse_gradients_are_refused(threads):
    def run(comm):
        model = DDP(nn.Embedding(5, 2, sparse=True), comm)
        with pytest.raises(UsageError, match="weight: its gradient is sparse"):
            model(torch.tensor([1])).sum().backward()

    threads(1, run)


def test_parameters_not_on_the_cpu_are_refused():
    with pytest.raises(BadArgument, match="expected a dense tensor on the CPU"):
        DDP(nn.Linear(2, 2, device="meta"), unisono.init())
