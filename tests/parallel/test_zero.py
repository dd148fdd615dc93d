"""The stages of ZeRO: results against one process, bytes sent, and memory."""

import pytest
import torch
from nets import (
    NS,
    Gpt,
    Mlp,
    adam,
    alone,
    batch,
    loss_of,
    made,
    same,
    sgd,
    train,
    weights,
)
from torch import nn

from unisono.errors import BadArgument, CollectiveMismatch, UsageError
from unisono.parallel import ZeRO

STAGES = [1, 2, 3]
TINY = 0.0005
SGD = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
ADAM = (torch.optim.AdamW, {"lr": 1e-2})


def run(comm, kind, stage, how=SGD, clip=None, steps=20):
    net = made(kind, seed=comm.rank)
    maker, options = how
    opt = ZeRO(
        net,
        comm,
        maker,
        stage=stage,
        reproducible=True,
        bucket_cap_mb=TINY,
        **options,
    )
    after = (lambda: opt.clip_grad_norm_(clip)) if clip else (lambda: None)
    losses = train(comm, net, opt, kind, steps=steps, after=after)
    return losses, opt.model_state_dict()


@pytest.mark.cases(1)
@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("stage", STAGES)
def test_zero_has_the_bits_of_one_process(threads, n, stage):
    losses, right = alone(Gpt, n)
    for rank, (mine, found) in enumerate(threads(n, run, Gpt, stage)):
        assert mine == [step[rank] for step in losses]
        same(found, right)


OPTIMIZERS = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]


