"""Clipping by the norm of the whole model, on any kind of shards."""

import math

import pytest
import torch
from nets import made, same
from sharded_nets import ON_SHARDS, PLAN, Layer, net, one_process, sgd, tokens
from torch import nn
from torch.nn import functional

from unisono.errors import BadArgument, CollectiveMismatch
from unisono.parallel import (
    DDP,
    FSDP,
    Mesh,
    MoE,
    Pipeline,
    PlainDDP,
    ZeRO,
    clip_grad_norm_,
    mlp_plan,
    parallelize,
    sequence_plan,
    vocabulary_cross_entropy,
    whole_state,
)
from unisono.testing import world

LIMIT = 1e-11
STEPS = 3
ALONG = sequence_plan(PLAN, on_shards=ON_SHARDS, enters="layers")
INF = float("inf")


def wrapped(cut, comm, how):
    """The module to call, its optimizer, and who clips."""
    if how == "fsdp":
        model = FSDP(cut, comm, units=[Layer])
        return model, sgd(model.parameters()), model
    if how == "ddp":
        model = DDP(cut, comm)
        return model, sgd(model.parameters()), model
    options = {"stage": int(how[-1]), "units": [Layer], "lr": 0.05, "momentum": 0.9}
    optimizer = ZeRO(cut, comm, torch.optim.SGD, **options)
    return cut, optimizer, optimizer


def state_of(cut, model, optimizer):
    kept = optimizer._sharding if isinstance(optimizer, ZeRO) else model
    if isinstance(kept, FSDP):
        with kept.summon(writeback=False):
            return whole_state(cut)
    return whole_state(cut)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("how", "plan", "norm_type"),
    [
        ("ddp", PLAN, 2.0),
        ("ddp", ALONG, INF),
        ("zero1", PLAN, 3.0),
        ("zero2", ALONG, 2.0),
        ("zero3", PLAN, INF),
        ("fsdp", PLAN, 2.0),
        ("fsdp", ALONG, 1.0),
    ],
)
def test_clipping_on_a_mesh_equals_one_process(threads, how, plan, norm_type):
    """dp2 x tp2: the same weights, and the same bits of the norm on all four ranks."""
    limit = 0.005 if norm_type == INF else 0.1
    clip = limit, norm_type
    losses, right = one_process(replicas=2, steps=STEPS, clip=clip)
    unclipped, _ = one_process(replicas=2, steps=STEPS)
    assert losses[-1] != pytest.approx(unclipped[-1], rel=1e-4)  # it makes a difference

    def run(comm):
        with Mesh(comm, dp=2, tp=2) as mesh:
            cut = parallelize(net(seed=comm.rank), mesh["tp"], plan)
            model, optimizer, clips = wrapped(cut, mesh["dp"], how)
            found = []
            for step in range(STEPS):
                optimizer.zero_grad()
                x, y = tokens(step, mesh.coordinates["dp"])
                vocabulary_cross_entropy(model(x), y, mesh["tp"]).backward()
                norm = clips.clip_grad_norm_(*clip)
                optimizer.step()
                found.append(norm.item())
            return found, state_of(cut, model, optimizer)

    found = threads(4, run)
    for norms, state in found:
        same(state, right, LIMIT)
        assert norms == found[0][0]
        assert min(norms) > limit


def norm_alone(norm_type, replicas=1, rows=2):
    """What torch's own function says of one process, before it clips."""
    model = net()
    drawn = [tokens(0, replica, rows) for replica in range(replicas)]
    x, y = (torch.cat(part) for part in zip(*drawn, strict=True))
    functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type).item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF])
def test_clipping_with_tensor_parallelism_equals_one_process(threads, norm_type):
    right = norm_alone(norm_type)

    def run(comm):
        model = parallelize(net(), comm, PLAN)
        x, y = tokens(0)
        vocabulary_cross_entropy(model(x), y, comm).backward()
        norm = clip_grad_norm_(model.parameters(), 0.1, norm_type).item()
        return norm, clip_grad_norm_(model.parameters(), 0.1, norm_type).item()

    found = threads(3, run)
    assert len(set(found)) == 1
    assert found[0][0] == pytest.approx(right, rel=1e-6)
    assert found[0][1] == pytest.approx(min(right, 0.1), rel=1e-4)


