"""A rank is killed during training: the others name it, and fewer ranks continue."""

import os
import signal

import pytest
import torch
from nets import Gpt, batch, loss_of, made, train

import unisono
from unisono.parallel import FSDP, ZeRO
from unisono.parallel import load_checkpoint as load
from unisono.parallel import save_checkpoint as save

LAST = 4


def wrapped(name, comm):
    """The module to call, and what steps it."""
    net = made(Gpt)
    if name == "zero2":
        how = {"lr": 0.1, "reproducible": True}
        return net, ZeRO(net, comm, torch.optim.SGD, stage=2, **how)
    model = FSDP(net, comm, reproducible=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def struck(rank, name, file):
    """Train and save; one is killed during backward, the others tell whom they miss."""
    torch.set_num_threads(1)
    comm = rank.init(timeout_s=60)
    model, opt = wrapped(name, comm)
    for step in range(10):
        try:
            save(file, model.state_dict(), comm)  # who is slow may hear of it in here
            if step == LAST and rank.number == 1:
                inside = (model if name == "zero2" else model.module).blocks[1]
                inside.register_full_backward_hook(
                    lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                )
            train(comm, model, opt, Gpt, steps=1, first=step)
        except unisono.PeerLost as error:
            return step, list(error.ranks)
    return None


def resumed(rank, file):
    torch.set_num_threads(1)
    with rank.init(timeout_s=60) as comm:
        model = FSDP(made(Gpt, seed=3), comm, reproducible=True)
        model.load_state_dict(load(file))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        return train(comm, model, opt, Gpt, steps=4, first=LAST)


def curve():
    """The losses of one process: three ranks' batches, from LAST on those of two."""
    net = made(Gpt)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(LAST + 4):
        n = 3 if step < LAST else 2
        opt.zero_grad()
        mine = []
        for rank in range(n):
            x, y = batch(Gpt, step, rank)
            loss = loss_of(net(x), y)
            mine.append(loss.item())
            (loss / n).backward()
        opt.step()
        losses.append(mine)
    return losses[LAST:]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["zero2", "fsdp"])
def test_killed_rank_is_named_and_fewer_ranks_continue(
    forks, processes, tmp_path, name
):
    file = str(tmp_path / "model.safetensors")
    ends = forks.run(3, struck, name, file)
    assert ends[1].status == -signal.SIGKILL
    assert ends[0].value == ends[2].value == [LAST, [1]]
    found = processes(2, resumed, file)
    for step, right in enumerate(curve()):
        assert [losses[step] for losses in found] == pytest.approx(right, rel=1e-5)
