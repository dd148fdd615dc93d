"""Pipelines on our ranks: the losses and gradients that one process would get."""

import pytest
import torch
from ranks import close, group
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
WIDTH, MICROBATCHES = 6, 4


def layers(n):
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n)]


def loss(out, wanted):
    return ((out - wanted) ** 2).sum()


def pipelined(rank, name):
    n, me = rank.n, rank.number
    with group(rank):
        mine, right = layers(n)[me], nn.Sequential(*layers(n))
        made = torch.Generator().manual_seed(9)
        x = torch.randn(8, WIDTH, generator=made)
        wanted = torch.randn(8, WIDTH, generator=made)
        stage = PipelineStage(mine, me, n, torch.device("cpu"))
        schedule = SCHEDULES[name](
            stage, n_microbatches=MICROBATCHES, loss_fn=loss, scale_grads=False
        )
        for _ in range(2):
            mine.zero_grad()
            losses = []
            if me == 0:
                schedule.step(x)
            elif me == n - 1:
                out = schedule.step(target=wanted, losses=losses)
                close([out], [right(x)])
                close([sum(losses)], [loss(right(x), wanted)], 1e-5)
            else:
                schedule.step()
        loss(right(x), wanted).backward()
        grads = [p.grad for p in mine.parameters()]
        close(grads, [p.grad for p in right[me].parameters()], 1e-5)


@pytest.mark.quick(n=[2])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("n", [2, 3])
def test_pipeline_schedules_equal_one_process(ranks, n, name):
    ranks(n, pipelined, name)
