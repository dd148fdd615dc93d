"""What encryption costs: all_reduce between two ranks over loopback, with and without.

    python benchmarks/encryption.py     prints a table, writes results/encryption.json

Pairs of processes take turns, three of each kind. The time is the median of a pair's
calls, the best of its pairs; the processor time is that of rank 0, its share of the
kernel's work included, which other programs on the machine disturb less.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from importlib import import_module
from pathlib import Path

import numpy as np

from unisono.runtime.communicator import Communicator
from unisono.testing import world_across
from unisono.units import format_bytes

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "encryption.json"
SIZES = [8, 64 << 10, 1 << 20, 16 << 20]
ROUNDS = 3


def measure(comm: Communicator, sizes: list[int]) -> list[tuple[float, float]]:
    """Microseconds for each size: from begin to end, and of the processor."""
    found: list[tuple[float, float]] = []
    for nbytes in sizes:
        x = np.ones(nbytes // 4, np.float32)
        out = np.empty_like(x)
        repeats = max(9, min(400, (64 << 20) // nbytes))
        taken: list[float] = []
        for _ in range(3):
            comm.all_reduce(x, out=out)
        worked = time.process_time()
        for _ in range(repeats):
            begun = time.perf_counter()
            comm.all_reduce(x, out=out)
            taken.append(time.perf_counter() - begun)
        worked = (time.process_time() - worked) / repeats
        found.append((statistics.median(taken) * 1e6, worked * 1e6))
    return found


def main() -> None:
    """Measure, print and keep."""
    encryption = import_module("encryption")  # as other processes know this file

    result = {"plain": "", "tls": "mutual"}
    found: dict[str, list[list[tuple[float, float]]]] = {
        option: [] for option in result
    }
    for _ in range(ROUNDS):
        for option, tls in result.items():
            path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
            env = {"UNISONO_TLS": tls, "PYTHONPATH": path}
            pair = world_across([1, 1], env=env, timeout_s=300)
            found[option].append(pair.run(encryption.measure, SIZES)[0])
    kept: list[dict[str, object]] = []
    print(f"{'':>8}{'time, us':>24}{'processor, us':>28}")
    print(f"{'size':>8}" + f"{'plain':>10}{'tls':>10}{'ratio':>7}" * 2)
    for at, nbytes in enumerate(SIZES):
        line, row = f"{format_bytes(nbytes):>8}", {"nbytes": nbytes}
        for kind, name in enumerate(("time_us", "processor_us")):
            plain, tls_ = (min(r[at][kind] for r in found[option]) for option in result)
            line += f"{plain:10.0f}{tls_:10.0f}{tls_ / plain:7.2f}"
            row |= {f"plain_{name}": round(plain), f"tls_{name}": round(tls_)}
        kept.append(dict(row))
        print(line)
    record = {"machine": platform.machine(), "cores": os.cpu_count(), "sizes": kept}
    RESULTS.write_text(
        json.dumps(record | {"load": os.getloadavg()[0]}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
