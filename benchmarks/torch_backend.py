"""The torch backend beside gloo, in the same processes: the tables of docs/pytorch.md.

    python benchmarks/torch_backend.py            2 and 4 ranks, written to results/
    python benchmarks/torch_backend.py 2 --quick  a part of it, written nowhere

Every rank has a group of each backend and takes turns with them, round by round. A
figure is the middle of the rounds; a ratio is gloo's time over ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unisono.units import format_bytes, parse_bytes

RANKS: Any = import_module("torch_ranks")  # beside this file
RESULTS = Path(__file__).parent / "results" / "torch_backend.json"
SIZES = "8,1K,16K,256K,1M,16M,64M"
ROUNDS, ROUND_S = 7, 0.08
BACKENDS = ("gloo", "unisono")

Call = Callable[[], object]
Row = dict[str, Any]


def collectives(group: dist.ProcessGroup, size: int) -> dict[str, Call]:
    """The calls to measure, on `size` bytes of float32 in all."""
    n = dist.get_world_size()
    count = max(size // 4 // n, 1) * n
    whole, part = torch.zeros(count), torch.zeros(count // n)
    other = torch.zeros(count)
    x = torch.zeros(max(size // 4, 1))
    return {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            whole, part, group=group
        ),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            part, whole, group=group
        ),
        "all_to_all_single": lambda: dist.all_to_all_single(other, whole, group=group),
    }


def mlp() -> nn.Module:
    """Ten million parameters in eight layers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(1120, 1120), nn.ReLU()]
    return nn.Sequential(*layers)


def step_of(model: nn.Module) -> Call:
    """One step of training, without the optimizer."""
    x = torch.randn(4, 1120)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return step


def training(group: dist.ProcessGroup) -> dict[str, Call]:
    """Steps of DDP and of FSDP2 on a group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(
        mlp(), process_group=group, gradient_as_bucket_view=True
    )
    sharded = mlp()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in sharded.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return {"DDP step": step_of(ddp), "FSDP2 step": step_of(sharded)}


def alone() -> dict[str, Call]:
    """The same step without any communication."""
    return {"step alone": step_of(mlp())}


def timed(call: Call, times: int) -> float:
    """Seconds of one call, as the mean of a batch."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def compared(calls: dict[str, Call]) -> dict[str, float]:
    """The middle of the rounds, in which all take turns."""
    times = {}
    for name, call in calls.items():
        call()
        once = torch.tensor(timed(call, 3))
        dist.all_reduce(once, op=dist.ReduceOp.MAX)
        times[name] = max(1, min(2000, int(ROUND_S / max(once.item(), 1e-6))))
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            rounds[name].append(timed(call, times[name]))
    return {name: median(found) for name, found in rounds.items()}


def measured(sizes: list[int]) -> list[Row]:
    """All rows, on this rank."""
    groups: dict[str, Any] = {b: dist.new_group(backend=b) for b in BACKENDS}
    rows: list[Row] = []
    for size in sizes:
        by_backend = {b: collectives(g, size) for b, g in groups.items()}
        for name in by_backend["gloo"]:
            found = compared({b: calls[name] for b, calls in by_backend.items()})
            rows.append({"what": name, "bytes": size, **found})
    steps = {b: training(g) for b, g in groups.items()}
    for name in steps["gloo"]:
        found = compared({b: calls[name] for b, calls in steps.items()})
        rows.append({"what": name, "bytes": 0, **found})
    found = compared(alone())
    rows.append({"what": "step alone", "bytes": 0, "unisono": found["step alone"]})
    return rows


def line(row: Row) -> str:
    """One row, for people."""
    size = format_bytes(row["bytes"]) if row["bytes"] else ""
    text = f"{row['what']:<24}{row['n']:>2} {size:>8}"
    text += f"  unisono {row['unisono'] * 1e6:10.1f} us"
    if "gloo" in row:
        text += f"  gloo {row['gloo'] * 1e6:10.1f} us"
        text += f"  {row['gloo'] / row['unisono']:6.1f} times faster"
    return text


def main() -> None:
    """Measure, print, and keep."""
    args = RANKS.options(__doc__)
    sizes = [parse_bytes(s) for s in ("8,1M" if args.quick else SIZES).split(",")]
    RANKS.report(args, (2, 4), measured, sizes, line, RESULTS)


if __name__ == "__main__":
    main()
