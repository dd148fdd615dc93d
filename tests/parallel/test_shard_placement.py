"""Placements of sharded parameters, and that parameters are not replaced."""

import pytest
import torch
from nets import Mlp, made, same
from sharded_nets import PLAN, Net, net
from torch import nn

from unisono.errors import UsageError
from unisono.parallel import (
    DDP,
    FSDP,
    MoE,
    OneBitAdam,
    Pipeline,
    ZeRO,
    load_whole_state,
    parallelize,
    whole_state,
)
from unisono.parallel.common.placement import placements_of


def ddp(comm):
    return DDP(made(Mlp), comm)


def inside_ddp(comm):
    return DDP(made(Mlp), comm).module


def zero(comm):
    model = made(Mlp)
    ZeRO(model, comm, torch.optim.SGD, stage=2)
    return model


def fsdp(comm):
    return FSDP(made(Mlp), comm)


def cut(comm):
    return parallelize(net(Net), comm, PLAN)


def part_of_a_cut_one(comm):
    return parallelize(net(Net), comm, PLAN).layers[0].qkv


def below_another_module(comm):
    return nn.Sequential(parallelize(net(Net), comm, PLAN))


def experts(comm):
    return MoE(nn.Linear(4, 2), [nn.Linear(4, 4) for _ in range(2)], comm, top_k=1)


def pipeline(comm):
    return Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), comm, microbatches=1
    )


def onebit(comm):
    model = made(Mlp)
    OneBitAdam(model, comm)
    return model


STRATEGIES = [
    *(ddp, inside_ddp, zero, fsdp, cut, part_of_a_cut_one),
    *(below_another_module, experts, pipeline, onebit),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_load_state_dict_with_assign_is_refused(threads, strategy):
    def run(comm):
        model = strategy(comm)
        before = {name: id(p) for name, p in model.named_parameters()}
        state = dict(model.state_dict())
        with pytest.raises(UsageError, match=r"assign=True.*leave assign out"):
            model.load_state_dict(state, assign=True)
        assert {name: id(p) for name, p in model.named_parameters()} == before
        model.load_state_dict(state)

    threads(2, run)


def test_placements_stay_when_a_state_is_loaded(threads):
    def run(comm):
        model = cut(comm)
        state = whole_state(model)
        load_whole_state(model, state)
        model.load_state_dict(model.state_dict())
        model.to(torch.float32).to(torch.float64)
        assert placements_of(model.layers[0].qkv.weight)[0].comm is comm
        same(whole_state(model), state, 1e-6)

    threads(2, run)
