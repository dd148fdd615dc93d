"""UNISONO_TORCH_REPLACES=gloo, in every way in which a program gets gloo."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import expect, store_of
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from unisono.interop.torch import NAME, REPLACES, register
from unisono.interop.torch.process_group import UnisonoProcessGroup
from unisono.interop.torch.replacement import replaced

ASKED = {
    "gloo": "unisono",
    "GLOO": "unisono",
    "cpu:gloo": "unisono",
    "cpu:gloo,cuda:gloo": "unisono",
    "cpu:gloo,cuda:nccl": "cpu:unisono,cuda:nccl",
    "cuda:nccl,cpu:gloo": "cuda:nccl,cpu:unisono",
    "xpu:xccl,cpu:gloo": "xpu:xccl,cpu:unisono",
    "undefined": "unisono",
    "nccl": "nccl",
    "cuda:nccl": "cuda:nccl",
    "unisono": "unisono",
}


@pytest.mark.parametrize("asked", ASKED)
def test_gloo_is_replaced_in_every_spelling(asked):
    assert replaced(c10d, asked, "gloo") == ASKED[asked]


def test_default_of_an_accelerator_is_left(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    assert replaced(c10d, "undefined", "gloo") == "undefined"
    assert replaced(c10d, "undefined", "nccl") == "unisono"


def ours(of=None):
    """Whether a group is ours, and works."""
    made = of or dist.group.WORLD
    assert isinstance(made, UnisonoProcessGroup), made
    assert dist.get_backend(made) == "unisono"
    x = torch.ones(3)
    dist.all_reduce(x, group=made)
    expect(x, torch.full((3,), float(made.size())))


def every_way(rank):
    os.environ[REPLACES] = "gloo"
    delattr(dist.Backend, NAME.upper())  # as if torch had just been imported
    register()
    # As under torchrun: the store is there, and its place is in the environment.
    store = store_of(rank, "tcp")
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "RANK": str(rank.number),
        "WORLD_SIZE": str(rank.n),
    }
    ways = (
        dist.init_process_group,
        lambda: dist.init_process_group("gloo"),
        lambda: dist.init_process_group(dist.Backend.GLOO, timeout=timedelta(days=1)),
        lambda: dist.init_process_group(dist.get_default_backend_for_device("cpu")),
        lambda: dist.init_process_group(
            "gloo", pg_options=dist.ProcessGroupGloo._Options()
        ),
        lambda: dist.init_process_group("cpu:gloo,cuda:gloo"),
        lambda: init_device_mesh("cpu", (2,)),
    )
    for way in ways:
        way()
        ours()
        dist.monitored_barrier()
        dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)
        # Lightning's, which never times out
        ours(dist.new_group(backend="gloo", timeout=timedelta(days=10_000)))
        ours(dist.new_group([0, 1], use_local_synchronization=True))
        ours(dist.new_subgroups(1, backend="gloo")[0])
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        ours(mesh.get_group("a"))
        ours(mesh.get_group("b"))
        dist.destroy_process_group()
    return True


def test_every_way_to_gloo_leads_to_us(ranks):
    assert ranks(2, every_way) == [True, True]