def test_norm_has_the_same_bits_on_any_hosts():
    """One tp group is on a host, the other on two; and with one sum for all of them."""

    def run(comm):
        with Mesh(comm, dp=2, tp=3) as mesh:
            cut = parallelize(net(), mesh["tp"], PLAN)
            model = DDP(cut, mesh["dp"])
            x, y = tokens(0, mesh.coordinates["dp"])
            vocabulary_cross_entropy(model(x), y, mesh["tp"]).backward()
            norm = model.clip_grad_norm_(INF).item()
            clipped = clip_grad_norm_(model.parameters(), 0.01, comm=comm).item()
            return norm, clipped, cut.norm.weight.grad.tolist()

    with world(6, timeout_s=60.0, hosts=(0, 0, 0, 0, 1, 1)) as made_world:
        found = made_world.run(run)
    assert all(f == found[0] for f in found)
    assert found[0][0] == pytest.approx(norm_alone(2.0, replicas=2), rel=1e-6)
    assert found[0][1] == pytest.approx(found[0][0], rel=1e-6)


def test_clipping_with_hybrid_sharding_equals_one_process(threads):
    def run(comm):
        with Mesh(comm, copies=2, shards=2) as mesh:
            model = FSDP(net(), mesh["shards"], replicas=mesh["copies"])
            x, y = tokens(0, comm.rank)
            functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            return model.clip_grad_norm_(0.1).item()

    found = threads(4, run)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(norm_alone(2.0, replicas=4), rel=1e-6)


class Experts(nn.Module):
    """A layer and experts."""

    def __init__(self, comm, replicas):
        super().__init__()
        self.first = made(lambda: nn.Linear(3, 4)).double()
        gate = made(lambda: nn.Linear(4, 4)).double()
        experts = [made(lambda: nn.Linear(4, 4), i).double() for i in range(4)]
        self.moe = MoE(gate, experts, comm, replicas=replicas)

    def forward(self, x):
        return self.moe(self.first(x))


@pytest.mark.parametrize("over", ["world", "dp·ep"])
def test_clipping_with_experts_equals_one_process(threads, over):
    """Each expert once, although `dp` ranks have it; all else once."""

    def run(comm):
        with Mesh(comm, dp=2, ep=2) as mesh:
            every = comm if over == "world" else mesh.over("dp", "ep")
            model = DDP(Experts(mesh["ep"], mesh["dp"]), every)
            source = torch.Generator().manual_seed(comm.rank)
            x = torch.randn(9, 3, generator=source, dtype=torch.float64)
            (model(x) ** 2).sum().backward()
            named = model.module.named_parameters()
            grads = {name: p.grad.clone() for name, p in named}
            return model.clip_grad_norm_(0.1).item(), grads, mesh.coordinates

    found = threads(4, run)
    assert len({norm for norm, _, _ in found}) == 1
    counted = [
        grad
        for _, grads, at in found
        for name, grad in grads.items()
        if at["dp"] == 0 and (at["ep"] == 0 or "experts" in name)
    ]
    right = math.sqrt(sum(float((grad**2).sum()) for grad in counted))
    assert found[0][0] == pytest.approx(right, rel=1e-6)


class Square(nn.Module):
    """Two layers that can be cut."""

    def __init__(self, seed):
        super().__init__()
        first, last = (made(lambda: nn.Linear(4, 4), seed + i) for i in range(2))
        self.first, self.last = first.double(), last.double()

    def forward(self, x):
        return self.last(self.first(x).tanh())


