"""Data parallel strategies on ranks without shared memory have the same bits."""

import pytest
import torch
from nets import Gpt, alone, made, same, sgd, train, weights

from unisono.parallel import DDP, FSDP, Mesh, ZeRO
from unisono.testing import world_across


def trained(comm):
    """DDP, ZeRO and FSDP, one after the other, and the mesh's axes."""
    torch.set_num_threads(1)
    found = []
    net = made(Gpt, seed=comm.rank)
    model = DDP(net, comm, bucket_cap_mb=0.0005, reproducible=True)
    train(comm, model, sgd(model.parameters()), Gpt, steps=4)
    found.append(weights(net))
    net = made(Gpt, seed=comm.rank)
    how = {"lr": 0.05, "momentum": 0.9, "stage": 2, "reproducible": True}
    train(comm, net, ZeRO(net, comm, torch.optim.SGD, **how), Gpt, steps=4)
    found.append(weights(net))
    model = FSDP(made(Gpt, seed=comm.rank), comm, reproducible=True)
    train(comm, model, sgd(model.parameters()), Gpt, steps=4)
    found.append(model.state_dict())
    with Mesh(comm, dp=-1, tp=1) as mesh:
        return found, mesh["dp"].world_size, comm.hosts


@pytest.mark.sweep
def test_strategies_have_the_same_bits_on_any_hosts(monkeypatch):
    hosts = [2, 1]
    monkeypatch.setenv("PYTHONPATH", __file__.rpartition("/")[0], prepend=":")
    _, right = alone(Gpt, sum(hosts), steps=4)
    for found, size, numbers in world_across(hosts, timeout_s=180).run(trained):
        assert size == sum(hosts)
        assert len(set(numbers)) == len(hosts)
        for one in found:
            same(one, right)
