"""Mixture of experts over the ranks against all experts on one rank."""

from math import ceil

import pytest
import torch
from nets import NS, STEPS, made
from torch import nn

from unisono.errors import BadArgument, CollectiveMismatch
from unisono.parallel import DDP, FSDP, Mesh, MoE, ZeRO

WIDTH, EXPERTS = 6, 12
TOKENS = {1: [7], 2: [5, 9], 3: [4, 0, 11], 4: [0, 0, 3, 8]}


class Expert(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))


class Parts(nn.Module):
    """A gate and all experts, as one process has them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))


def parts(seed=0):
    return made(Parts, seed).double()


def drawn(count, seed):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=source, dtype=torch.float64)


def dense(whole, x, top_k, factor=None):
    """Every expert on every token, and the sum of the chosen: one rank's tokens."""
    shares = whole.gate(x).softmax(-1)
    best, chosen = shares.topk(top_k, -1)
    if top_k > 1:
        best = best / best.sum(-1, keepdim=True)
    room = len(x) * top_k if factor is None else ceil(factor * len(x) * top_k / EXPERTS)
    taken = [0] * EXPERTS
    outputs = [expert(x) for expert in whole.experts]
    y = 0 * sum(outputs)  # so that an expert which is not chosen has a gradient: zero
    for choice in range(top_k):
        for token in range(len(x)):
            expert = int(chosen[token, choice])
            taken[expert] += 1
            if taken[expert] <= room:
                one = torch.zeros(len(x), 1, dtype=x.dtype)
                one[token] = 1
                y = y + one * best[token, choice] * outputs[expert]
    return y, sum(max(0, t - room) for t in taken)


def moe(comm, top_k=2, factor=None, seed=0, **options):
    whole = parts(seed)
    return MoE(
        whole.gate,
        list(whole.experts),
        comm,
        top_k=top_k,
        capacity_factor=factor,
        **options,
    )


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("factor", [None, 0.5, 1.0])
def test_moe_equals_dense_experts(threads, n, top_k, factor):
    """Outputs, what is dropped, and all gradients; ranks with few tokens or none."""
    whole = parts()
    xs = [drawn(count, 10 + r).requires_grad_() for r, count in enumerate(TOKENS[n])]
    right = [dense(whole, x, top_k, factor) for x in xs]
    sum(y.sin().sum() for y, _ in right).backward()

    def run(comm):
        model = moe(comm, top_k, factor, seed=comm.rank)
        x = drawn(TOKENS[n][comm.rank], 10 + comm.rank).requires_grad_()
        y = model(x)
        y.sin().sum().backward()
        grads = [p.grad for p in model.experts.parameters()]
        return y.detach(), x.grad, model.gate.weight.grad, grads, model.dropped

    found = threads(n, run)
    mine = [p.grad for p in whole.experts.parameters()]
    each = len(mine) // n
    for rank, (y, grad, _, grads, dropped) in enumerate(found):
        torch.testing.assert_close(y, right[rank][0].detach())
        assert dropped == right[rank][1]
        if len(grad):
            torch.testing.assert_close(grad, xs[rank].grad)
        for got, wanted in zip(grads, mine[rank * each :], strict=False):
            torch.testing.assert_close(got, wanted / n)
    total = sum(gate for *_, gate, _, _ in found)
    torch.testing.assert_close(total, whole.gate.weight.grad)


class Little(nn.Module):
    """A residual layer with experts, between two others."""

    def __init__(self, experts):
        super().__init__()
        self.first = made(lambda: nn.Linear(WIDTH, WIDTH), 3).double()
        self.moe = experts
        self.last = made(lambda: nn.Linear(WIDTH, 1), 4).double()

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.moe(x))


class OneRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.whole = parts()

    def forward(self, x):
        return dense(self.whole, x, 2)[0]


def learn(comm, model, replica):
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    losses = []
    for step in range(STEPS):
        opt.zero_grad()
        x = drawn(5, 100 * step + replica)
        loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def alone(n):
    model = Little(OneRank())
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    losses = []
    for step in range(STEPS):
        opt.zero_grad()
        mine = []
        for rank in range(n):
            x = drawn(5, 100 * step + rank)
            mine.append((model(x) - x.sum(-1, keepdim=True)).square().mean())
        (sum(mine) / n).backward()
        opt.step()
        losses.append([loss.item() for loss in mine])
    return losses, model


