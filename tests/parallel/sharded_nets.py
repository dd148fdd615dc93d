"""A transformer whose sizes 1..4 ranks divide, and its training by one process."""

import functools

import torch
from nets import STEPS, made, weights
from torch import nn
from torch.nn import functional

from unisono.parallel import Column, Vocabulary, attention_plan, mlp_plan

WORDS, WIDTH, HEADS, LENGTH, LAYERS, BATCH = 36, 24, 12, 24, 2, 2


class Layer(nn.Module):
    """Takes sizes from tensors, as layers that may be sharded must."""

    def __init__(self, attend=None):
        super().__init__()
        self.heads, self.attend = HEADS, attend
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        qkv = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.attend is None:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = self.attend(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.after(x))


class Net(nn.Module):
    """A language model; a head of its own."""

    tied = False

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if self.tied:
            self.head.weight = self.words.weight

    def forward(self, tokens, places=None):
        at = torch.arange(tokens.shape[1]) if places is None else places
        x = self.words(tokens) + self.places(at)
        return self.head(self.norm(self.layers(x)))


class Tied(Net):
    """Its head is the embedding."""

    tied = True


class Placeless(Net):
    """Without places, so that its embedding can end in shards of the sequence."""

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.words(tokens))))


PLAN = {
    "words": Vocabulary(),
    "head": Column(),
    **mlp_plan("layers.*.mlp", up="0", down="2"),
    **attention_plan("layers.*", qkv="qkv", out="out", heads="heads"),
}
ON_SHARDS = ["layers.*.before", "layers.*.after", "norm"]


def net(kind=Net, dtype=torch.float64, seed=0):
    return made(kind, seed).to(dtype)


def tokens(step, rank=0, rows=BATCH):
    source = torch.Generator().manual_seed(1000 * step + rank)
    drawn = torch.randint(WORDS, (rows, LENGTH + 1), generator=source)
    return drawn[:, :-1], drawn[:, 1:]


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@functools.cache
def one_process(kind=Net, dtype=torch.float64, replicas=1, steps=STEPS, clip=None):
    """Losses and weights where one process has the batches of so many replicas.

    `clip`: the greatest norm, and which norm.
    """
    model = net(kind, dtype)
    opt = sgd(model.parameters())
    losses = []
    for step in range(steps):
        drawn = [tokens(step, replica) for replica in range(replicas)]
        x, y = (torch.cat(part) for part in zip(*drawn, strict=True))
        opt.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), *clip)
        opt.step()
        losses.append(loss.item())
    return losses, weights(model)
