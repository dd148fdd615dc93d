"""Every strategy in every way of use: the losses of one process with all batches."""

import contextlib
import functools

import pytest
import torch
from nets import Gpt, batch, loss_of, made, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

from unisono.parallel import DDP, FSDP, ParameterServer, PlainDDP, ZeRO, clip_grad_norm_

STEPS, CLIP = 20, 0.1
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""How far sums in another order may take the losses of 20 steps, relatively."""
USES = {
    "plain": ("accumulation", "clipping", "checkpointing"),
    "ddp": ("accumulation", "clipping", "checkpointing", "no_sync"),
    "zero1": ("accumulation", "clipping", "checkpointing", "no_sync"),
    "zero2": ("accumulation", "clipping", "checkpointing"),
    "zero3": ("accumulation", "clipping", "checkpointing", "no_sync"),
    "fsdp": ("accumulation", "clipping", "checkpointing", "no_sync"),
    "server": ("accumulation", "clipping", "checkpointing"),
}


class Recomputing(Gpt):
    """Keeps the inputs of its blocks only, and computes them again in backward."""

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def passes_of(use):
    return 2 if use in ("accumulation", "no_sync") else 1


@functools.cache
def alone(n, dtype, passes, clips):
    """The losses of n ranks' batches in each step, by one process."""
    net = made(Gpt).to(dtype)
    opt = sgd(net.parameters())
    losses = []
    for step in range(STEPS):
        opt.zero_grad()
        mine = []
        for rank in range(n):
            for i in range(passes):
                x, y = batch(Gpt, passes * step + i, rank)
                loss = loss_of(net(x), y)
                (loss / n).backward()
            mine.append(loss.item())
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        opt.step()
        losses.append(mine)
    return losses


class Strategy:
    """One interface for all: call, what follows backward, and the optimizer."""

    def __init__(self, name, net, comm):
        options = {"lr": 0.05, "momentum": 0.9}
        self.sync = lambda: None
        if name.startswith("zero"):
            stage = int(name[-1])
            self.opt = ZeRO(net, comm, torch.optim.SGD, stage=stage, **options)
            self.call, self.clip = net, self.opt.clip_grad_norm_
            self.no_sync = self.opt.no_sync
        elif name == "server":
            self.opt = ParameterServer(net, comm, torch.optim.SGD, **options)
            self.call, self.clip = net, self.opt.clip_grad_norm_
        else:
            model = {"plain": PlainDDP, "ddp": DDP, "fsdp": FSDP}[name](net, comm)
            self.call, self.opt = model, sgd(model.parameters())
            if name == "plain":
                self.sync = model.sync
                self.clip = functools.partial(clip_grad_norm_, list(net.parameters()))
            else:
                self.clip, self.no_sync = model.clip_grad_norm_, model.no_sync


def train(comm, name, use, dtype):
    kind = Recomputing if use == "checkpointing" else Gpt
    run = Strategy(name, made(kind).to(dtype), comm)
    passes, losses = passes_of(use), []
    for step in range(STEPS):
        run.opt.zero_grad()
        for i in range(passes):
            waits = use == "no_sync" and i < passes - 1
            with run.no_sync() if waits else contextlib.nullcontext():
                x, y = batch(Gpt, passes * step + i, comm.rank)
                loss = loss_of(run.call(x), y)
                loss.backward()
        run.sync()
        if use == "clipping":
            run.clip(CLIP)
        run.opt.step()
        losses.append(loss.item())
    return losses


def test_clipping_changes_the_losses():
    """So that a strategy that does not clip is found out."""
    plain, clipped = (alone(2, torch.float32, 1, clips) for clips in (False, True))
    assert plain[-1] != pytest.approx(clipped[-1], rel=2 * LIMITS[torch.float32])


@pytest.mark.sweep
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("name", "use"), [(name, use) for name, uses in USES.items() for use in uses]
)
def test_losses_of_20_steps_are_those_of_one_process(threads, n, name, use, dtype):
    right = alone(n, dtype, passes_of(use), use == "clipping")
    for rank, mine in enumerate(threads(n, train, name, use, dtype)):
        wanted = [step[rank] for step in right]
        assert mine == pytest.approx(wanted, rel=LIMITS[dtype])