def test_clipping_a_pipeline_with_one_tensor_parallel_stage(threads):
    """pp2 x dp2 x tp2; the first stage knows nothing of tp."""
    batches = [made(lambda: torch.randn(6, 4), 7 + i).double() for i in range(2)]
    whole = nn.Sequential(Square(1), Square(5))
    functional.mse_loss(whole(torch.cat(batches)), torch.zeros(12, 4)).backward()
    right = nn.utils.clip_grad_norm_(whole.parameters(), 1.0).item()

    def run(comm):
        with Mesh(comm, pp=2, dp=2, tp=2) as mesh:
            layers = nn.Sequential(Square(1), Square(5))
            plan = mlp_plan("1", up="first", down="last")
            parallelize(layers, mesh["tp"], plan)
            pipe = Pipeline(layers, mesh["pp"], microbatches=2)
            ddp = PlainDDP(pipe, mesh["dp"])
            x = batches[mesh.coordinates["dp"]]
            pipe.step(x, torch.zeros(6, 4), functional.mse_loss)
            ddp.sync()
            mine = list(pipe.parameters())
            return clip_grad_norm_(mine, 1e9, comm=mesh["dp"]).item()

    found = threads(8, run)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(right, rel=1e-6)


def test_parameters_without_gradient_add_nothing_to_the_norm(threads):
    def run(comm):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        params[0].grad = torch.full((3,), 2.0)
        norm = clip_grad_norm_(params, 1.0, comm=comm)
        nothing = clip_grad_norm_([], 1.0, comm=comm)
        one = clip_grad_norm_(params[0], 10.0)
        return norm.item(), nothing.item(), one.item(), params[1].grad

    for norm, nothing, one, grad in threads(2, run):
        assert norm == pytest.approx(math.sqrt(12))
        assert nothing == 0
        assert one == pytest.approx(1)
        assert grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_of_double_gradients_is_double(dtype):
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    param.grad = torch.tensor([1.0, 1e-6, 0.0], dtype=dtype)
    norm = clip_grad_norm_(param, 10.0)
    assert norm.dtype == (dtype if dtype == torch.float64 else torch.float32)
    if dtype == torch.float64:
        assert norm.item() == math.sqrt(1 + 1e-12) != 1.0


@pytest.mark.parametrize("norm_type", [0, -1.0, float("nan")])
def test_norm_types_that_are_not_positive_are_refused(norm_type):
    with pytest.raises(BadArgument, match="expected a positive number"):
        clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0, norm_type)


def test_different_norm_types_on_ranks_are_refused(threads):
    def run(comm):
        clip_grad_norm_([], 1.0, 1.0 + comm.rank, comm=comm)

    with pytest.raises(CollectiveMismatch, match="norm 1"):
        threads(2, run)


def test_overlapping_axes_need_the_communicator_of_all_ranks(threads):
    def run(comm):
        with Mesh(comm, dp=2, ep=2, tp=2) as mesh:
            both = mesh.over("ep", "tp")
            experts = [nn.Linear(2, 2) for _ in range(4)]
            model = MoE(nn.Linear(2, 4), experts, both, replicas=mesh["dp"])
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            with pytest.raises(BadArgument, match="give the communicator of all"):
                clip_grad_norm_(model.parameters(), 1.0, comm=mesh.over("dp", "ep"))
            return clip_grad_norm_(model.parameters(), 1.0, comm=comm).item()

    elements = 4 * 6 + 12
    assert threads(8, run) == pytest.approx([math.sqrt(elements)] * 8)


def test_ddp_over_ranks_with_different_shards_is_refused(threads):
    def run(comm):
        model = parallelize(net(), comm, PLAN)
        with pytest.raises(BadArgument, match=r"have different shards of"):
            DDP(model, comm)
        with pytest.raises(BadArgument, match="is a different parameter on each"):
            FSDP(model, comm)

    threads(2, run)


def test_second_plan_keeps_the_shards_of_the_first(threads):
    def run(comm):
        model = net(seed=comm.rank)
        for plan in ({k: v} for k, v in PLAN.items()):
            parallelize(model, comm, plan)
        return whole_state(model)

    for state in threads(2, run):
        same(state, net().state_dict())
