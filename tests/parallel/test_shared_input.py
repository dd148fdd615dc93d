"""Column-parallel layers on one input: collectives counted, results of one process."""

from collections import Counter

import pytest
import torch
from nets import made
from sharded_nets import HEADS, LENGTH, WIDTH
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unisono.parallel import (
    Column,
    Row,
    attention_plan,
    parallelize,
    sequence_plan,
    whole_state,
)
from unisono.runtime.communicator import Communicator


class Block(nn.Module):
    """Queries, keys and values come from three layers, and the MLP has a gate."""

    def __init__(self):
        super().__init__()
        self.heads, self.norm = HEADS, nn.LayerNorm(WIDTH)
        for name in ("q", "k", "v", "out", "gate", "up", "down"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        y = self.norm(x)
        return x + self.down(self.gate(y).sigmoid() * self.up(y))


def net():
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH)).double()


def inputs():
    source = torch.Generator().manual_seed(3)
    return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=source)


PLAN = {
    **attention_plan("[01]", qkv=("q", "k", "v"), out="out", heads="heads"),
    **{f"[01].{name}": Column() for name in ("gate", "up")},
    "[01].down": Row(),
    "2": Column(gather=True),
}
PLANS = {
    "tensor": PLAN,
    "sequence": sequence_plan(PLAN, on_shards=["[01].norm"], enters="0"),
}
COUNTS = {
    # Forward, two rows in each block, and the last layer gathers its outputs.
    # Backward, the input of q, k and v, that of both gate and up, and the last layer's.
    "tensor": ({"all_reduce": 4, "all_gather": 1}, {"all_reduce": 5}),
    # Each is split in two, and gradients of norms and of the rows' biases are summed.
    "sequence": (
        {"all_gather": 6, "reduce_scatter": 4},
        {"all_gather": 4, "reduce_scatter": 5, "all_reduce": 8},
    ),
}


@pytest.fixture
def count(monkeypatch):
    """count(comm, function): its value, and how often the rank called what."""
    counts = [Counter(), Counter()]
    for call in ("all_reduce", "all_gather", "reduce_scatter"):
        real = getattr(Communicator, call)

        def counted(self, *args, call=call, real=real, **options):
            counts[self.rank][call] += 1
            return real(self, *args, **options)

        monkeypatch.setattr(Communicator, call, counted)

    def run(comm, function, *args):
        counts[comm.rank].clear()
        value = function(*args)
        return value, dict(counts[comm.rank])

    return run


@pytest.mark.parametrize("name", PLANS)
def test_column_layers_on_one_input_communicate_once(threads, count, name):
    def run(comm):
        model = parallelize(made(net), comm, PLANS[name])
        x = inputs().requires_grad_(name == "tensor")
        y, forward = count(comm, model, x)
        _, backward = count(comm, y.sum().backward)
        return forward, backward

    assert threads(2, run) == [COUNTS[name]] * 2


def part_of(full, local, rank):
    """The rank's shard of a full tensor, in the shape of the local one."""
    for dim in range(full.dim()):
        if full.shape[dim] != local.shape[dim]:
            full = full.chunk(2, dim)[rank]
    return full


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_layers_that_share_an_input_equal_one_process(threads, name, recomputed):
    right = made(net)
    wanted = right(inputs())
    wanted.square().sum().backward()

    def run(comm):
        model = parallelize(made(net), comm, PLANS[name])
        y = inputs()
        for layer in model:
            y = checkpoint(layer, y, use_reentrant=False) if recomputed else layer(y)
        y.square().sum().backward()
        torch.testing.assert_close(y, wanted)
        return {key: param.grad for key, param in model.named_parameters()}

    for rank, grads in enumerate(threads(2, run)):
        for key, param in right.named_parameters():
            part = part_of(param.grad, grads[key], rank)
            torch.testing.assert_close(grads[key], part)


def test_shared_input_is_not_kept_and_not_taken_for_another(threads):
    def run(comm):
        model = parallelize(made(net), comm, PLAN)
        layer, x, state = model[0], inputs(), whole_state(model)
        weight, bias = (
            state[f"0.q.{key}"].chunk(2)[comm.rank] for key in ("weight", "bias")
        )
        assert layer.q.shared is layer.v.shared
        with torch.no_grad():
            for _ in range(2):
                right = functional.linear(x, weight, bias)
                torch.testing.assert_close(layer.q(x), right)
                x += 1  # the same tensor, with other values
        assert not layer.q(x).isnan().any()
        assert layer.q(x).requires_grad  # not what was prepared without gradients
        model(x)
        assert vars(layer.q.shared)["_prepared"] is None

    threads(2, run)
