"""An error on one rank: all ranks raise at once, and name the rank and the reason.

Ranks that raise do not close their communicators here, so a rank that is not notified
would wait for the timeout; CollectiveTimeout fails the test.
"""

import pytest
import torch
from nets import Gpt, Mlp, made
from sharded_nets import LENGTH, PLAN, Placeless, net, tokens
from torch import nn
from torch.nn import functional

from unisono.errors import BadArgument, CollectiveMismatch, PeerLost, UsageError
from unisono.parallel import (
    DDP,
    FSDP,
    AsyncParameterServer,
    Column,
    Mesh,
    MoE,
    ParameterServer,
    Pipeline,
    PlainDDP,
    SyncBatchNorm,
    ZeRO,
    all_to_all_attention,
    parallelize,
    ring_attention,
    sequence_plan,
    vocabulary_cross_entropy,
)
from unisono.parallel import save_checkpoint as save

N, CULPRIT = 3, 1
SGD = torch.optim.SGD


def odd(comm, usual, other):
    """What most ranks have, and the culprit."""
    return other if comm.rank == CULPRIT else usual


class Twins(nn.Module):
    """Two layers of one shape, one of which may go unused."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, both=True):
        return self.one(x) + self.two(x) if both else self.one(x)


class Tied(nn.Module):
    """Layers that may share a weight across units."""

    def __init__(self, tied):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        if tied:
            self.layers[1].weight = self.layers[0].weight


class Opaque:
    """Nothing that torch could look into."""


class Returns(nn.Module):
    def __init__(self, opaque):
        super().__init__()
        self.linear, self.opaque = nn.Linear(2, 2), opaque

    def forward(self, x):
        y = self.linear(x)
        return Opaque() if self.opaque else y


# --- in a preparation: the others get the whole story


def ddp_on_another_device(comm):
    DDP(nn.Linear(2, 2, device=odd(comm, "cpu", "meta")), comm)


def ddp_without_room(comm):
    DDP(nn.Linear(2, 2), comm, bucket_cap_mb=odd(comm, 25, -1))


def zero_stage(comm):
    ZeRO(made(), comm, SGD, stage=odd(comm, 2, 4), lr=0.1)


def zero_optimizer(comm):
    ZeRO(made(), comm, odd(comm, SGD, torch.optim.LBFGS), lr=0.1)


def zero_groups(comm):
    mine = made()
    other = [{"params": made().parameters()}]
    ZeRO(mine, comm, SGD, groups=odd(comm, None, other), lr=0.1)


def fsdp_tied(comm):
    FSDP(Tied(comm.rank == CULPRIT), comm)


def fsdp_units(comm):
    FSDP(made(), comm, units=odd(comm, None, [nn.Linear(2, 2)]))


def plan_with_a_wrong_name(comm):
    parallelize(net(), comm, {odd(comm, "head", "haed"): Column()})


def heads_that_cannot_be_cut(comm):
    model = net()
    model.layers[0].heads = odd(comm, 12, 7)
    parallelize(model, comm, PLAN)


def experts(comm):
    MoE(
        nn.Linear(2, 3),
        [nn.Linear(2, 2) for _ in range(3)],
        comm,
        top_k=odd(comm, 3, 4),
    )


def pipeline_order(comm):
    layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(N)])
    Pipeline(layers, comm, microbatches=1, order=odd(comm, "1f1b", "2f2b"))


def servers(comm):
    ParameterServer(made(), comm, SGD, servers=odd(comm, 1, 9), lr=0.1)


def servers_that_do_not_wait(comm):
    AsyncParameterServer(made(), comm, SGD, staleness=odd(comm, 1, -1), lr=0.1)


def mesh(comm):
    Mesh(comm, dp=odd(comm, 3, 2))


def heads_for_sequence(comm):
    heads = odd(comm, 6, 5)
    q = torch.zeros(1, heads, 2, 4)
    all_to_all_attention(q, q, q, comm)


PREPARING = [
    (ddp_on_another_device, "expected a dense tensor on the CPU"),
    (ddp_without_room, "bucket_cap_mb"),
    (zero_stage, "expected 1, 2 or 3"),
    (zero_optimizer, "LBFGS needs full parameters"),
    (zero_groups, "not trainable parameters"),
    (fsdp_tied, "units cannot share parameters"),
    (fsdp_units, "not a part of the module"),
    (plan_with_a_wrong_name, "unknown module in the plan 'haed'"),
    (heads_that_cannot_be_cut, "7 cannot be divided evenly by 3"),
    (experts, "top_k = 4"),
    (pipeline_order, "unknown order of a pipeline '2f2b'"),
    (servers, "servers = 9"),
    (servers_that_do_not_wait, "staleness = -1"),
    (mesh, "the axes make 2 ranks, the world has 3"),
    (heads_for_sequence, "5 cannot be divided evenly by 3"),
]


@pytest.mark.parametrize(
    ("run", "message"), PREPARING, ids=lambda p: getattr(p, "__name__", "")
)
def test_setup_error_on_one_rank_raises_on_all_and_names_it(refusals, run, message):
    errors = refusals(N, run)
    assert isinstance(errors[CULPRIT], BadArgument)
    assert message in str(errors[CULPRIT])
    for error in errors[:CULPRIT] + errors[CULPRIT + 1 :]:
        assert isinstance(error, CollectiveMismatch)
        assert CULPRIT in error.calls
        assert f"rank {CULPRIT} failed" in str(error)
        assert message in str(error)


def test_other_exceptions_during_setup_raise_on_all_ranks(refusals):
    """An optimizer's own, and a disk's."""
    errors = refusals(N, lambda c: ZeRO(made(), c, SGD, lr=0.1, nesterov=c.rank == 1))
    assert isinstance(errors[1], CollectiveMismatch)  # found before it was made
    errors = refusals(N, lambda c: ZeRO(made(), c, lambda p: SGD(p, lr=c.rank - 1.0)))
    assert isinstance(errors[0], ValueError)
    assert "rank 0 failed: ValueError: Invalid learning rate" in str(errors[2])
    errors = refusals(N, lambda c: save("/dev/null/file", {"x": torch.ones(1)}, c))
    assert isinstance(errors[0], OSError)
    for error in errors[1:]:
        assert "save_checkpoint: rank 0 failed: NotADirectoryError" in str(error)


def test_different_options_raise_on_all_ranks(refusals):
    """All hear which ranks have what."""

    def run(comm):
        DDP(made(), comm, find_unused_parameters=comm.rank == CULPRIT)

    texts = {str(error) for error in refusals(N, run)}
    assert len(texts) == 1
    message = (
        "ranks 0, 2 have find_unused_parameters = False, rank 1 has find_unused_par"
    )
    assert message in texts.pop()
    for wrong in (
        lambda c: ZeRO(made(), c, SGD, lr=odd(c, 0.1, 0.2)),
        lambda c: FSDP(made(), c, units=odd(c, None, [nn.Linear])),
        lambda c: FSDP(made(), c, param_dtype=odd(c, None, torch.bfloat16)),
        lambda c: ParameterServer(made(), c, SGD, servers=odd(c, 1, 2), lr=0.1),
        lambda c: Mesh(c, a=3, b=1, c=1).over("b", odd(c, "a", "c")),
    ):
        for error in refusals(N, wrong):
            assert isinstance(error, CollectiveMismatch)


def test_error_on_one_rank_of_a_mesh_raises_on_all_its_ranks(refusals):
    """The ranks with the same shard, and those with the others: all hear of it."""

    def run(comm):
        grid = Mesh(comm, replicas=2, shards=2)
        tied = Tied(comm.rank == 3)
        FSDP(tied, grid["shards"], replicas=grid["replicas"])

    errors = refusals(4, run)
    assert isinstance(errors[3], BadArgument)
    for error in errors[:3]:
        assert isinstance(error, CollectiveMismatch)
        assert "cannot share parameters" in str(error)


# --- in a step: the others see who, and in a word what


def unused(comm):
    model = DDP(made(Twins), comm)
    model(torch.ones(1, 2), comm.rank != CULPRIT).sum().backward()


def unused_in_zero(comm):
    model = made(Twins)
    ZeRO(model, comm, SGD, lr=0.1)
    model(torch.ones(1, 2), comm.rank != CULPRIT).sum().backward()


def sparse(comm):
    model = DDP(nn.Embedding(3, 2, sparse=comm.rank == CULPRIT), comm)
    model(torch.tensor([1])).sum().backward()


def closure(comm):
    optimizer = ZeRO(made(), comm, SGD, lr=0.1)
    optimizer.step(odd(comm, None, lambda: 1.0))


def closure_at_a_server(comm):
    server = ParameterServer(made(), comm, SGD, lr=0.1)
    server.step(odd(comm, None, lambda: 1.0))


def opaque(comm):
    model = FSDP(Returns(comm.rank == CULPRIT), comm)
    model(torch.ones(1, 2)).sum().backward()


def features(comm):
    model = parallelize(net(), comm, PLAN)
    model.layers[0].mlp[2](torch.zeros(1, odd(comm, 32, 31), dtype=torch.float64))


def words(comm):
    model = parallelize(net(), comm, PLAN)
    model(torch.full((1, LENGTH), odd(comm, 1, 99)))


def targets(comm):
    logits = torch.zeros(2, 3)
    vocabulary_cross_entropy(logits, torch.full((2,), odd(comm, 1, 99)), comm)


def length(comm):
    cut = sequence_plan(PLAN, on_shards=["norm"])
    model = parallelize(net(Placeless), comm, cut)
    model(tokens(0)[0][:, : odd(comm, LENGTH, LENGTH - 1)])


def keys(comm):
    q, k = torch.zeros(1, 2, 4, 2), torch.zeros(1, 2, odd(comm, 4, 6), 2)
    ring_attention(q, k, k, comm)


def gate(comm):
    each = [nn.Linear(2, 2) for _ in range(N)]
    moe = MoE(nn.Linear(2, N), each, comm)
    if comm.rank == CULPRIT:
        moe.gate = nn.Linear(2, N + 1)
    moe(torch.ones(1, 2))


def channels(comm):
    norm = SyncBatchNorm(3, comm)
    norm(torch.ones(4, odd(comm, 3, 2)))


STEPPING = [
    (unused, "2 parameters got no gradient", "unused parameters"),
    (unused_in_zero, "2 parameters got no gradient", "unused parameters"),
    (sparse, "its gradient is sparse", "sparse gradient"),
    (closure, "closures are not supported", "a closure"),
    (closure_at_a_server, "closures are not supported", "a closure"),
    (opaque, "returns a Opaque", "opaque output"),
    (features, "the input has 31 features", "a row's input"),
    (words, "tokens from 99 to 99", "tokens"),
    (targets, "tokens from 99 to 99", "cross entropy"),
    (length, "23 cannot be divided evenly", "sequence length"),
    (keys, "expected all three of one shape", "attention's input"),
    (gate, "the gate scores 4 experts", "the gate"),
    (channels, "the input is [4, 2]", "batch norm's input"),
]


@pytest.mark.parametrize(
    ("run", "own", "message"), STEPPING, ids=[case[0].__name__ for case in STEPPING]
)
def test_error_in_a_step_on_one_rank_raises_on_all_and_names_it(
    refusals, run, own, message
):
    errors = refusals(N, run)
    assert isinstance(errors[CULPRIT], UsageError)
    assert not isinstance(errors[CULPRIT], CollectiveMismatch)
    assert own in str(errors[CULPRIT])
    for error in errors[:CULPRIT] + errors[CULPRIT + 1 :]:
        assert isinstance(error, CollectiveMismatch)
        assert CULPRIT in error.calls
        assert f"for an error: {message}" in error.calls[CULPRIT]


def test_error_on_all_ranks_keeps_the_communicator_usable(threads):
    """Each raises its own error, and they go on."""

    def run(comm):
        model = DDP(made(Twins), comm)
        with pytest.raises(UsageError, match="got no gradient"):
            model(torch.ones(1, 2), False).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        return model.module.one.weight.grad.clone()

    one, two = threads(2, run)
    assert torch.equal(one, two)


def test_gradients_of_different_parameters_are_not_averaged(refusals):
    """Of two that have one shape, a rank has only the second."""

    def run(comm):
        model = PlainDDP(made(Twins), comm)
        model(torch.ones(1, 2)).sum().backward()
        if comm.rank == CULPRIT:
            model.module.one.weight.grad = None
        model.sync()

    for error in refusals(N, run):
        assert isinstance(error, CollectiveMismatch)
        assert "one.weight" in str(error)
        assert "one.bias" in str(error)


# --- where ranks wait for messages, and not for calls


def test_failed_pipeline_stage_is_lost_to_the_others(refusals):
    def run(comm):
        layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(N)])
        pipe = Pipeline(layers, comm, microbatches=2)
        if comm.rank == CULPRIT:
            pipe.layers["1"] = nn.Linear(3, 2)  # which does not fit
        pipe.step(torch.ones(2, 2), torch.ones(2, 2), functional.mse_loss)

    errors = refusals(N, run)
    assert isinstance(errors[CULPRIT], RuntimeError)  # torch's own
    for error in errors[:CULPRIT] + errors[CULPRIT + 1 :]:
        assert isinstance(error, PeerLost)
        assert error.ranks == (CULPRIT,)


def test_failed_async_worker_is_lost_to_the_others(refusals):
    def run(comm):
        model = made(Mlp)
        with AsyncParameterServer(model, comm, SGD, lr=0.1) as server:
            if server.serving:
                server.serve()
            if comm.rank == CULPRIT:
                raise ValueError("no more data")
            for _ in range(1000):
                model(torch.ones(1, 5)).sum().backward()
                server.step()

    errors = refusals(2, run)
    assert isinstance(errors[CULPRIT], ValueError)
    assert isinstance(errors[0], PeerLost)
    assert errors[0].ranks == (CULPRIT,)


def test_units_used_a_different_number_of_times_are_detected(refusals):
    """Forward is called once more on a rank."""

    def run(comm):
        model = FSDP(made(Gpt), comm)
        for _ in range(1 + (comm.rank == CULPRIT)):
            model(torch.zeros(1, 8, dtype=torch.int64))
        comm.barrier(label="the end")

    for error in refusals(2, run):
        assert isinstance(error, CollectiveMismatch)
        assert "forward, even step" in str(error)
        assert "the end" in str(error)
