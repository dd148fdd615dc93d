"""torch's pipelines on our ranks: losses and gradients as one process has them."""

import torch
from ranks import close
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as made_by_torch

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}
"""How many stages a rank has."""
SHAPED_AS_V = ("ZBVZeroBubble",)
"""The first rank has the first and the last stage."""
WIDTH, MICROBATCHES, STEPS = 6, 4, 2


def layers(n):
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n)]


def loss(out, wanted):
    return ((out - wanted) ** 2).sum()


def stages_of(name, rank, n):
    """The numbers of the stages that a rank has."""
    each = SCHEDULES[name]
    if name in SHAPED_AS_V:
        return [rank, each * n - 1 - rank]
    return [rank + n * i for i in range(each)]


def pipelined(rank, name, device):
    """Some steps of a schedule, each compared with one process; its last losses."""
    total, numbers = rank.n * SCHEDULES[name], stages_of(name, rank.number, rank.n)
    parts = layers(total)
    mine = nn.ModuleList(parts[k] for k in numbers).to(device)
    right = nn.Sequential(*layers(total)).to(device)
    made = torch.Generator().manual_seed(9)
    x = torch.randn(8, WIDTH, generator=made).to(device)
    wanted = torch.randn(8, WIDTH, generator=made).to(device)
    stages = [
        PipelineStage(part, k, total, torch.device(device))
        for part, k in zip(mine, numbers, strict=True)
    ]
    schedule = getattr(made_by_torch, f"Schedule{name}")(
        stages[0] if SCHEDULES[name] == 1 else stages,
        n_microbatches=MICROBATCHES,
        loss_fn=loss,
        scale_grads=False,
    )
    given = (x,) if 0 in numbers else ()
    for _ in range(STEPS):
        mine.zero_grad()
        losses = []
        if total - 1 in numbers:
            out = schedule.step(*given, target=wanted, losses=losses)
            close([out], [right(x)], 1e-5)
            close([sum(losses)], [loss(right(x), wanted)], 1e-5)
        else:
            schedule.step(*given)
    loss(right(x), wanted).backward()
    for part, k in zip(mine, numbers, strict=True):
        found = [p.grad for p in part.parameters()]
        close(found, [p.grad for p in right[k].parameters()], 1e-5)
