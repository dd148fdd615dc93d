"""How much of the communication hides behind computing on a GPU: a trace of streams.

    python -m benchmarks.gpu.overlap [-n 2] [--steps 3] [--json FILE] [--traces FOLDER]
    python -m benchmarks.gpu.overlap --draw        the picture of results/, anew

Strategies of `unisono.parallel` train a GPT of 125 M parameters on ranks that share the
GPU (start MPS first: `nvidia-cuda-mps-control -d`). torch's profiler tells when each
kernel ran, and on which stream. Hidden is the share of the time of unisono's kernels in
which another kernel of the same rank ran. Without overlap it is 0.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import unisono
from benchmarks.gpu.torch_steps import Gpt, Model, batch
from unisono.cli._plot import pyplot, save, style
from unisono.devices import rtc
from unisono.parallel import DDP, FSDP, ZeRO
from unisono.runtime.communicator import Communicator

RESULTS = Path(__file__).parents[1] / "results" / "gpu_overlap.json"
PICTURE = Path(__file__).parents[2] / "docs" / "gpu_overlap.svg"
OURS = rtc.ENTRIES
ROWS = 8
WARMUP = 3
SMALL = 0.03
"""Milliseconds that the picture does not show."""
Span = tuple[float, float]
Spans = dict[str, list[Span]]
"""When kernels ran in a step, in milliseconds: "computing" and "communicating"."""
STRATEGIES = ("ddp, overlap=False", "ddp", "zero2", "fsdp, prefetch=False", "fsdp")


def wrapped(name: str, net: Gpt, comm: Communicator) -> tuple[nn.Module, Any]:
    """The module as a strategy has it, and its optimizer."""
    kind, _, option = name.partition(", ")
    if kind == "ddp":
        ddp = DDP(net, comm, overlap=not option)
        return ddp, torch.optim.AdamW(ddp.parameters(), lr=3e-4, fused=True)
    if kind == "zero2":
        zero = ZeRO(net, comm, torch.optim.AdamW, stage=2, lr=3e-4)
        return net, zero
    fsdp = FSDP(net, comm, units=list(net.blocks), prefetch=not option)
    return fsdp, torch.optim.AdamW(fsdp.parameters(), lr=3e-4)


def on_rank(comm: Communicator, steps: int, folder: str, device: str) -> dict[str, Any]:
    """What this rank saw of each strategy."""
    if device == "cuda":
        torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    return {name: traced(name, comm, steps, folder, device) for name in STRATEGIES}


def traced(
    name: str, comm: Communicator, steps: int, folder: str, device: str
) -> dict[str, Any]:
    """The spans of the last step, and the share that was hidden in all."""
    group = comm.split(0)
    assert group is not None
    sizes = Model() if device == "cuda" else Model(2, 64, 512, 32)
    net, optimizer = wrapped(name, Gpt(sizes).to(device), group)

    def step(number: int) -> None:
        rows = batch(number, sizes, ROWS * comm.world_size)
        tokens = rows.chunk(comm.world_size)[comm.rank]
        net(tokens.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(WARMUP):
        step(number)
    group.barrier()
    kinds = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=kinds) as seen:
        for number in range(steps):
            step(number)
        if device == "cuda":
            torch.cuda.synchronize()
    path = Path(folder) / f"{name.replace(', ', '_')}-{comm.rank}.json"
    seen.export_chrome_trace(str(path))
    group.close()
    return summary(spans_of(path), steps)


def spans_of(path: Path) -> Spans:
    """The kernels of a trace."""
    found: Spans = {"computing": [], "communicating": []}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            ours = any(name in event["name"] for name in OURS)
            begun = event["ts"] / 1e3
            span = begun, begun + event["dur"] / 1e3
            found["communicating" if ours else "computing"].append(span)
    return found


def union(spans: list[Span], gap: float = 0.0) -> list[Span]:
    """The same time without overlaps, in order, and without gaps that are no longer."""
    made: list[Span] = []
    for begin, end in sorted(spans):
        if made and begin <= made[-1][1] + gap:
            made[-1] = made[-1][0], max(end, made[-1][1])
        else:
            made.append((begin, end))
    return made


def common(some: list[Span], others: list[Span]) -> float:
    """How long both were there; each is a union."""
    total, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        begin, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        total += max(0.0, end - begin)
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total


def length(spans: list[Span]) -> float:
    """Of all of a union."""
    return sum(end - begin for begin, end in spans)


def summary(spans: Spans, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, what was hidden, and the last step for the picture."""
    computing, ours = union(spans["computing"]), union(spans["communicating"])
    every = union(computing + ours)
    if not every or not ours:
        return {"step": 0.0, "communicating": 0.0, "hidden": 0.0, "last": {}}
    begin, end = every[0][0], every[-1][1]
    from_ = end - (end - begin) / steps
    last = {
        kind: [
            (round(a - from_, 3), round(b - from_, 3))
            for a, b in union(spans_, SMALL)
            if a >= from_
        ]
        for kind, spans_ in (("computing", computing), ("communicating", ours))
    }
    return {
        "step": (end - begin) / steps,
        "communicating": length(ours) / steps,
        "hidden": common(computing, ours) / length(ours),
        "last": last,
    }


def draw(every: dict[str, Any]) -> None:
    """One step of each strategy on rank 0: what computes above what communicates."""
    plots = pyplot("overlap")
    figure, axes = plots.subplots(len(every), 1, figsize=(11, 1.3 * len(every)))
    for axis, (name, found) in zip(axes, every.items(), strict=True):
        for height, kind, color in (
            (1, "computing", "tab:blue"),
            (0, "communicating", "tab:orange"),
        ):
            spans = [(a, b - a) for a, b in found["last"][kind]]
            axis.broken_barh(spans, (height, 0.9), color=color)
        axis.set_yticks([0.45, 1.45], ["unisono", "computing"])
        title = f"{name}: {found['hidden']:.0%} of the communication is hidden"
        style(axis, title=title)
    axes[-1].set_xlabel("ms")
    save(figure, PICTURE)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser()
    options.add_argument("-n", type=int, default=2)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--device", default="cuda")
    options.add_argument("--json", type=Path)
    options.add_argument("--traces")
    options.add_argument("--draw", action="store_true")
    chosen = options.parse_args()
    if chosen.draw:
        draw(json.loads(RESULTS.read_text()))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.traces or temporary
        how = chosen.steps, folder, chosen.device
        found = unisono.spawn(on_rank, chosen.n, how)[0]
    print(f"{'strategy':<22} {'ms/step':>8} {'ours, ms':>9} {'hidden':>7}")
    for name, one in found.items():
        print(
            f"{name:<22} {one['step']:>8.1f} {one['communicating']:>9.2f} "
            f"{one['hidden']:>7.0%}"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
