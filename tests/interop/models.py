"""Small models, and how they are trained: what the training tests compare."""

import torch
import torch._dynamo  # which DDP imports when it is first called
from torch import nn

STEPS = 3


class Mlp(nn.Module):
    """Three layers, and one that some calls leave out."""

    def __init__(self, width=16):
        super().__init__()
        self.a = nn.Linear(8, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 4)
        self.spare = nn.Linear(width, width)

    def forward(self, x, spare=False):
        x = torch.tanh(self.a(x))
        x = torch.tanh(self.spare(x) if spare else self.b(x))
        return self.c(x)


def model(kind=Mlp):
    """The same weights on every rank."""
    torch.manual_seed(7)
    return kind()


def batch(step, rank, rows=4):
    """One rank's share of a step: inputs and targets."""
    made = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(rows, 8, generator=made)
    return x, torch.randn(rows, 4, generator=made)


def all_batches(step, n, rows=4):
    """What all ranks have, as one process would have it."""
    found = [batch(step, rank, rows) for rank in range(n)]
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


def loss(out, wanted):
    return ((out - wanted) ** 2).mean()


def train(net, shares, optimizer=None):
    """Some steps of SGD over (inputs, targets); the losses."""
    if optimizer is None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for x, wanted in shares:
        optimizer.zero_grad()
        value = loss(net(x), wanted)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def alone(n, kind=Mlp, steps=STEPS):
    """The model as one process trains it on everybody's data."""
    net = model(kind)
    train(net, [all_batches(step, n) for step in range(steps)])
    return net


def share(rank, steps=STEPS):
    return [batch(step, rank) for step in range(steps)]
