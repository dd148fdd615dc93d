"""Estimates for a mesh against what four ranks keep and send."""

import pytest
import torch
from sharded_nets import LAYERS, LENGTH, PLAN, WIDTH, WORDS, Layer, net, tokens
from torch import nn
from torch.nn import functional

from unisono.errors import BadArgument
from unisono.models import gpt, of_size
from unisono.parallel import (
    DDP,
    FSDP,
    Mesh,
    MoE,
    Pipeline,
    PlainDDP,
    parallelize,
    positions,
    ring_attention,
    vocabulary_cross_entropy,
)
from unisono.parallel.estimate.meshes import (
    Axes,
    best_mesh,
    idle,
    meshes,
    misfit,
    on_mesh,
)
from unisono.parallel.estimate.strategies import Setting, estimates

ROWS, EXPERTS = 96, 4
MODEL = gpt(layers=LAYERS, hidden=WIDTH, vocabulary=WORDS, positions=LENGTH)
MIXTURE = gpt(
    layers=LAYERS,
    hidden=WIDTH,
    vocabulary=WORDS,
    positions=LENGTH,
    experts=EXPERTS,
    top_k=2,
)


def estimated(axes, strategy="ddp", model=MODEL, **options):
    at = Setting(axes.n, ROWS, LENGTH, 8, 1.0, **options)
    return next(e for e in on_mesh(model, at, axes) if e.strategy == strategy)


def held(model):
    return sum(p.nbytes for p in model.parameters())


