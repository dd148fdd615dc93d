"""A worker is killed in the middle of training; torchrun starts all of them again."""

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(6):
    if first and number == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(torch.ones(4, 10) * dist.get_rank()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print("result", next(model.parameters()).sum().item())
dist.destroy_process_group()