@pytest.mark.cases(1)
@pytest.mark.quick(n=[4])
@pytest.mark.parametrize(("n", "dp"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
def test_ddp_of_experts_equals_one_process(threads, n, dp):
    """Experts over one axis, the same ones over the other; DDP for all else."""
    losses, model = alone(n)

    def run(comm):
        with Mesh(comm, dp=dp, ep=n // dp) as mesh:
            experts = moe(mesh["ep"], replicas=mesh["dp"], seed=comm.rank)
            little = Little(experts)
            mine = learn(comm, DDP(little, comm), comm.rank)
            state = {k: v.clone() for k, v in little.state_dict().items()}
            return mine, state, experts.first

    right = model.state_dict()
    for rank, (mine, state, first) in enumerate(threads(n, run)):
        assert mine == pytest.approx([step[rank] for step in losses], rel=1e-10)
        for name, value in state.items():
            parts = name.split(".")
            if parts[:2] == ["moe", "experts"]:
                parts[2] = str(int(parts[2]) + first)
            if parts[0] == "moe":
                parts.insert(1, "whole")
            wanted = right[".".join(parts)]
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_moe_sends_the_bytes_of_its_tokens(threads, n):
    row = WIDTH * 8

    def run(comm):
        model = moe(comm)
        x = drawn(TOKENS[n][comm.rank], comm.rank).requires_grad_()
        before = comm.sent_bytes
        y = model(x)
        forward = comm.sent_bytes - before
        y.sum().backward()
        _, chosen = model.gate(x).topk(2, -1)
        to = (chosen // (EXPERTS // n)).reshape(-1).bincount(minlength=n).tolist()
        return forward, comm.sent_bytes - before - forward, to

    found = threads(n, run)
    for rank, (forward, backward, to) in enumerate(found):
        away = sum(to) - to[rank]
        came = sum(other[rank] for *_, other in found) - to[rank]
        # Counts are all-gathered once for experts, and in each exchange.
        counts = (n - 1) * 8 * (EXPERTS + 2 * n)
        assert forward == (away + came) * row + counts
        assert backward == (away + came) * row + (n - 1) * 8 * 2 * n


def test_balance_loss_is_least_for_even_use(threads):
    """The loss of Switch, with the load of all ranks."""

    def run(comm):
        model = moe(comm, top_k=1)
        x = drawn(6, comm.rank)
        model(x)
        return model.load, model.balance_loss.detach(), model.gate(x).softmax(-1)

    found = threads(2, run)
    shares = torch.cat([s for *_, s in found]).detach()
    load = shares.argmax(-1).bincount(minlength=EXPERTS)
    wanted = EXPERTS * (load / load.sum() * shares.mean(0)).sum()
    for mine, _, _ in found:
        assert torch.equal(mine, load)
    torch.testing.assert_close((found[0][1] + found[1][1]) / 2, wanted)


def test_ranks_without_tokens_take_part(threads):
    def run(comm):
        model = moe(comm, factor=1.0)
        x = torch.zeros(2, 0, WIDTH, dtype=torch.float64, requires_grad=True)
        y = model(x)
        assert y.shape == x.shape
        (y.sum() + model.balance_loss).backward()
        assert all(float(p.grad.abs().sum()) == 0 for p in model.experts.parameters())

    threads(2, run)


# --- what cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, r"top_k = 0: expected 1..12"),
        ({"top_k": 13}, r"top_k = 13: expected 1..12"),
        ({"factor": 0.0}, "capacity_factor = 0.0: expected more than 0"),
    ],
)
def test_top_k_and_capacity_out_of_range_are_refused(threads, options, message):
    with pytest.raises(BadArgument, match=message):
        threads(2, lambda comm: moe(comm, **options))


def test_experts_that_ranks_do_not_divide_are_refused(threads):
    with pytest.raises(BadArgument, match="experts: 12 cannot be divided evenly by 5"):
        threads(5, moe)


def test_gate_with_another_number_of_experts_is_refused(threads):
    def run(comm):
        model = moe(comm)
        model.gate = nn.Linear(WIDTH, 3).double()
        model(drawn(2, 0))

    with pytest.raises(BadArgument, match="the gate scores 3 experts, there are 12"):
        threads(2, run)


def test_different_options_on_ranks_are_named(threads):
    def top(comm):
        moe(comm, top_k=1 + comm.rank)

    def width(comm):
        gate = nn.Linear(WIDTH + comm.rank, 2)
        MoE(gate, [nn.Identity(), nn.Identity()], comm)

    with pytest.raises(CollectiveMismatch, match="MoE: the ranks differ"):
        threads(2, top)
    with pytest.raises(CollectiveMismatch, match="MoE: the ranks differ"):
        threads(2, width)


def test_one_more_forward_of_moe_on_a_rank_is_detected(threads):
    def run(comm):
        model = moe(comm)
        x = drawn(3, 0)
        if comm.rank:
            model(x)
        model(x).sum().backward()

    with pytest.raises(CollectiveMismatch, match="for MoE: counts"):
        threads(2, run)


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_fsdp_and_zero_over_different_experts_are_refused(threads, kind):
    def run(comm):
        net = Little(moe(comm))
        if kind == "fsdp":
            FSDP(net, comm)
        else:
            ZeRO(net, comm, torch.optim.SGD, lr=0.1)

    with pytest.raises(BadArgument, match="is a different parameter on each"):
        threads(2, run)
