"""How fast what travels between hosts is checked: checksums, and seals of frames.

    make bench          prints the tables and writes benchmarks/results/wire.json

A checksum's figure is the fastest of several interleaved runs over the same bytes, so
all but the largest lie in a cache. A seal is the keyed checksum of one header and the
checksum of its payload, called from Python, whose share is shown as the empty call.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from unisono import _native
from unisono.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "wire.json"
SIZES = [64, 512, 4 << 10, 64 << 10, 1 << 20, 64 << 20]
ROUNDS = 7


def seconds(run: Callable[[], object], repeats: int) -> float:
    """How long one run takes, on average over some."""
    begun = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - begun) / repeats


def checksums(nbytes: int) -> dict[str, float]:
    """GB/s of every way that this machine has."""
    data = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    options = _native.crc32c_ways()
    best = dict.fromkeys(options, float("inf"))
    for _ in range(ROUNDS):
        for number, option in enumerate(options):
            run = partial(_native.crc32c, data, 0, number)
            best[option] = min(best[option], seconds(run, max(1, (4 << 20) // nbytes)))
    return {option: round(nbytes / taken / 1e9, 2) for option, taken in best.items()}


def seals() -> dict[str, float]:
    """Microseconds to seal a frame without payload, and for a call without work."""
    seal = _native.Seal(bytes(16), 0)
    runs: dict[str, Callable[[], object]] = {
        "seal": partial(seal.seal, b"", 1),
        "empty call": partial(_native.crc32c, b""),
    }
    return {
        name: round(min(seconds(run, 10_000) for _ in range(ROUNDS)) * 1e6, 3)
        for name, run in runs.items()
    }


def main() -> None:
    """Measure, print and keep."""
    found: dict[str, object] = {"machine": platform.machine(), "unit": "GB/s"}
    rates = {nbytes: checksums(nbytes) for nbytes in SIZES}
    print("CRC32C, GB/s in one thread, from Python")
    print(f"{'size':>8}" + "".join(f"{option:>10}" for option in rates[SIZES[0]]))
    for nbytes, by in rates.items():
        cells = "".join(f"{rate:10.2f}" for rate in by.values())
        print(f"{format_bytes(nbytes):>8}{cells}")
    found["crc32c"] = {str(nbytes): by for nbytes, by in rates.items()}
    found["microseconds"] = sealing = seals()
    print(" · ".join(f"{name} {us:.2f} µs" for name, us in sealing.items()))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
