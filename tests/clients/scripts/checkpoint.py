"""A checkpoint of FSDP2 by torch's DCP: `checkpoint.py FOLDER PHASE` at any size.

Every phase but the first loads what the one before has saved. Each takes two steps.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

folder, phase = sys.argv[1], int(sys.argv[2])
device = os.environ.get("CLIENT_DEVICE", "cpu")
init_device_mesh(device, (int(sys.argv[3]),))
torch.manual_seed(phase)  # what is loaded must not be there already
model = torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.Linear(50, 6)).to(device)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def step() -> float:
    # The same rows on all ranks: the number of ranks does not change the result.
    x = torch.arange(12.0, device=device).reshape(2, 6) / 12
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


if phase > 0:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load(
        {"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{phase - 1}"
    )
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
losses = [step() for _ in range(2)]
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{phase}")
if dist.get_rank() == 0:
    print("result", *losses)
dist.destroy_process_group()
