"""Steps of a GPT of 125 M parameters, on ranks that share one GPU.

    python -m benchmarks.gpu.torch_steps [--ranks 2,4] [--only ddp,fsdp2]
        [--backends unisono,gloo] [--precision fp32,bf16] [--steps 8] [--json FILE]

DDP and FSDP2 by `torch.distributed`, with one backend or the other on CUDA tensors, and
one rank with the whole batch: time of a step, peak memory of a rank, the final loss. In
bf16 the model runs under autocast. All have the same weights and data, so that all
losses must lie on one another. Start MPS first, or ranks run by turns:

    nvidia-cuda-mps-control -d

Without a GPU: --device cpu --layers 2 --width 64 --vocabulary 512 --context 32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

LIMIT_S = 120
WARMUP = 3
HEAD = 64
"""The width of a head of attention."""


@dataclass(frozen=True)
class Model:
    """Sizes; the defaults are those of GPT-2's smallest."""

    layers: int = 12
    width: int = 768
    vocabulary: int = 50257
    context: int = 256


@dataclass(frozen=True)
class Setting:
    """One line of the table. One rank alone has no strategy, and no backend."""

    strategy: str
    backend: str
    ranks: int
    precision: str


@dataclass
class Result:
    """What a rank measured; `quiet_s` is a step of DDP without its sums."""

    step_s: float
    quiet_s: float | None
    peak: int
    losses: list[float]


class Block(nn.Module):
    """Attention and two layers."""

    def __init__(self, width: int) -> None:
        """Normal layers of torch."""
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of tokens."""
        rows, tokens, width = x.shape
        heads = max(1, width // HEAD)
        qkv = self.qkv(self.before(x)).view(rows, tokens, 3, heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, width))
        more: Tensor = self.down(F.gelu(self.up(self.between(x))))
        return x + more


class Gpt(nn.Module):
    """A decoder whose last layer has the weights of the first."""

    def __init__(self, sizes: Model) -> None:
        """The same weights for all: the seed is fixed."""
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of each token's successor."""
        x = self.tokens(tokens[:, :-1])
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, sizes: Model, rows: int) -> Tensor:
    """Tokens of all ranks: sequences with a rule that can be learnt."""
    made = torch.Generator().manual_seed(step)
    first = torch.randint(0, sizes.vocabulary, (rows, 1), generator=made)
    return (first + 7 * torch.arange(sizes.context + 1)) % sizes.vocabulary


def wrapped(net: Gpt, strategy: str, device: str) -> nn.Module:
    """The model as the strategy has it."""
    if strategy == "ddp":
        ids = [0] if device == "cuda" else None
        return DistributedDataParallel(net, device_ids=ids)
    if strategy == "fsdp2":
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


