"""How fast several arrays are reduced into one, beside NumPy and torch in the same run.

    make bench          prints the table and writes benchmarks/results/reductions.json

First sums of arrays of 16 MiB each, beyond the caches of most cores. A figure is the
bytes read and written over the fastest of several interleaved runs. NumPy and torch
take one pass for each source after the first; torch rounds small floats after each.

Then every type and operation on two arrays of 1 MiB: the time that a copy of as many
bytes takes over that of the kernel, both the fastest of many interleaved runs.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.dtypes import DTYPES as DTYPES_KNOWN
from unisono.dtypes import check_op, numpy_dtype
from unisono.errors import BadArgument
from unisono.reductions import reduce, ways

RESULTS = Path(__file__).parent / "results" / "reductions.json"
NBYTES = 16 << 20
SMALL_NBYTES, SMALL_ROUNDS = 1 << 20, 25
DTYPES = (
    "float32",
    "float64",
    "int32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
)


def by_numpy(out: Any, sources: list[Any]) -> None:
    """One pass for each source after the first."""
    np.add(sources[0], sources[1], out=out)
    for source in sources[2:]:
        np.add(out, source, out=out)


def by_torch(out: Any, sources: list[Any]) -> None:
    """The same in torch."""
    torch.add(sources[0], sources[1], out=out)
    for source in sources[2:]:
        out.add_(source)


def candidates(name: str, num_sources: int) -> dict[str, Callable[[], object]]:
    """What can add arrays of this type, ready to run."""
    count = NBYTES // numpy_dtype(name).itemsize
    arrays = [np.ones(count, numpy_dtype(name)) for _ in range(num_sources + 1)]
    found: dict[str, Callable[[], object]] = {
        option: partial(reduce, arrays[0], arrays[1:], by=option)
        for option in ways()[:-1]
    }
    if name in ("float32", "float64", "int32", "float16"):
        found["numpy"] = partial(by_numpy, arrays[0], arrays[1:])
    if not name.startswith("float8"):
        tensors = [torch.ones(count, dtype=getattr(torch, name)) for _ in arrays]
        found["torch, one thread"] = partial(by_torch, tensors[0], tensors[1:])
    return found


def measure(name: str, num_sources: int) -> dict[str, object]:
    """The bandwidth of every candidate, in GB/s, from interleaved runs."""
    runs = candidates(name, num_sources)
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(9):
        for who, run in runs.items():
            began = time.perf_counter()
            run()
            best[who] = min(best[who], time.perf_counter() - began)
    moved = (num_sources + 1) * NBYTES
    row: dict[str, object] = {"dtype": name, "sources": num_sources}
    return row | {who: round(moved / seconds / 1e9, 2) for who, seconds in best.items()}


def of_a_copy(name: str, op: str) -> dict[str, object] | None:
    """How fast two arrays are reduced, as a part of a copy of the same traffic."""
    try:
        check_op(DTYPES_KNOWN[name], op)
    except BadArgument:
        return None
    count = SMALL_NBYTES // numpy_dtype(name).itemsize
    arrays = [np.ones(count, numpy_dtype(name)) for _ in range(3)]
    a, b = np.ones((2, 3 * SMALL_NBYTES // 2), np.uint8)
    runs: dict[str, Callable[[], object]] = {
        option: partial(reduce, arrays[0], arrays[1:], op, by=option)
        for option in ways()[:-1]
    } | {"copy": partial(np.copyto, a, b)}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(SMALL_ROUNDS):
        for who, run in runs.items():
            for _ in range(3):  # the first finds the caches as another has left them
                began = time.perf_counter()
                run()
                best[who] = min(best[who], time.perf_counter() - began)
    row: dict[str, object] = {"dtype": name, "op": op}
    copy_s = best.pop("copy")
    return row | {who: round(copy_s / seconds, 2) for who, seconds in best.items()}


def main() -> None:
    """Measure, print and write down."""
    torch.set_num_threads(1)
    rows = []
    for name in DTYPES:
        for num_sources in (2, 4, 8):
            rows.append(measure(name, num_sources))
            print(rows[-1], flush=True)
    parts = []
    for name in DTYPES_KNOWN:
        for op in ("sum", "prod", "min", "max"):
            if (row := of_a_copy(name, op)) is not None:
                parts.append(row)
                print(row, flush=True)
    machine = f"{platform.machine()}, {', '.join(ways()[:-1])}"
    RESULTS.parent.mkdir(exist_ok=True)
    found = {"machine": machine, "rows": rows, "of_a_copy": parts}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
