"""How fast codecs encode and decode, and what they lose, beside others in the same run.

    make bench          prints the tables and writes benchmarks/results/codecs.json

A speed is the bytes read and written over the fastest of many interleaved runs, on one
core, with arrays of 16 MiB of float32. Beside it stands a plain copy that reads and
writes as many bytes, and the casts of ml_dtypes and torch, which have no scales and so
do less. An error is relative and root mean square, of one encoding, for Gaussian values
and for heavy tails (Student's t with three degrees of freedom); the first is what
`codec.error` says.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from unisono import codecs
from unisono.dtypes import numpy_dtype
from unisono.units import format_table

RESULTS = Path(__file__).parent / "results" / "codecs.json"
COUNT = 4 << 20
ROUNDS = 61

# What others call the codes, where they have such a type.
CASTS: dict[str, tuple[Any, Any]] = {
    "fp16": (np.float16, torch.float16),
    "bf16": (ml_dtypes.bfloat16, torch.bfloat16),
    "fp8": (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, torch.float8_e5m2),
    "mxfp8": (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    "int8": (np.int8, torch.int8),
}

Runs = dict[str, Callable[[], object]]


def cast(to: Any, source: Any) -> None:
    """NumPy's own conversion, into memory that is there."""
    with np.errstate(all="ignore"):
        np.copyto(to, source, casting="unsafe")


def by_others(name: str, x: Any) -> Runs:
    """The casts of NumPy with ml_dtypes, and of torch, there and back."""
    if name not in CASTS:
        return {}
    small, tensor_type = CASTS[name]
    low, wide = np.empty(x.size, small), room(x.size, "float32")
    tensor, back = torch.from_numpy(x), torch.empty(x.size)
    short = torch.empty(x.size, dtype=tensor_type)
    return {
        "ml_dtypes encode": partial(cast, low, x),
        "ml_dtypes decode": partial(cast, wide, low),
        "torch encode": partial(short.copy_, tensor),
        "torch decode": partial(back.copy_, short),
    }


def room(count: int, dtype: str) -> Any:
    """An array that begins at a cache line, as torch's do and NumPy's need not."""
    nbytes = count * numpy_dtype(dtype).itemsize
    return torch.empty(nbytes, dtype=torch.uint8).numpy().view(numpy_dtype(dtype))


def candidates(spec: str, source: str, option: str) -> tuple[Runs, int]:
    """What is measured for one codec, ready to run, and the bytes that it moves."""
    codec = codecs.get(spec)
    wide = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    x, out = room(COUNT, source), room(COUNT, source)
    x[:] = wide.astype(x.dtype)
    code = codec.encode(x, out=room(codec.nbytes(COUNT), "uint8"))
    moved = x.nbytes + code.nbytes
    here, there = room(moved // 2, "uint8"), room(moved // 2, "uint8")
    there[:] = 1
    key = codecs.key(1, 1)
    runs: Runs = {
        "copy": partial(np.copyto, here, there),
        "encode": partial(codec.encode, x, out=code, by=option),
        "decode": partial(codec.decode, code, COUNT, out=out, by=option),
        "add": partial(codec.add, out, code, by=option),
    }
    if source == "float32" and option == codecs.ways()[0]:
        runs |= by_others(spec, x)
        if codec.name != "onebit":
            runs["by chance"] = partial(codec.encode, x, key, out=code, by=option)
    return runs, moved


def measure(spec: str, source: str, option: str) -> dict[str, Any]:
    """Speeds in GB/s, and encoding and decoding over a plain copy of as many bytes."""
    runs, moved = candidates(spec, source, option)
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(ROUNDS):
        for who, run in runs.items():
            if turn >= 3 and who.startswith("ml_dtypes"):  # slow, and steady
                continue
            began = time.perf_counter()
            run()
            best[who] = min(best[who], time.perf_counter() - began)
    row: dict[str, Any] = {"codec": spec, "source": source, "by": option}
    row |= {who: round(moved / seconds / 1e9, 2) for who, seconds in best.items()}
    for who in ("encode", "decode", "add"):
        row[f"{who} / copy"] = round(best["copy"] / best[who], 2)
    return row


def error(spec: str, x: Any) -> float:
    """The relative root mean square error of one encoding."""
    codec = codecs.get(spec)
    code = codec.encode(x, codecs.key(1, 1) if codec.stochastic else 0)
    lost = codec.decode(code, x.size).astype(float) - x
    return float(np.sqrt(np.mean(lost**2) / np.mean(x.astype(float) ** 2)))


def errors() -> list[dict[str, Any]]:
    """Size and error of every codec, for two kinds of values."""
    rng = np.random.default_rng(1)
    gaussian = rng.standard_normal(1 << 20).astype(np.float32)
    heavy = rng.standard_t(3, 1 << 20).astype(np.float32)
    specs = [s for name in codecs.NAMES for s in (name, f"{name}:stochastic")]
    specs = [*specs[:-1], "fp8:block=32", "int8:block=32", "int4:block=32"]
    return [
        {
            "codec": spec,
            "bytes per element": codecs.get(spec).nbytes(1 << 20) / (1 << 20),
            "predicted": codecs.get(spec).error,
            "Gaussian": float(f"{error(spec, gaussian):.3g}"),
            "heavy tails": float(f"{error(spec, heavy):.3g}"),
        }
        for spec in specs
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as one table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[str(row.get(name, "")) for name in names] for row in rows]
    print(*format_table(names, cells, right=True), "", sep="\n", flush=True)


def main() -> None:
    """Measure, print and write down."""
    torch.set_num_threads(1)
    lost = errors()
    show(lost)
    first, *others = codecs.ways()[:-1]
    rows = [measure(name, "float32", first) for name in codecs.NAMES]
    rows += [measure(name, "bfloat16", first) for name in ("fp8", "int8")]
    rows += [
        measure(n, "float32", option) for option in others for n in ("fp8", "int8")
    ]
    show(rows)
    machine = f"{platform.machine()}, {', '.join(codecs.ways()[:-1])}"
    found = {"machine": machine, "errors": lost, "speeds": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
