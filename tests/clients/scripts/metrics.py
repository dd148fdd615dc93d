"""torchmetrics: a metric whose state is summed over all ranks, and one that gathers."""

import os

import torch
import torch.distributed as dist
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

device = os.environ.get("CLIENT_DEVICE", "cpu")
dist.init_process_group("gloo" if device == "cpu" else "nccl")
rank = dist.get_rank()
torch.manual_seed(rank)
guess, truth = torch.rand(40 + rank, 4), torch.randint(4, (40 + rank,))
guess, truth = guess.to(device), truth.to(device)
metrics = MulticlassAccuracy(4), BinaryAUROC(), MeanMetric()
accuracy, area, mean = (metric.to(device) for metric in metrics)
accuracy.update(guess, truth)
area.update(guess[:, 0], (truth == 0).int())  # gathers rows, not the same on each rank
mean.update(guess.sum())
values = [metric.compute().item() for metric in (accuracy, area, mean)]
if rank == 0:
    print("result", *values)
dist.destroy_process_group()
