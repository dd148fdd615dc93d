"""A small GPT, letter by letter, trained by any strategy with one flag.

    unisono run -n 4 examples/train_gpt.py --strategy zero3
    unisono run -n 4 examples/train_gpt.py --strategy ring --steps 200
    unisono run -n 4 examples/train_gpt.py --strategy ddp --codec topk:0.01
    unisono run -n 2 examples/train_gpt.py --strategy fsdp --device cuda

It learns the project's own pages (or --text FILE). All strategies train on the same
batch of 12 sequences in each step and begin with the same weights, so the losses are
the same for all of them and any number of ranks that divides 12; only `experts` is
another model, and what travels in fewer bytes (--codec) is nearly the same (see
docs/codecs.md). Sizes are multiples of 12 so that 1, 2, 3, 4 or 6 ranks can cut them.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono
from unisono import parallel
from unisono.runtime.communicator import Communicator

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 96, 12, 4, 72, 12
Step = Callable[[Tensor, Tensor], float]


class Embed(nn.Module):
    """Letters and their places; `at` are the places if they are not 0, 1, 2, ..."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.places = (
            nn.Embedding(words, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
        )
        self.at: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        at = places if self.at is None else self.at
        made: Tensor = self.words(tokens) + self.places(at)
        return made


class Block(nn.Module):
    """A transformer's block; it takes sizes from tensors, so that it can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.attend: Callable[..., Tensor] = partial(
            functional.scaled_dot_product_attention, is_causal=True
        )
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp: nn.Module = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = self.attend(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.out(y)
        made: Tensor = x + self.mlp(self.after(x))
        return made


class Head(nn.Module):
    """From the last block to a score for every letter."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.norm(x))
        return made


def perceptron() -> nn.Module:
    """What stands after attention."""
    wide = 4 * WIDTH
    return nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))


def gpt(words: int) -> nn.Sequential:
    """One after the other: 0 the embedding, 1.. the blocks, the last one the head."""
    return nn.Sequential(Embed(words), *[Block() for _ in range(LAYERS)], Head(words))


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean over all letters."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def stepping(
    model: nn.Module,
    optimizer: Any,
    comm: Communicator,
    mine: Callable[[Tensor], Tensor],
    sync: Callable[[], None] = lambda: None,
) -> Step:
    """A step on this rank's part of the batch; the loss is the mean over the ranks."""

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_of(model(mine(x)), mine(y))
        loss.backward()
        sync()
        optimizer.step()
        return float(comm.all_reduce(loss.detach().clone(), op="mean"))

    return step


def rows(comm: Communicator) -> Callable[[Tensor], Tensor]:
    """This rank's sequences."""
    return lambda x: x.chunk(comm.world_size)[comm.rank]


# --- the strategies: each makes a step of the plain model


def plain_ddp(net: nn.Sequential, comm: Communicator) -> Step:
    model = parallel.PlainDDP(net, comm)
    return stepping(model, adam(net.parameters()), comm, rows(comm), model.sync)


def ddp(net: nn.Sequential, comm: Communicator, codec: str | None = None) -> Step:
    model = parallel.DDP(net, comm, codec=codec)
    return stepping(model, adam(model.parameters()), comm, rows(comm))


def zero(
    net: nn.Sequential, comm: Communicator, stage: int, codec: str | None = None
) -> Step:
    optimizer = parallel.ZeRO(
        net, comm, torch.optim.AdamW, stage=stage, codec=codec, lr=3e-3
    )
    return stepping(net, optimizer, comm, rows(comm))


def onebit_adam(net: nn.Sequential, comm: Communicator, warmup: int = 100) -> Step:
    optimizer = parallel.OneBitAdam(
        net, comm, lr=3e-3, weight_decay=0.01, warmup=warmup
    )
    return stepping(net, optimizer, comm, rows(comm))


def fsdp(net: nn.Sequential, comm: Communicator, codec: str | None = None) -> Step:
    model = parallel.FSDP(
        net, comm, units=[Block], param_codec=codec, reduce_codec=codec
    )
    return stepping(model, adam(model.parameters()), comm, rows(comm))


def server(net: nn.Sequential, comm: Communicator) -> Step:
    optimizer = parallel.ParameterServer(net, comm, torch.optim.AdamW, lr=3e-3)
    return stepping(net, optimizer, comm, rows(comm))


def tensor(net: nn.Sequential, comm: Communicator, sequence: bool = False) -> Step:
    blocks = f"[1-{LAYERS}]"
    plan = {
        "0.words": parallel.Vocabulary(),
        f"{LAYERS + 1}.out": parallel.Column(),
        **parallel.mlp_plan(f"{blocks}.mlp", up="0", down="2"),
        **parallel.attention_plan(blocks, qkv="qkv", out="out", heads="heads"),
    }
    if sequence:
        norms = ["*.before", "*.after", "*.norm"]
        plan = parallel.sequence_plan(plan, on_shards=norms, enters="1")
    model = parallel.parallelize(net, comm, plan)
    optimizer = adam(model.parameters())

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = parallel.vocabulary_cross_entropy(model(x), y, comm)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def context(net: nn.Sequential, comm: Communicator, attention: Any) -> Step:
    at = parallel.positions(LENGTH, comm).to(next(net.parameters()).device)
    for part in net:
        if isinstance(part, Embed):
            part.at = at
        elif isinstance(part, Block):
            part.attend = partial(attention, comm=comm, causal=True)
    model = parallel.DDP(net, comm)
    return stepping(model, adam(model.parameters()), comm, lambda x: x[:, at])


