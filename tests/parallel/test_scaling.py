"""torch.amp.GradScaler: if one rank has an overflow, all ranks skip the step."""

import pytest
import torch
from nets import Mlp, batch, device, loss_of, made, same, weights
from sharded_nets import PLAN, Net, net, tokens

from unisono.errors import CollectiveMismatch
from unisono.parallel import (
    DDP,
    FSDP,
    Mesh,
    OneBitAdam,
    ZeRO,
    parallelize,
    vocabulary_cross_entropy,
    whole_state,
)

STEPS, SKIPPED = 3, 1
SGD = {"lr": 0.05, "momentum": 0.9}


class Sharded:
    """A strategy on the small net: forward, its optimizer and the whole weights."""

    def __init__(self, comm, name):
        self.comm, inner = comm, made(Mlp)
        if name == "fsdp":
            self.model = FSDP(inner, comm)
            self.opt = torch.optim.SGD(self.model.parameters(), **SGD)
            self.weights = self.model.state_dict
        elif name == "fused":
            self.model = FSDP(inner, comm)
            self.opt = torch.optim.AdamW(self.model.parameters(), fused=True)
            self.weights = self.model.state_dict
        elif name == "ddp":
            self.model = DDP(inner, comm)
            self.opt = torch.optim.SGD(self.model.parameters(), **SGD)
            self.weights = inner.state_dict
        elif name == "onebit":
            self.model, self.opt = inner, OneBitAdam(inner, comm, warmup=1)
            self.weights = inner.state_dict
        else:
            self.model = inner
            self.opt = ZeRO(inner, comm, torch.optim.SGD, stage=int(name[-1]), **SGD)
            self.weights = self.opt.model_state_dict

    def backward(self, step, scaler):
        x, y = batch(Mlp, step, self.comm.rank)
        scaler.scale(loss_of(self.model(x), y)).backward()

    def overflow(self):
        """In the last part of what this rank has."""
        grads = [p.grad for g in self.opt.param_groups for p in g["params"]]
        next(g for g in grads if g.numel()).view(-1)[-1] = float("inf")


class CutAndSharded:
    """Layers cut over tp, and what is left of them sharded over dp."""

    def __init__(self, comm, mesh):
        self.tp, inner = mesh["tp"], parallelize(net(Net), mesh["tp"], PLAN)
        self.opt = ZeRO(inner, mesh["dp"], torch.optim.SGD, stage=2, **SGD)
        self.model, self.replica = inner, mesh.coordinates["dp"]

    def weights(self):
        return whole_state(self.model)

    def backward(self, step, scaler):
        x, y = tokens(step, self.replica)
        loss = vocabulary_cross_entropy(self.model(x), y, self.tp)
        scaler.scale(loss).backward()

    overflow = Sharded.overflow


def learn(comm, run, first, overflows=True):
    """The scale after each step, and whether it changed the weights; at last these."""
    scaler = torch.amp.GradScaler(device(), init_scale=1024.0)
    history = []
    for step in range(STEPS):
        before = weights_of(run)
        run.opt.zero_grad()
        run.backward(step, scaler)
        if overflows and step == SKIPPED and comm.rank == 0:
            run.overflow()
        if first == "unscale_":
            scaler.unscale_(run.opt)
        scaler.step(run.opt)
        scaler.update()
        after = weights_of(run)
        moved = any(not torch.equal(before[k], after[k]) for k in after)
        history.append((scaler.get_scale(), moved))
    return history, after


def weights_of(run):
    return {name: value.detach().clone() for name, value in run.weights().items()}


RIGHT = [(1024.0, True), (512.0, False), (512.0, True)]


@pytest.mark.parametrize("first", ["unscale_", "step"])
@pytest.mark.parametrize("name", ["fsdp", "fused", "zero1", "zero2", "zero3", "onebit"])
def test_all_ranks_skip_if_one_has_an_overflow(threads, name, first):
    found = threads(3, lambda comm: learn(comm, Sharded(comm, name), first))
    for history, state in found:
        assert history == RIGHT
        same(state, found[0][1])


def test_all_ranks_of_a_mesh_skip_if_one_has_an_overflow(threads):
    def run(comm):
        with Mesh(comm, dp=2, tp=2) as mesh:
            return learn(comm, CutAndSharded(comm, mesh), "step")

    found = threads(4, run)
    for history, state in found:
        assert history == RIGHT
        same(state, found[0][1])


def test_tensor_parallel_ranks_skip_if_one_has_an_overflow(threads):
    def run(comm):
        with Mesh(comm, tp=2) as mesh:
            return learn(comm, Cut(comm, mesh), "step")

    class Cut(CutAndSharded):
        def __init__(self, comm, mesh):
            self.tp, self.replica = mesh["tp"], 0
            self.model = parallelize(net(Net), self.tp, PLAN)
            self.opt = torch.optim.SGD(self.model.parameters(), **SGD)

    for history, _ in threads(2, run):
        assert history == RIGHT


def test_overflow_in_one_batch_reaches_all_ranks_by_the_mean(threads):
    """DDP needs no agreement: gradients are the same on all ranks."""

    class Flooded(Sharded):
        def backward(self, step, scaler):
            x, y = batch(Mlp, step, self.comm.rank)
            if step == SKIPPED and self.comm.rank == 1:
                x = x * float("inf")
            scaler.scale(loss_of(self.model(x), y)).backward()

        def overflow(self):
            pass

    for history, _ in threads(2, lambda c: learn(c, Flooded(c, "ddp"), "step")):
        assert history == RIGHT


def test_scaler_without_overflow_changes_nothing(threads):
    def run(comm):
        scaled = learn(comm, Sharded(comm, "fsdp"), "step", overflows=False)
        plain = Sharded(comm, "fsdp")
        for step in range(STEPS):
            plain.opt.zero_grad()
            plain.backward(step, torch.amp.GradScaler("cpu", enabled=False))
            plain.opt.step()
        same(scaled[1], weights_of(plain), 1e-6)
        return scaled[0]

    assert threads(2, run) == [[(1024.0, True)] * STEPS] * 2


def test_optimizers_without_shards_are_not_affected():
    inner = made(Mlp)
    opt = torch.optim.SGD(inner.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch(Mlp, 0, 0)
    scaler.scale(loss_of(inner(x), y)).backward()
    before = weights(inner)
    inner.last.bias.grad[0] = float("nan")
    scaler.step(opt)
    scaler.update()
    same(weights(inner), before)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "fsdp"])
def test_step_skipped_on_one_rank_is_explained(refusals, name):
    def run(comm):
        rank = Sharded(comm, name)
        for step in range(3):
            rank.backward(step, torch.amp.GradScaler("cpu", enabled=False))
            if step != 1 or comm.rank != 0:
                rank.opt.step()

    for error in refusals(2, run):
        assert isinstance(error, CollectiveMismatch)
        assert "some ranks have made an optimizer step that others" in str(error)
        assert error.calls
