"""Model parallel layers on one axis of a mesh, FSDP or ZeRO on another.

Four ranks train as one process does that has the batches of both replicas.
"""

import pytest
import torch
from nets import STEPS, made, same
from sharded_nets import (
    LENGTH,
    ON_SHARDS,
    PLAN,
    Layer,
    net,
    one_process,
    sgd,
    tokens,
)
from torch import nn
from torch.nn import functional

from unisono.parallel import (
    DDP,
    FSDP,
    Mesh,
    MoE,
    ZeRO,
    parallelize,
    positions,
    ring_attention,
    sequence_plan,
    vocabulary_cross_entropy,
    whole_state,
)

LIMIT = 1e-11
PLANS = {
    "tensor": PLAN,
    "sequence": sequence_plan(PLAN, on_shards=ON_SHARDS, enters="layers"),
}


def sharded(cut, comm, how):
    """The module to call, its optimizer, and what has its plain state."""
    if how == "fsdp":
        model = FSDP(cut, comm, units=[Layer])
        return model, sgd(model.parameters()), model
    options = {"stage": int(how[-1]), "units": [Layer], "lr": 0.05, "momentum": 0.9}
    optimizer = ZeRO(cut, comm, torch.optim.SGD, **options)
    return cut, optimizer, getattr(optimizer, "_sharding", None)


def state_of(cut, kept):
    """The plain state of the module before it was cut, from shards of shards."""
    if isinstance(kept, FSDP):
        with kept.summon(writeback=False):
            return whole_state(cut)
    return whole_state(cut)


@pytest.mark.cases(1)
@pytest.mark.quick(how=["fsdp", "zero2"])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("tensor", "fsdp"),
        ("tensor", "zero1"),
        ("sequence", "zero2"),
        ("sequence", "zero3"),
    ],
)
def test_fsdp_and_zero_of_tensor_parallel_layers_equal_one_process(threads, name, how):
    losses, right = one_process(replicas=2)

    def run(comm):
        with Mesh(comm, dp=2, tp=2) as mesh:
            cut = parallelize(net(seed=comm.rank), mesh["tp"], PLANS[name])
            model, optimizer, kept = sharded(cut, mesh["dp"], how)
            found = []
            for step in range(STEPS):
                optimizer.zero_grad()
                x, y = tokens(step, mesh.coordinates["dp"])
                loss = vocabulary_cross_entropy(model(x), y, mesh["tp"])
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found, state_of(cut, kept)

    found = threads(4, run)
    for _, state in found:
        same(state, right, LIMIT)
    means = [(a + b) / 2 for a, b in zip(found[0][0], found[2][0], strict=True)]
    assert means == pytest.approx(losses, rel=LIMIT)


@pytest.mark.sweep
@pytest.mark.quick(how=["fsdp"])
@pytest.mark.parametrize("how", ["fsdp", "zero2"])
def test_fsdp_and_zero_with_context_parallelism_equal_one_process(threads, how):
    """Every rank has some of the tokens and all of the model, of which it has 1/4."""
    _, right = one_process(replicas=2)

    def run(comm):
        with Mesh(comm, dp=2, cp=2) as mesh:
            cp, whole = mesh["cp"], net(seed=comm.rank)
            for layer in whole.layers:
                layer.attend = lambda q, k, v: ring_attention(q, k, v, cp, causal=True)
            model, optimizer, kept = sharded(whole, mesh.over("dp", "cp"), how)
            at = positions(LENGTH, cp)
            for step in range(STEPS):
                optimizer.zero_grad()
                x, y = (t[:, at] for t in tokens(step, mesh.coordinates["dp"]))
                scores = model(x, at).flatten(0, 1)
                functional.cross_entropy(scores, y.flatten()).backward()
                optimizer.step()
            return state_of(whole, kept)

    for state in threads(4, run):
        same(state, right, LIMIT)


class Mixture(nn.Module):
    """Experts between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


class Mixed(nn.Module):
    """The same with its experts on the ranks of `comm`."""

    def __init__(self, whole, comm, replicas):
        super().__init__()
        self.first, self.last = whole.first, whole.last
        self.moe = MoE(whole.gate, list(whole.experts), comm, replicas=replicas)

    def forward(self, x):
        return self.last(self.moe(torch.tanh(self.first(x))))


def test_experts_sharded_among_their_replicas_equal_one_process(threads):
    """As DDP does it; all but the experts is averaged over `ep` by hand."""

    def run(comm, shards):
        with Mesh(comm, dp=2, ep=2) as mesh:
            whole = made(Mixture).double()
            model = Mixed(whole, mesh["ep"], mesh["dp"])
            rest = [model.first, model.last, model.moe.gate]
            for param in (p for part in rest for p in part.parameters()):
                param.register_hook(
                    lambda g: mesh["ep"].all_reduce(g.clone(), op="mean")
                )
            model = (FSDP if shards else DDP)(model, mesh["dp"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            source = torch.Generator().manual_seed(comm.rank)
            for _ in range(4):
                x = torch.randn(5, 3, generator=source, dtype=torch.float64)
                optimizer.zero_grad()
                (model(x) ** 2).mean().backward()
                optimizer.step()
            if shards:
                return model.state_dict()
            return {k: v.clone() for k, v in model.module.state_dict().items()}

    for found, right in zip(threads(4, run, True), threads(4, run, False), strict=True):
        same(found, right, LIMIT)
