"""Estimates for a strategy against what ranks keep and send."""

import pytest
import torch
from nets import NS
from sharded_nets import (
    LAYERS,
    LENGTH,
    ON_SHARDS,
    PLAN,
    WIDTH,
    WORDS,
    Layer,
    Placeless,
    net,
    tokens,
)
from torch import nn
from torch.nn import functional

from unisono.errors import BadArgument
from unisono.models import gpt, of_size
from unisono.parallel import (
    DDP,
    FSDP,
    Pipeline,
    ZeRO,
    parallelize,
    positions,
    ring_attention,
    sequence_plan,
    vocabulary_cross_entropy,
)
from unisono.parallel.estimate.strategies import (
    Setting,
    estimates,
    first_that_fits,
)

ROWS = 96
MODEL = gpt(layers=LAYERS, hidden=WIDTH, vocabulary=WORDS, positions=LENGTH)
PLANS = {"tensor": PLAN, "sequence": sequence_plan(PLAN, on_shards=ON_SHARDS)}


def estimate(name, n, model=MODEL, **options):
    at = Setting(n, ROWS, LENGTH, 8, 1.0, **options)
    return next(e for e in estimates(model, at) if e.strategy == name)


def test_parameters_are_those_of_the_module():
    plain = net()
    assert sum(p.numel() for p in plain.parameters()) == MODEL.parameters
    assert sum(p.numel() for p in plain.layers[0].parameters()) == MODEL.block


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp"])
def test_ddp_zero_and_fsdp_send_what_is_estimated(threads, n, name):
    def run(comm):
        plain = net()
        if name == "zero2":
            opt = ZeRO(plain, comm, torch.optim.SGD, stage=2, lr=0.1)
            model = plain
        else:
            model = (DDP if name == "ddp" else FSDP)(plain, comm)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
        before = comm.sent_bytes
        x, y = tokens(0, comm.rank)
        functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        opt.step()
        return comm.sent_bytes - before

    right = estimate(name, n).sent
    for found in threads(n, run):
        assert found == pytest.approx(right, rel=1e-3)


def cut(comm, name):
    model = parallelize(net(Placeless), comm, PLANS[name])
    x, y = tokens(0, rows=ROWS)
    before = comm.sent_bytes
    vocabulary_cross_entropy(model(x), y, comm).backward()
    return comm.sent_bytes - before, sum(p.nbytes for p in model.parameters())


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_tensor_parallelism_sends_and_keeps_what_is_estimated(threads, n):
    """To the byte: all of a step, with embedding, head and loss."""
    right = estimate("tensor", n)
    assert threads(n, cut, "tensor") == [(right.sent, right.parameters)] * n


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_sequence_parallelism_sends_and_keeps_what_is_estimated(threads, n):
    """The sums of the norms' gradients are so small that they go to everybody."""
    right = estimate("sequence", n)
    for found, held in threads(n, cut, "sequence"):
        assert found == pytest.approx(right.sent, rel=1e-3)
        assert held == right.parameters


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_ring_attention_sends_what_is_estimated(threads, n):
    def run(comm):
        model = net()
        for layer in model.layers:
            layer.attend = lambda q, k, v: ring_attention(q, k, v, comm, causal=True)
        model = DDP(model, comm)
        at = positions(LENGTH, comm)
        x, y = (t[:, at] for t in tokens(0, rows=ROWS))
        before = comm.sent_bytes
        loss = functional.cross_entropy(model(x, at).flatten(0, 1), y.flatten())
        loss.backward()
        return comm.sent_bytes - before

    right = estimate("ring", n).sent
    for found in threads(n, run):
        assert found == pytest.approx(right, rel=1e-3)


def test_pipeline_sends_what_is_estimated(threads):
    """By a stage in the middle; headers are left out of the estimate."""

    def run(comm):
        layers = nn.Sequential(*[Layer() for _ in range(3)]).double()
        pipe = Pipeline(layers, comm, microbatches=4)
        x = torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.float64)
        before = comm.sent_bytes
        pipe.step(x, x, functional.mse_loss)
        return comm.sent_bytes - before

    model = gpt(layers=3, hidden=WIDTH, vocabulary=WORDS, positions=LENGTH)
    right = estimate("pipeline", 3, model, microbatches=4).sent
    assert threads(3, run)[1] == pytest.approx(right, rel=1e-3)


def kept(block, x):
    """Bytes of what autograd saves for backward, parameters aside."""
    params = {p.untyped_storage().data_ptr() for p in block.parameters()}
    found = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in params:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(x)
    assert y.requires_grad
    return sum(found.values())


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("n", NS)
def test_block_keeps_the_estimated_activations(threads, n, name):
    """17 activations, of which tensor parallelism cuts 13, and the sequence 2 more."""
    rows = 12

    def run(comm):
        inner = {k.removeprefix("layers.*"): v for k, v in PLANS[name].items()}
        plan = {k.strip("."): v for k, v in inner.items() if k[:1] in ("", ".")}
        block = parallelize(Layer().double(), comm, plan)
        length = LENGTH // n if name == "sequence" else LENGTH
        x = torch.zeros(rows, length, WIDTH, dtype=torch.float64, requires_grad=True)
        return kept(block, x)

    at = Setting(n, rows, LENGTH, 8, 1.0)
    right = next(e for e in estimates(MODEL, at) if e.strategy == name)
    for found in threads(n, run):
        assert found == pytest.approx(right.activations / LAYERS, rel=0.1)


def test_strategies_on_one_rank_send_nothing_and_need_the_same():
    rows = list(estimates(MODEL, Setting(1, ROWS, LENGTH)))
    assert {row.sent for row in rows} == {0.0}
    plain = {r.memory for r in rows if r.strategy not in ("zero1", "pipeline")}
    assert max(plain) == pytest.approx(min(plain))


def test_more_ranks_need_less_memory_each():
    for name in ("zero2", "fsdp", "tensor", "sequence", "ring"):
        few, many = (estimate(name, n).memory for n in (2, 8))
        assert many < few, name
    assert estimate("pipeline", 2).memory < estimate("pipeline", 1).memory
    at = Setting(LAYERS + 1, ROWS, LENGTH)
    assert "pipeline" not in {e.strategy for e in estimates(MODEL, at)}


def test_first_that_fits_is_the_simplest_strategy():
    model = of_size("7B", 7_000_000_000)
    at = Setting(8)
    assert first_that_fits(model, at, 200 << 30).strategy == "ddp"
    assert first_that_fits(model, at, 20 << 30).strategy == "fsdp"
    assert first_that_fits(model, at, 1 << 30) is None


def test_settings_below_one_are_refused():
    with pytest.raises(BadArgument, match="n = 0: at least one"):
        Setting(0)
    with pytest.raises(BadArgument, match="layers = 0: expected 1 or more"):
        gpt(layers=0, hidden=1, vocabulary=1, positions=1)