def experts(net: nn.Sequential, comm: Communicator) -> Step:
    for part in net:
        if isinstance(part, Block):
            like = part.out.weight  # its device and type
            gate = nn.Linear(WIDTH, 12).to(like)
            many = [perceptron().to(like) for _ in range(12)]
            part.mlp = parallel.MoE(gate, many, comm, top_k=2)
    model = parallel.DDP(net, comm)
    return stepping(model, adam(model.parameters()), comm, rows(comm))


def pipeline(net: nn.Sequential, comm: Communicator) -> Step:
    model = parallel.Pipeline(net, comm, microbatches=BATCH // 2)
    optimizer = adam(model.parameters())

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = model.step(x, y, loss_of)
        optimizer.step()
        return loss

    return step


STRATEGIES: dict[str, Callable[..., Step]] = {
    "ddp": ddp,
    "plain_ddp": plain_ddp,
    "zero1": partial(zero, stage=1),
    "zero2": partial(zero, stage=2),
    "zero3": partial(zero, stage=3),
    "fsdp": fsdp,
    "server": server,
    "onebit_adam": onebit_adam,
    "tensor": tensor,
    "sequence": partial(tensor, sequence=True),
    "ring": lambda net, comm: context(net, comm, parallel.ring_attention),
    "all_to_all": lambda net, comm: context(net, comm, parallel.all_to_all_attention),
    "experts": experts,
    "pipeline": pipeline,
}

CODED = ("ddp", "zero1", "zero2", "zero3", "fsdp")


# --- the rest: letters, clocks, and the loop


class Text:
    """A text as numbers of letters; batches from anywhere in it."""

    def __init__(self, text: str) -> None:
        letters = sorted(set(text))
        self.words = -(-len(letters) // 12) * 12  # so that it can be cut
        self._all = torch.tensor([letters.index(letter) for letter in text])

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Sequences and the letters that follow; the same on every rank."""
        source = torch.Generator().manual_seed(step)
        last = len(self._all) - LENGTH - 1
        begins = torch.randint(last, (BATCH,), generator=source)
        drawn = torch.stack([self._all[b : b + LENGTH + 1] for b in begins.tolist()])
        return drawn[:, :-1], drawn[:, 1:]


class Waiting:
    """How long this rank stood in collectives: communication that nothing hides."""

    CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

    def __init__(self, comm: Communicator) -> None:
        self.seconds, self._inside = 0.0, False
        for name in (*self.CALLS, "reduce", "send", "recv", "gather", "scatter"):
            setattr(comm, name, self._timed(getattr(comm, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:  # a collective that another is made of
                return call(*args, **options)
            self._inside, begun = True, time.perf_counter()
            try:
                made = call(*args, **options)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - begun
            if options.get("async_op"):
                made.wait = self._timed(made.wait)
            return made

        return timed


def train(comm: Communicator, net: nn.Sequential, text: Text, args: Any) -> list[float]:
    """The loop; the first rank shows how it goes."""
    waiting = Waiting(comm)
    options = {"codec": args.codec} if args.codec else {}
    step = STRATEGIES[args.strategy](net, comm, **options)
    losses: list[float] = []
    begun, waiting.seconds, before = time.perf_counter(), 0.0, comm.sent_bytes
    for number in range(args.steps):
        x, y = text.batch(number)
        losses.append(step(x.to(args.device), y.to(args.device)))
        if comm.rank == 0:
            show(number + 1, args.steps, losses[-1], time.perf_counter() - begun)
    spent = time.perf_counter() - begun
    peak = peak_memory(args.device) / 2**20
    sent = (comm.sent_bytes - before) / args.steps
    mine = f"peak memory {peak:.0f} MiB, sent {sent:,.0f} bytes"
    mine += f" per step, {waiting.seconds / spent:.0%} of the time in communication"
    for rank, line in enumerate(comm.all_gather_objects(mine)):
        if comm.rank == 0:
            print(f"rank {rank}: {line}")
    return losses


def peak_memory(device: str) -> int:
    """Bytes of the process, or of its tensors on the GPU."""
    if device == "cpu":
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return torch.cuda.max_memory_allocated()


def show(step: int, steps: int, loss: float, seconds: float) -> None:
    """A bar on a terminal; elsewhere a line now and then."""
    rate = step * BATCH * LENGTH / seconds
    bar = "#" * (20 * step // steps)
    line = f"[{bar:<20}] {step}/{steps}  loss {loss:.4f}  {rate:,.0f} tokens/s"
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if step == steps else "", flush=True)
    elif step == steps or step % max(steps // 10, 1) == 0:
        print(line, flush=True)


def main() -> None:
    """Read the flags, find the others, train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--text", type=Path, help="a file to learn")
    parser.add_argument("--codec", help="what gradients travel as: fp8, topk:0.01, ...")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if args.codec and args.strategy not in CODED:
        parser.error(f"--codec is for {', '.join(CODED)}, not for {args.strategy}")
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    files = [args.text] if args.text else pages
    text = Text("\n".join(file.read_text(encoding="utf-8") for file in files))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with unisono.init() as comm:
        if args.device == "cuda":  # ranks may share a GPU
            torch.cuda.set_device(comm.rank % torch.cuda.device_count())
        train(comm, gpt(text.words).to(args.device), text, args)


if __name__ == "__main__":
    main()
