"""Our DDP and FSDP beside torch's DDP and FSDP2 over gloo: a small GPT, step by step.

    python benchmarks/parallel.py             2 and 4 ranks, written to results/
    python benchmarks/parallel.py 2 --quick   a smaller model, a few steps, kept nowhere
    python benchmarks/parallel.py 2 --memory  peak memory alone, in turns

Every rank has all of them and takes turns, round by round; a figure is the middle of
the rounds, and a ratio is torch's time over ours. Peak memory is measured in processes
of their own, one strategy each, by turns, and the middle taken: how far the rank that
has most rose above what it had before the model was made. It is the kernel's "Pss": all
pages in use, those that ranks share divided among them. ("Rss", kept beside it, counts
such a page for each rank that has looked at it, so it grows where ranks read each
other's memory instead of sending copies; no more memory is in use by that.)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn import functional

import unisono
from unisono.parallel import DDP, FSDP, PlainDDP, ZeRO

RESULTS = Path(__file__).parent / "results" / "parallel.json"
PAIRS = {"ddp": "torch DDP", "fsdp": "torch FSDP2"}
Step = Callable[[], None]
Row = dict[str, Any]


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        """Attention, and two linear layers."""
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention, then the rest."""
        b, t, c = x.shape
        qkv = self.qkv(self.before(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        down: Tensor = self.down(functional.gelu(self.up(self.after(x))))
        return x + down


class Gpt(nn.Module):
    """A small language model of characters."""

    def __init__(self, width: int, layers: int, words: int = 128) -> None:
        """So many layers, so wide."""
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The scores of each next character."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def made(size: list[int]) -> Gpt:
    """The same model every time."""
    torch.manual_seed(0)
    return Gpt(*size)


def torch_ddp(model: nn.Module) -> nn.Module:
    """As torch has it, at its best."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def torch_fsdp(model: Gpt) -> nn.Module:
    """FSDP2, a layer at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def strategy(name: str, size: list[int], comm: unisono.Communicator) -> Step:
    """One step of training by a strategy."""
    net = made(size)
    adam = torch.optim.AdamW
    after: Step | None = None
    model: nn.Module = net
    optimizer: torch.optim.Optimizer | None = None
    if name == "ddp":
        model = DDP(net, comm)
    elif name == "fsdp":
        model = FSDP(net, comm)
    elif name == "plain_ddp":
        model = plain = PlainDDP(net, comm)
        after = plain.sync
    elif name.startswith("zero"):
        optimizer = ZeRO(net, comm, adam, stage=int(name[-1]), lr=1e-3)
    else:
        model = torch_ddp(net) if name == "torch DDP" else torch_fsdp(net)
    chosen = optimizer or adam(model.parameters(), lr=1e-3)
    tokens = torch.randint(128, (2, 65))

    def step() -> None:
        chosen.zero_grad()
        scores = model(tokens[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        if after is not None:
            after()
        chosen.step()

    return step


NAMES = ("ddp", "torch DDP", "fsdp", "torch FSDP2", "plain_ddp", "zero1", "zero2")


def timed(step: Step, times: int) -> float:
    """Seconds of one step, as the mean of a few."""
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(times):
        step()
    return (time.perf_counter() - begun) / times


def measured(size: list[int], rounds: int, comm: unisono.Communicator) -> Row:
    """The middle of the rounds, in which all take turns."""
    steps = {name: strategy(name, size, comm) for name in NAMES}
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for step in steps.values():
        timed(step, 2)
    for _ in range(rounds):
        for name, step in steps.items():
            found[name].append(timed(step, 2))
    return {name: median(seconds) for name, seconds in found.items()}


def held() -> tuple[int, int]:
    """Bytes of memory that this process uses: its share of it (Pss), and Rss."""
    result = dict(
        line.split(":", 1)
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    pss, rss = (int(result[key].split()[0]) << 10 for key in ("Pss", "Rss"))
    return pss, rss


def peak(name: str, size: list[int], comm: unisono.Communicator) -> list[int]:
    """How far one strategy raises Pss and Rss, looked at all the time."""
    strategy(name, [64, 1], comm)()  # what is made once, whatever the model
    gc.collect()
    before = held()
    most = list(before)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            most[:] = map(max, most, held())

    watching = threading.Thread(target=watch)
    watching.start()
    step = strategy(name, size, comm)
    for _ in range(4):
        step()
    over.set()
    watching.join()
    return [high - low for high, low in zip(most, before, strict=True)]


def rank_main(rank: int, n: int, folder: str, size: list[int], job: Any) -> None:
    """One rank: times of all if `job` is a number of rounds, or a strategy's memory."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    torch.set_num_threads(1)
    store = c10d.FileStore(f"{folder}/store", n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    with unisono.init(rank, n, job=Path(folder).name) as comm:
        if isinstance(job, int):
            row = measured(size, job, comm)
        else:
            every = comm.all_gather_objects(peak(job, size, comm))
            row = {job: [max(kind) for kind in zip(*every, strict=True)]}
    if rank == 0:
        Path(folder, "row.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def world(n: int, size: list[int], job: int | str) -> Row:
    """What n ranks find."""
    with tempfile.TemporaryDirectory() as folder:
        start: Any = vars(torch.multiprocessing)["spawn"]
        start(rank_main, (n, folder, size, job), nprocs=n)
        found: Row = json.loads(Path(folder, "row.json").read_text())
    return found


def peaks(n: int, size: list[int], turns: int) -> Row:
    """The middle of the peaks of some turns, and all of them."""
    found: dict[str, list[list[int]]] = {name: [] for name in NAMES[:4]}
    for _ in range(turns):
        for name, every in found.items():
            every.append(world(n, size, name)[name])
    kinds = {"peak_bytes": 0, "peak_rss_bytes": 1}
    return {
        **{
            result: {
                name: median(turn[kind] for turn in every)
                for name, every in found.items()
            }
            for result, kind in kinds.items()
        },
        "peaks_of_turns": found,
    }


def print_row(row: Row) -> None:
    """What n ranks have found."""
    n, memory, seconds = row["n"], row["peak_bytes"], row.get("seconds", {})
    for name in seconds or memory:
        text = f"{n} ranks  {name:<12}"
        text += f"{seconds[name] * 1e3:9.1f} ms a step" if seconds else ""
        text += f"{memory[name] / 2**20:9.1f} MiB" if name in memory else ""
        print(text)
    for ours, theirs in PAIRS.items():
        text = f"{n} ranks  {ours} against {theirs}: "
        if seconds:
            text += f"{seconds[theirs] / seconds[ours]:.2f} times as fast, "
        print(
            f"{text}{memory[theirs] / memory[ours]:.2f} times less memory", flush=True
        )


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", nargs="*", type=int, default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    size, rounds = ([128, 2], 3) if args.quick else ([384, 6], args.rounds)
    rows = []
    for n in args.n or (2, 4):
        row: Row = {"n": n, "size": size}
        row |= peaks(n, size, 1 if args.quick else args.turns)
        if not args.memory:
            row["seconds"] = world(n, size, rounds)
        rows.append(row)
        print_row(row)
    if not args.n and not args.quick and not args.memory:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
