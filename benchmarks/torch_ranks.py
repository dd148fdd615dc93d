"""Processes of torch.distributed that measure together, for the benchmarks beside this.

The group of all ranks is gloo's; what is measured makes groups of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
import torch.multiprocessing

Row = dict[str, Any]
Measure = Callable[[Any], list[Row]]


def options(description: str | None) -> argparse.Namespace:
    """The command line: numbers of ranks, and --quick."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("n", nargs="*", type=int, default=[])
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def report(
    args: argparse.Namespace,
    worlds: Sequence[int],
    measure: Measure,
    given: Any,
    line: Callable[[Row], str],
    results: Path,
) -> None:
    """Print all rows of each world; those of a whole run are kept."""
    rows = []
    for n in args.n or worlds:
        for row in world(n, measure, given):
            print(line(row), flush=True)
            rows.append(row)
    if not args.n and not args.quick:
        results.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"written to {results}")


def world(n: int, measure: Measure, given: Any) -> list[Row]:
    """The rows that the first of n ranks has measured by `measure(given)`."""
    with tempfile.TemporaryDirectory() as folder:
        start: Any = vars(torch.multiprocessing)["spawn"]
        start(rank_main, (n, folder, measure, given), nprocs=n)
        found: list[Row] = json.loads(Path(folder, "rows.json").read_text())
    return [{"n": n, **row} for row in found]


def rank_main(rank: int, n: int, folder: str, measure: Measure, given: Any) -> None:
    """One rank."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    torch.set_num_threads(1)
    store = c10d.FileStore(f"{folder}/store", n)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    rows = measure(given)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