@pytest.mark.quick(name=["Adam", "SGD"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_elementwise_optimizers_equal_one_process(threads, name):
    maker = getattr(torch.optim, name)
    _, right = alone(Mlp, 3, steps=5, optimizer=lambda p: maker(p, lr=1e-3))
    found = threads(3, run, Mlp, 2, (maker, {"lr": 1e-3}), None, 5)
    for _, one in found:
        same(one, right, 1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_zero_clips_by_the_norm_of_the_whole_model(threads, stage):
    _, right = alone(Mlp, 3, clip=0.05)
    for _, found in threads(3, run, Mlp, stage, SGD, 0.05):
        same(found, right, 1e-5)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("stage", STAGES)
def test_zero_sends_the_bytes_of_the_formula(threads, n, stage):
    """2(n-1)/n of P in stages 1 and 2, 3(n-1)/n in stage 3, to the element."""

    def sent(comm):
        net = made(Gpt)
        opt = ZeRO(net, comm, *SGD[:1], stage=stage, lr=0.1)
        train(comm, net, opt, Gpt, steps=1)
        before = comm.sent_bytes
        train(comm, net, opt, Gpt, steps=1)
        parts = (
            [u.count for u in opt._sharding.units]
            if stage == 3
            else [b.count for b in opt._sharding.buckets.buckets]
        )
        return comm.sent_bytes - before, parts

    total = sum(p.numel() for p in made(Gpt).parameters())
    for rank, (found, parts) in enumerate(threads(n, sent)):
        assert sum(parts) == total
        gathers = 2 if stage == 3 else 1
        right = 0
        for size in parts:
            mine = size // n + (rank < size % n)
            right += gathers * (n - 1) * mine + size - mine
        assert found == 4 * right


def held(tensors):
    """Bytes of the memory behind these tensors."""
    behind = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in behind.values())


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("stage", STAGES)
def test_zero_has_the_memory_of_the_formula(threads, n, stage):
    def measure(comm):
        net = made(Gpt)
        opt = ZeRO(net, comm, torch.optim.AdamW, stage=stage, lr=1e-3)
        train(comm, net, opt, Gpt, steps=2)
        params = held([*net.parameters(), *(p.param for p in opt.local_shards)])
        grads = held([p.param.grad for p in opt.local_shards])
        if stage == 1:
            grads += held([b.data for b in opt._sharding.buckets.buckets])
        moments = held([v for s in opt.state.values() for v in s.values() if v.ndim])
        return params, grads, moments

    p = 4 * sum(p.numel() for p in made(Gpt).parameters())
    for params, grads, moments in threads(n, measure):
        assert params == pytest.approx(p / n if stage == 3 else p, rel=0.1)
        shard = p / n
        assert grads == pytest.approx(p + shard if stage == 1 else shard, rel=0.1)
        assert moments == pytest.approx(2 * p / n, rel=0.1)


@pytest.mark.parametrize("stages", [(1, 3), (2, 2), (3, 1)])
def test_state_loads_in_another_world_size_and_stage(threads, stages):
    """Ten steps on 3 ranks, then ten on 2, as one process would go on."""
    before, after = stages

    def first(comm):
        net = made(Mlp)
        opt = ZeRO(net, comm, ADAM[0], stage=before, **ADAM[1], reproducible=True)
        train(comm, net, opt, Mlp, steps=10)
        return opt.model_state_dict(), opt.state_dict()

    model, state = threads(3, first)[0]
    assert set(state["state"]) == set(model)
    assert state["state"]["first.weight"]["exp_avg"].shape == (11, 5)

    def then(comm):
        net = made(Mlp, seed=9)
        opt = ZeRO(net, comm, ADAM[0], stage=after, lr=9.0, reproducible=True)
        opt.load_model_state_dict(model)
        opt.load_state_dict(state)
        assert opt.param_groups[0]["lr"] == 1e-2
        train(comm, net, opt, Mlp, steps=10, first=10)
        return opt.model_state_dict()

    net = made(Mlp)
    opt = adam(net.parameters())
    for step in range(20):
        n = 3 if step < 10 else 2
        opt.zero_grad()
        for rank in range(n):
            x, y = batch(Mlp, step, rank)
            (loss_of(net(x), y) / n).backward()
        opt.step()
    for found in threads(2, then):
        same(found, weights(net), 1e-5)


def test_groups_schedulers_and_accumulation_equal_one_process(threads):
    def run(comm):
        net = made(Mlp)
        groups = [
            {"params": [net.first.weight, net.last.weight], "lr": 0.1},
            {"params": [net.middle.weight, net.norm.weight]},
            {
                "params": [
                    p
                    for p in net.parameters()
                    if p.ndim == 1 and p is not net.norm.weight
                ]
            },
        ]
        opt = ZeRO(net, comm, torch.optim.SGD, groups=groups, lr=0.01, stage=2)
        return stepped(net, opt, range(comm.world_size)[comm.rank :: comm.world_size])

    def stepped(net, opt, ranks, scale=1.0):
        schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        for step in range(6):
            opt.zero_grad()
            for i in range(2):
                for rank in ranks:
                    x, y = batch(Mlp, 2 * step + i, rank)
                    (loss_of(net(x), y) * scale).backward()
            opt.step()
            schedule.step()
        return weights(net)

    net = made(Mlp)
    right = stepped(
        net,
        torch.optim.SGD(
            [
                {"params": [net.first.weight, net.last.weight], "lr": 0.1},
                {
                    "params": [
                        p
                        for n, p in net.named_parameters()
                        if n not in ("first.weight", "last.weight")
                    ]
                },
            ],
            lr=0.01,
        ),
        [0, 1],
        0.5,
    )
    for found in threads(2, run):
        same(found, right, 1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_no_sync_accumulates_without_sending(threads, stage):
    def run(comm):
        net = made(Mlp)
        opt = ZeRO(net, comm, SGD[0], stage=stage, reproducible=True, **SGD[1])
        for step in range(5):
            opt.zero_grad()
            with opt.no_sync():
                x, y = batch(Mlp, 2 * step, comm.rank)
                loss_of(net(x), y).backward()
            x, y = batch(Mlp, 2 * step + 1, comm.rank)
            loss_of(net(x), y).backward()
            opt.step()
        return opt.model_state_dict()

    for found in threads(3, run):
        same(found, alone(Mlp, 3, steps=5, passes=2, optimizer=sgd)[1])


# --- what cannot be


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "SparseAdam"])
def test_optimizers_that_need_full_parameters_are_refused(threads, name):
    with pytest.raises(BadArgument, match=f"{name} needs full parameters"):
        threads(2, lambda c: ZeRO(made(Mlp), c, getattr(torch.optim, name)))


@pytest.mark.parametrize("stage", STAGES)
def test_closures_are_refused(threads, stage):
    def run(comm):
        opt = ZeRO(made(Mlp), comm, torch.optim.SGD, stage=stage, lr=0.1)
        with pytest.raises(UsageError, match="closures are not supported"):
            opt.step(lambda: 0.0)

    threads(1, run)


def test_wrong_stages_and_groups_are_refused(threads):
    def run(comm):
        with pytest.raises(BadArgument, match="expected 1, 2 or 3"):
            ZeRO(made(Mlp), comm, torch.optim.SGD, stage=4, lr=0.1)
        with pytest.raises(BadArgument, match="1 tensors that are not"):
            ZeRO(
                made(Mlp),
                comm,
                torch.optim.SGD,
                lr=0.1,
                groups=[{"params": [nn.Parameter(torch.ones(1))]}],
            )
        opt = ZeRO(made(Mlp), comm, torch.optim.SGD, stage=2, lr=0.1)
        with pytest.raises(UsageError, match="stage 2 keeps no full"), opt.no_sync():
            pass
        with pytest.raises(BadArgument, match="the state has groups"):
            opt.load_state_dict({"state": {}, "param_groups": [{"params": ["x"]}]})

    threads(1, run)


def test_different_modules_on_zero_ranks_are_named(threads):
    with pytest.raises(CollectiveMismatch, match=r"rank 1 has weight: float32\[3, 2\]"):
        threads(2, lambda c: ZeRO(nn.Linear(2, 2 + c.rank), c, torch.optim.SGD, lr=1))