def sent_by(run, *comms):
    """What each communicator has sent in a run."""
    before = [comm.sent_bytes for comm in comms]
    run()
    return [c.sent_bytes - was for c, was in zip(comms, before, strict=True)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_dp_and_tp_send_and_keep_what_is_estimated(threads, strategy):
    def run(comm):
        with Mesh(comm, dp=2, tp=2) as mesh:
            cut = parallelize(net(), mesh["tp"], PLAN)
            whole = held(cut)
            wrap = {"ddp": DDP, "fsdp": lambda *a: FSDP(*a, units=[Layer])}[strategy]
            model = wrap(cut, mesh["dp"])
            x, y = tokens(0, rows=ROWS // 2)

            def step():
                vocabulary_cross_entropy(model(x), y, mesh["tp"]).backward()

            return whole, held(model), *sent_by(step, mesh["dp"], mesh["tp"])

    right, plain = estimated(Axes(dp=2, tp=2), strategy), estimated(Axes(dp=2, tp=2))
    for whole, mine, average, tp in threads(4, run):
        assert whole == plain.parameters
        assert tp == right.axes["tp"]
        assert average == pytest.approx(right.axes["average"], rel=1e-3)
        if strategy == "fsdp":
            assert mine == pytest.approx(right.gradients, rel=1e-3)


def test_dp_and_cp_send_what_is_estimated(threads):
    def run(comm):
        with Mesh(comm, dp=2, cp=2) as mesh:
            cp, whole = mesh["cp"], net()
            for layer in whole.layers:
                layer.attend = lambda q, k, v: ring_attention(q, k, v, cp, causal=True)
            model, at = DDP(whole, mesh.over("dp", "cp")), positions(LENGTH, cp)
            x, y = (t[:, at] for t in tokens(0, rows=ROWS // 2))

            def step():
                scores = model(x, at).flatten(0, 1)
                functional.cross_entropy(scores, y.flatten()).backward()

            return held(model), *sent_by(step, mesh.over("dp", "cp"), cp)

    right = estimated(Axes(dp=2, cp=2))
    for mine, average, cp in threads(4, run):
        assert mine == right.parameters
        assert average == pytest.approx(right.axes["average"], rel=1e-3)
        assert cp == pytest.approx(right.axes["cp"], rel=1e-3)  # and 8 bytes a call


class First(nn.Module):
    """Words and places."""

    def __init__(self):
        super().__init__()
        self.words, self.places = (
            nn.Embedding(WORDS, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
        )

    def forward(self, x):
        return self.words(x) + self.places.weight


class Last(nn.Sequential):
    """A norm and a head."""

    def __init__(self):
        super().__init__(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False), nn.Flatten(0, 1)
        )


def test_dp_and_pp_send_and_keep_what_is_estimated(threads):
    def run(comm):
        with Mesh(comm, dp=2, pp=2) as mesh:
            layers = nn.Sequential(First(), Layer(), Layer(), Last()).double()
            pipe = Pipeline(layers, mesh["pp"], microbatches=4, at=[2])
            model = PlainDDP(pipe, mesh["dp"])
            x, y = tokens(0, rows=ROWS // 2)

            def loss(scores, target):
                return functional.cross_entropy(scores, target.flatten())

            def step():
                pipe.step(x, y, lambda s, t: loss(s, t) * len(s) / len(s))
                model.sync()

            if comm.rank % 2:  # one row of scores for each token
                pipe.layers["3"].append(nn.Unflatten(0, (-1, LENGTH)))

                def loss(scores, target):
                    return functional.cross_entropy(
                        scores.flatten(0, 1), target.flatten()
                    )

            return held(pipe), *sent_by(step, mesh["dp"], mesh["pp"])

    right = estimated(Axes(dp=2, pp=2), microbatches=4)
    for rank, (mine, average, pp) in enumerate(threads(4, run)):
        if rank % 2 == 0:
            assert mine == right.parameters
            assert average == right.axes["average"]
        assert pp == pytest.approx(right.axes["pp"], rel=1e-2)  # and headers


class Turns(nn.Module):
    """A gate that sends tokens to two experts each, all of them by turns."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, EXPERTS)

    def forward(self, rows):
        first = functional.one_hot(torch.arange(len(rows)) % EXPERTS, EXPERTS)
        return self.linear(rows) * 0 + 2 * first + first.roll(1, -1)


class Mixed(Layer):
    """A layer with experts in place of its perceptron."""

    def __init__(self, comm, replicas=None):
        super().__init__()
        experts = [
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(EXPERTS)
        ]
        self.double()
        parts = nn.ModuleList([Turns(), *experts]).double()
        self.mlp = MoE(parts[0], list(parts[1:]), comm, replicas=replicas)


def test_dp_and_ep_send_and_keep_what_is_estimated(threads):
    def run(comm):
        with Mesh(comm, dp=2, ep=2) as mesh:
            model = net()
            model.layers = nn.Sequential(
                *[Mixed(mesh["ep"], mesh["dp"]) for _ in range(LAYERS)]
            )
            ddp = DDP(model, comm)
            x, y = tokens(0, rows=ROWS // 4)

            def step():
                functional.cross_entropy(ddp(x).flatten(0, 1), y.flatten()).backward()

            return held(model), *sent_by(step, comm, mesh["dp"], mesh["ep"])

    right = estimated(Axes(dp=2, ep=2), model=MIXTURE)
    for mine, shared, experts, ep in threads(4, run):
        assert mine == right.parameters
        assert shared + experts == pytest.approx(right.axes["average"], rel=1e-3)
        assert ep == pytest.approx(right.axes["ep"], rel=1e-3)  # and counts


def test_block_of_experts_keeps_the_estimated_activations(threads):
    rows = 12

    def run(comm):
        block = Mixed(comm)
        params = {p.untyped_storage().data_ptr() for p in block.parameters()}
        found = {}

        def pack(t):
            storage = t.untyped_storage()
            if storage.data_ptr() not in params:
                found[storage.data_ptr()] = storage.nbytes(), t
            return t

        x = torch.zeros(rows, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = block(x)
        assert y.requires_grad
        return sum(size for size, _ in found.values())

    at = Setting(1, rows, LENGTH, 8, 1.0)
    right = next(estimates(MIXTURE, at)).activations / LAYERS
    assert threads(1, run)[0] == pytest.approx(right, rel=0.1)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_mesh_of_one_axis_equals_the_strategy(n):
    at = Setting(n, ROWS, 48, 8, 2.0)
    model = gpt(layers=8, hidden=WIDTH, vocabulary=WORDS, positions=48)
    alone = {e.strategy: e for e in estimates(model, at)}
    for axis, names in {
        "dp": {w: w for w in ("ddp", "zero1", "zero2", "fsdp")},
        "tp": {"ddp": "tensor"},
        "cp": {"ddp": "ring"},
    }.items():
        by_strategy = {e.strategy: e for e in on_mesh(model, at, Axes(**{axis: n}))}
        for strategy, name in names.items():
            assert by_strategy[strategy].memory == pytest.approx(alone[name].memory), (
                axis,
                strategy,
            )
            assert by_strategy[strategy].sent == pytest.approx(alone[name].sent), (
                axis,
                strategy,
            )


def test_best_mesh_sends_least_of_those_that_fit():
    """A model that no strategy alone fits: its activations are too large for fsdp."""
    model = gpt(layers=32, hidden=4096, vocabulary=50304, positions=8192)
    at = Setting(16, 16, 8192, 2, 4.0)
    room = 24 << 30
    assert all(e.memory > room for e in estimates(model, at))
    axes, best = best_mesh(model, at, room)
    assert axes.n == 16
    assert best.memory <= room
    for other in meshes(model, at):
        for estimate in on_mesh(model, at, other):
            worse = estimate.memory > room or estimate.sent >= best.sent
            assert worse or idle(at, other) > 0.25
    assert best_mesh(model, at, 1 << 20) is None


def test_pipeline_idles_n_minus_1_of_m_plus_n_minus_1():
    assert idle(Setting(4, microbatches=9), Axes(pp=4)) == pytest.approx(3 / 12)
    assert idle(Setting(4), Axes(tp=4)) == 0


@pytest.mark.parametrize(
    ("axes", "why"),
    [
        (Axes(dp=2), "it has 2 ranks, there are 4"),
        (Axes(tp=4), "hidden = 6 cannot be divided by tp"),
        (Axes(pp=4), "3 layers are too few for pp"),
        (Axes(cp=4), "6 tokens cannot be divided into 2 cp blocks"),
        (Axes(dp=4), "a batch of 2 cannot be divided by dp and ep"),
        (Axes(ep=2, dp=2), "a batch of 2 cannot"),
        (Axes(ep=2, pp=2), "0 experts cannot be divided by ep"),
    ],
)
def test_meshes_that_do_not_divide_the_model_are_refused(axes, why):
    model, at = gpt(layers=3, hidden=6, vocabulary=5, positions=6), Setting(4, 2, 6)
    assert misfit(model, at, axes).startswith(why)
    with pytest.raises(BadArgument, match="mesh"):
        next(on_mesh(model, at, axes))


def test_tp_and_cp_need_the_shape_of_the_model():
    model, at = of_size("7B", 7_000_000_000), Setting(4, 4)
    assert misfit(model, at, Axes(tp=4)).startswith("tp and cp need the shape")
    assert not misfit(model, at, Axes(dp=2, pp=2))
    with pytest.raises(BadArgument, match="tp = 0: at least one"):
        Axes(tp=0)
    with pytest.raises(BadArgument, match=r"top_k = 5: expected 1..4"):
        gpt(layers=1, hidden=4, vocabulary=4, positions=4, experts=4, top_k=5)