class Trainer:
    """One rank's model, and its share of the data."""

    def __init__(self, setting: Setting, rank: int, given: argparse.Namespace) -> None:
        """All ranks have the same model."""
        self._setting, self._rank, self._given = setting, rank, given
        self._sizes = sizes_of(given)
        net = Gpt(self._sizes).to(given.device)
        self._net = wrapped(net, setting.strategy, given.device)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=3e-4)
        self._made = 0

    def step(self) -> Tensor:
        """One step on the next batch."""
        rows = self._given.batch
        mine = batch(self._made, self._sizes, rows).chunk(self._setting.ranks)
        self._made += 1
        tokens = mine[self._rank].to(self._given.device)
        half = self._setting.precision == "bf16"
        with torch.autocast(self._given.device, torch.bfloat16, enabled=half):
            loss: Tensor = self._net(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def timed(self, steps: int) -> tuple[float, list[float]]:
        """Seconds of a step, and the losses."""
        synchronize(self._given.device)
        begun = time.perf_counter()
        losses = [self.step() for _ in range(steps)]
        synchronize(self._given.device)
        taken = (time.perf_counter() - begun) / steps
        return taken, [loss.item() for loss in losses]

    def without_sums(self) -> contextlib.AbstractContextManager[None]:
        """What makes DDP leave its sums out."""
        assert isinstance(self._net, DistributedDataParallel)
        return self._net.no_sync()


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def measured(setting: Setting, rank: int, given: argparse.Namespace) -> Result:
    """Train, and tell."""
    trainer = Trainer(setting, rank, given)
    _, losses = trainer.timed(WARMUP)
    step_s, more = trainer.timed(given.steps)
    peak = torch.cuda.max_memory_allocated() if given.device == "cuda" else 0
    quiet_s = None
    if setting.strategy == "ddp":
        with trainer.without_sums():
            quiet_s, _ = trainer.timed(given.steps)
    return Result(step_s, quiet_s, peak, losses + more)


def rank_of(
    rank: int, setting: Setting, given: argparse.Namespace, folder: str
) -> None:
    """A process: a rank of one setting. What it found is a file."""
    if given.device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    with group(rank, setting, folder):
        found = measured(setting, rank, given)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(asdict(found), file)


@contextlib.contextmanager
def group(rank: int, setting: Setting, folder: str) -> Iterator[None]:
    """The group of all ranks, if there are several."""
    if setting.ranks == 1:
        yield
        return
    dist.init_process_group(
        setting.backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=setting.ranks,
        timeout=timedelta(seconds=LIMIT_S),
    )
    yield
    dist.destroy_process_group()


def run(setting: Setting, given: argparse.Namespace) -> list[Result]:
    """All ranks of a setting; none if one failed, which is printed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(  # type: ignore[no-untyped-call]
                rank_of,
                (setting, given, folder),
                nprocs=setting.ranks,
                start_method="fork",  # nobody has used CUDA here
            )
        except ProcessException as error:
            print(f"  failed: {str(error).strip().splitlines()[-1]}", flush=True)
            return []
        found = []
        for rank in range(setting.ranks):
            with open(f"{folder}/{rank}.json") as file:
                found.append(Result(**json.load(file)))
        return found


def settings_of(given: argparse.Namespace) -> Iterator[Setting]:
    """One rank first, then all others."""
    for precision in given.precision.split(","):
        yield Setting("one", "none", 1, precision)
        for strategy in given.only.split(","):
            for ranks in given.ranks.split(","):
                for backend in given.backends.split(","):
                    yield Setting(strategy, backend, int(ranks), precision)


def sizes_of(given: argparse.Namespace) -> Model:
    """As given."""
    return Model(given.layers, given.width, given.vocabulary, given.context)


def line_of(setting: Setting, found: list[Result]) -> str:
    """A line of the table: the slowest rank, the mean of the losses."""
    step = max(result.step_s for result in found)
    peak = max(result.peak for result in found)
    last = sum(result.losses[-1] for result in found) / len(found)
    quiets = [result.quiet_s for result in found if result.quiet_s is not None]
    quiet = f"{1e3 * max(quiets):8.1f}" if quiets else "       -"
    return (
        f"{setting.precision:5} {setting.strategy:6} {setting.backend:8} "
        f"{setting.ranks:5} {1e3 * step:9.1f} {quiet} {peak / 2**30:9.2f} {last:11.6f}"
    )


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser()
    options.add_argument("--ranks", default="2,4")
    options.add_argument("--only", default="ddp,fsdp2")
    options.add_argument("--backends", default="unisono,gloo")
    options.add_argument("--precision", default="fp32,bf16")
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--batch", type=int, default=16, help="rows of all ranks")
    options.add_argument("--device", default="cuda")
    options.add_argument("--json", default="")
    for name, value in asdict(Model()).items():
        options.add_argument(f"--{name}", type=int, default=value)
    given = options.parse_args()
    count = sum(p.numel() for p in Gpt(sizes_of(given)).parameters())
    print(
        f"{count / 1e6:.1f} M parameters, {given.batch} rows of {given.context} tokens "
        f"for all ranks together; torch {torch.__version__}"
    )
    print(
        "      strategy backend  ranks   step ms    quiet  peak GiB        loss\n"
        "(quiet: a step of DDP without its sums)"
    )
    lines = []
    for setting in settings_of(given):
        found = run(setting, given)
        if not found:
            print(f"  that was {setting}")
            continue
        print(line_of(setting, found), flush=True)
        lines.append(asdict(setting) | {"found": [asdict(result) for result in found]})
    if given.json:
        with open(given.json, "w") as file:
            json.dump(lines, file)


if __name__ == "__main__":
    main()
