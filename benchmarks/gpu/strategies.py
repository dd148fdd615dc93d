"""Every strategy on CUDA tensors: the losses of the CPU, and what it takes.

    python -m benchmarks.gpu.strategies [-n 2] [--steps 20] [--dtype float64]
        [--only ddp,fsdp] [--device cuda] [--json FILE]
    python -m benchmarks.gpu.strategies --draw      the picture of results/, anew

The model is that of examples/train_gpt.py, the ranks are processes that share the GPU:
start MPS first (`nvidia-cuda-mps-control -d`), or they run by turns. The losses of each
strategy are compared with those of the same strategy on the CPU, and of one process
without any (but for `experts`, which is another model).
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch

import unisono
from benchmarks.convergence import GPT
from unisono.cli._plot import pyplot, save, style
from unisono.runtime.communicator import Communicator

RESULTS = Path(__file__).parents[1] / "results" / "gpu_strategies.json"
PICTURE = Path(__file__).parents[2] / "docs" / "gpu_losses.svg"
Found = dict[str, dict[str, Any]]


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser()
    options.add_argument("-n", type=int, default=2)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--dtype", default="float64")
    options.add_argument("--only", default="")
    options.add_argument("--device", default="cuda")
    options.add_argument("--json", type=Path)
    options.add_argument("--draw", action="store_true")
    chosen = options.parse_args()
    if chosen.draw:
        draw(json.loads(RESULTS.read_text()))
        return
    names = chosen.only.split(",") if chosen.only else list(GPT.STRATEGIES)
    if chosen.dtype != "float32":
        names = [name for name in names if name != "onebit_adam"]
    how = chosen.steps, chosen.dtype, names
    right = alone(chosen.steps, chosen.dtype)
    on_cpu = unisono.spawn(on_rank, chosen.n, ("cpu", *how))[0]
    on_gpu = unisono.spawn(on_rank, chosen.n, (chosen.device, *how))[0]
    print(f"{chosen.n} ranks, {chosen.steps} steps, {chosen.dtype}")
    print(
        f"{'strategy':<12} {'of the CPU':>10} {'of one':>10} {'ms/step':>8} {'MiB':>6}"
    )
    for name in names:
        mine, theirs = on_gpu[name], on_cpu[name]
        print(
            f"{name:<12} {difference(mine['losses'], theirs['losses']):>10.1e} "
            f"{difference(mine['losses'], right):>10.1e} "
            f"{1e3 * mine['step_s']:>8.1f} {mine['peak'] / 2**20:>6.0f}"
            f"  sent {mine['sent']:,.0f} and {theirs['sent']:,.0f} bytes a step"
        )
    if chosen.json:
        every = {"alone": right, "cuda": on_gpu, "cpu": on_cpu}
        chosen.json.write_text(json.dumps(every))


def _model(dtype: str) -> tuple[Any, Any]:
    """The text and the network, the same for all."""
    text = GPT.Text("many voices, one result; one word and many ways. " * 60)
    torch.manual_seed(0)
    return text, GPT.gpt(text.words).to(getattr(torch, dtype))


def alone(steps: int, dtype: str) -> list[float]:
    """The losses of one process without a strategy."""
    text, net = _model(dtype)
    optimizer = GPT.adam(net.parameters())
    losses = []
    for number in range(steps):
        x, y = text.batch(number)
        optimizer.zero_grad()
        loss = GPT.loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_rank(
    comm: Communicator, device: str, steps: int, dtype: str, names: list[str]
) -> Found:
    """What this rank found for each strategy."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    text, net = _model(dtype)
    found: Found = {}
    for name in names:
        torch.manual_seed(1)  # for layers that the strategy makes
        group = comm.split(0)
        assert group is not None
        step = GPT.STRATEGIES[name](copy.deepcopy(net).to(device), group)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        group.all_reduce(torch.zeros(1, device=device))  # on a GPU the ranks connect
        losses, times, before = [], [], group.sent_bytes
        for number in range(steps):
            x, y = text.batch(number)
            begun = time.perf_counter()
            losses.append(step(x.to(device), y.to(device)))
            times.append(time.perf_counter() - begun)
        found[name] = {
            "losses": losses,
            "step_s": sorted(times)[len(times) // 2],
            "peak": GPT.peak_memory(device),
            "sent": (group.sent_bytes - before) / steps,
        }
        group.close()
    return found


def difference(some: list[float], others: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(some, others, strict=True))


def draw(every: dict[str, Any]) -> None:
    """The losses, and how far they are from those of the CPU."""
    figure, (left, right) = pyplot("losses").subplots(1, 2, figsize=(11, 4.5))
    steps = range(1, len(every["alone"]) + 1)
    left.plot(steps, every["alone"], "ko", ms=5, label="one process, CPU")
    for name, found in every["cuda"].items():
        theirs = every["cpu"][name]["losses"]
        left.plot(steps, found["losses"], lw=1, label=name)
        apart = [abs(a - b) / b for a, b in zip(found["losses"], theirs, strict=True)]
        right.plot(steps, [max(a, 1e-17) for a in apart], lw=1, label=name)
    style(left, xlabel="step", ylabel="loss", title="on one GPU, 2 ranks, float64")
    style(right, xlabel="step", title="relative difference from the CPU")
    right.set_yscale("log")
    right.set_ylim(1e-17, 1e-12)
    left.legend(fontsize=7, ncol=2)
    save(figure, PICTURE)


if __name__ == "__main__":
    main()
