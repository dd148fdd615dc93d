"""What one small call of torch.distributed takes, beside a backend that does nothing.

    python benchmarks/torch_calls.py            1 and 2 ranks, written to results/
    python benchmarks/torch_calls.py 2 --quick  fewer rounds, written nowhere

Every rank has a group of torch's `fake` backend (the no-op: torch's own half of a call,
and nothing else), of both adapters of unisono, and of gloo, and takes turns with them
and with unisono's own call on a NumPy array, round by round. With one rank nobody waits
for anybody, so the CPU time of the calling thread is what a call costs; with more a
rank also waits for the others. The lowest of the rounds is what a call takes when no
other process has the core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import torch.testing._internal.distributed.fake_pg  # isort: skip  # registers the no-op
from unisono.interop.torch import adapter_of, compiled
from unisono.interop.torch.adapters import VARIABLE
from unisono.interop.torch.rendezvous import GroupRendezvous

RANKS: Any = import_module("torch_ranks")  # beside this file
RESULTS = Path(__file__).parent / "results" / "torch_calls.json"
ROUNDS, TIMES = 61, 50
NOTHING, OWN = "no-op", "own"
GROUPS = (NOTHING, "python", "compiled", "gloo")

Call = Callable[[], object]
Row = dict[str, Any]


def group_of(name: str) -> Any:
    """A group of all ranks that has this backend or adapter."""
    if name in ("no-op", "gloo"):
        return dist.new_group(backend="fake" if name == "no-op" else name)
    os.environ[VARIABLE] = name
    group = dist.new_group(backend="unisono")
    assert adapter_of(group) == name
    return group


def calls(group: dist.ProcessGroup) -> dict[str, Call]:
    """The calls to measure, of 8 bytes for each rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x, rows, other = torch.zeros(2), torch.zeros(2 * n), torch.zeros(2 * n)
    found: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "all_reduce, async_op and wait": lambda: dist.all_reduce(
            x, group=group, async_op=True
        ).wait(),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            rows, x, group=group
        ),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            x, rows, group=group
        ),
        "all_to_all_single": lambda: dist.all_to_all_single(other, rows, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }
    if n == 2:
        found["send and recv, there and back"] = lambda: ping_pong(x, rank, group)
    return found


def own_calls(group: Any) -> dict[str, Call]:
    """The same as unisono's own calls on NumPy arrays."""
    rendezvous = GroupRendezvous.of(group.group_name)
    assert rendezvous is not None
    comm = rendezvous.communicator()
    x = np.zeros(2, np.float32)
    rows, other = np.zeros((2, 2 * comm.size), np.float32)
    return {
        "all_reduce": lambda: comm.all_reduce(x),
        "all_gather_into_tensor": lambda: comm.all_gather(x, out=rows),
        "reduce_scatter_tensor": lambda: comm.reduce_scatter(rows, out=x),
        "all_to_all_single": lambda: comm.all_to_all(rows, out=other),
        "broadcast": lambda: comm.broadcast(x),
        "barrier": comm.barrier,
    }


def ping_pong(x: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """One message each way."""
    both = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
    for one in both:
        one(x, 1 - rank, group=group)


def timed(call: Call, times: int) -> tuple[float, float]:
    """Seconds of one call, and those of the calling thread on its core."""
    dist.barrier()
    began, used = time.perf_counter(), time.thread_time()
    for _ in range(times):
        call()
    return (
        (time.perf_counter() - began) / times,
        (time.thread_time() - used) / times,
    )


def compared(what: dict[str, Call], rounds: int) -> Row:
    """Each by its turns: the lowest and the middle, and the CPU time of the lowest."""
    for call in what.values():
        for _ in range(3):
            call()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in what}
    for _ in range(rounds):
        for name, call in what.items():
            found[name].append(timed(call, TIMES // 10 if name == "gloo" else TIMES))
    return {
        name: {
            "lowest": min(wall for wall, _ in turns),
            "middle": median(wall for wall, _ in turns),
            "cpu": min(cpu for _, cpu in turns),
        }
        for name, turns in found.items()
    }


def measured(rounds: int) -> list[Row]:
    """All rows, on this rank."""
    groups = {name: group_of(name) for name in GROUPS}
    by_group = {name: calls(group) for name, group in groups.items()}
    dist.all_reduce(torch.zeros(1), group=groups["compiled"])
    by_group[OWN] = own_calls(groups["compiled"])
    rows = []
    for what in by_group[NOTHING]:
        these = {name: of[what] for name, of in by_group.items() if what in of}
        rows.append({"what": what, **compared(these, rounds)})
    return rows


def line(row: Row) -> str:
    """One row, for people: lowest / middle / CPU."""
    text = f"{row['n']} {row['what']:<31}"
    for name in (*GROUPS, OWN):
        if name not in row:
            continue
        figures = (f"{row[name][k] * 1e6:.1f}" for k in ("lowest", "middle", "cpu"))
        text += f"  {name} {' / '.join(figures)}"
    return text


def main() -> None:
    """Measure, print, and keep."""
    args = RANKS.options(__doc__)
    compiled.build()
    print("us of one call: lowest / middle / CPU of the calling thread", flush=True)
    rounds = 21 if args.quick else ROUNDS
    RANKS.report(args, (1, 2), measured, rounds, line, RESULTS)


if __name__ == "__main__":
    main()
