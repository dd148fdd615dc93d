"""Small modules that know nothing of ranks, and what one process makes of them."""

import copy
import functools
import threading

import torch
from torch import nn
from torch.nn import functional

STEPS = 20
NS = [1, 2, 3, 4]
_SEEDING = threading.Lock()  # ranks that are threads share torch's generator
_device = "cpu"


def move_to(device):
    """From now on nets and batches of this process are there."""
    global _device
    _device = device


def device():
    return _device


class Mlp(nn.Module):
    """Layers used in another order than they were made in; sizes that divide badly."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(13, 3)
        self.first = nn.Linear(5, 11)
        self.middle = nn.Linear(11, 13)
        self.norm = nn.LayerNorm(13)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(self.norm(torch.relu(self.middle(x))))


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        b, t, c = x.shape
        qkv = self.qkv(self.before(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.after(x))


class Gpt(nn.Module):
    """A language model of a few thousand parameters."""

    def __init__(self, words=17, width=12, heads=2, layers=3, length=8):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(kind=Mlp, seed=0):
    with _SEEDING, torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind().to(_device)


def batch(kind, step, rank):
    """Inputs and targets of one rank in one step."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    if issubclass(kind, Gpt):
        tokens = torch.randint(17, (2, 9), generator=source).to(_device)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(4, 5, generator=source).to(_device)
    return x, x[:, :3].tanh()


def loss_of(output, target):
    if target.dtype == torch.int64:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return functional.mse_loss(output, target)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params):
    return torch.optim.AdamW(params, lr=1e-2)


@functools.cache
def alone(kind, n, steps=STEPS, optimizer=sgd, clip=None, passes=1):
    """Losses and weights of one process that adds up n ranks' gradients in their order.

    With `passes`, every rank accumulates so many batches in a step.
    """
    model = made(kind)
    opt = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        grads = [torch.zeros_like(p) for p in model.parameters()]
        mine = []
        for rank in range(n):
            opt.zero_grad()
            for i in range(passes):
                x, y = batch(kind, passes * step + i, rank)
                loss = loss_of(model(x), y)
                loss.backward()
            mine.append(loss.item())
            for total, p in zip(grads, model.parameters(), strict=True):
                total.copy_(p.grad) if rank == 0 else total.add_(p.grad)
        for total, p in zip(grads, model.parameters(), strict=True):
            p.grad = total / n
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        losses.append(mine)
    return losses, weights(model)


def train(comm, model, opt, kind, steps=STEPS, after=lambda: None, first=0):
    """The losses of one rank."""
    losses = []
    for step in range(first, first + steps):
        opt.zero_grad()
        x, y = batch(kind, step, comm.rank)
        loss = loss_of(model(x), y)
        loss.backward()
        after()
        opt.step()
        losses.append(loss.item())
    return losses


def weights(model):
    return {k: v.detach().clone() for k, v in copy.copy(model.state_dict()).items()}


def same(found, wanted, limit=None):
    """Two state dicts: bit for bit, or within a limit."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert found[name].dtype == value.dtype, name
        if limit is None:
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=limit, atol=limit)
