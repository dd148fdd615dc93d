"""Codecs on slow links: how much sooner is an all_reduce done, and from what size on?

    sudo .venv/bin/python benchmarks/codecs_network.py [hosts] [ranks per host] [rate]

The hosts are network namespaces, their links have a rate that the kernel keeps: a token
bucket, which lets a little through at once when it has been idle, so before every call
it is emptied. Every
size is measured as values and as codes, in turn, the best of some calls. The break-even
size is that from which on codes are quicker; the model's is computed with the rate of
the link, and with the time of the smallest calls for what a message takes to start.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from unisono import Communicator
from unisono.algorithms import read
from unisono.dtypes import DTYPES
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.observe.explain_codecs import seconds
from unisono.runtime.plan.codec_options import as_coding, choose_coded
from unisono.runtime.plan.plans import CallKind
from unisono.runtime.plan.predict import MODEL, CostModel
from unisono.testing import Hosts, hosts_available, world_across
from unisono.units import format_bytes, format_seconds

RESULTS = Path(__file__).parent / "results" / "codecs_network.json"
PAYLOAD = 1448 / 1514
"""Of a full packet on a link with frames of 1,514 bytes, what is ours."""
SIZES = [1 << k for k in (6, 10, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 26)]
FILLER = 1 << 18
SPECS = ["", "fp8", "int8", "int4", "fp16"]


def timed(comm: Communicator, sizes: list[int], specs: list[str]) -> dict[str, Any]:
    """Seconds of one all_reduce of each size with each codec, the best of some."""
    best: dict[str, dict[str, float]] = {spec: {} for spec in specs}
    filler = np.zeros(FILLER // 4, np.float32)
    wrong: dict[str, float] = {}
    for nbytes in sizes:
        calls = 6 if nbytes > 1 << 23 else 30
        x = np.random.default_rng(comm.rank).standard_normal(nbytes // 4)
        x = x.astype(np.float32)
        exact = comm.all_reduce(x.astype(np.float64))
        for number in range(calls):
            for spec in specs:
                y = x.copy()
                comm.all_reduce(filler)  # leaves nothing in the bucket
                comm.barrier()
                begun = time.perf_counter()
                comm.all_reduce(y, codec=spec or None)
                took = np.array([time.perf_counter() - begun])
                comm.all_reduce(took, op="max")
                known = best[spec].get(str(nbytes), 9e9)
                if number:  # the first makes plans and opens streams
                    best[spec][str(nbytes)] = min(known, float(took[0]))
                lost = float(((y - exact) ** 2).sum() / (exact**2).sum())
                wrong[spec] = lost**0.5
    return {"seconds": best, "error": wrong}


def modelled(nbytes: int, spec: str, hosts: tuple[int, ...], model: CostModel) -> Any:
    """Predicted seconds with the codec and without."""
    n, coding, dtype = len(hosts), as_coding(spec), DTYPES["float32"]
    choice = choose_coded("all_reduce", nbytes, n, coding, itemsize=4, hosts=hosts)
    kind = CallKind(
        *("all_reduce", dtype, Reduction("sum"), 0, nbytes // 4),
        *(read(choice.algorithm), "", coding),
    )
    return seconds(kind, n, hosts, nbytes, model)


def break_even(pairs: dict[int, tuple[float, float]]) -> int | None:
    """The smallest size from which on codes are always quicker."""
    found = None
    for nbytes in sorted(pairs, reverse=True):
        coded, plain = pairs[nbytes]
        if coded >= plain:
            break
        found = nbytes
    return found


def main(hosts: int = 2, per_host: int = 1, rate: str = "1gbit") -> None:
    """Measure, print a table, and keep it."""
    if why := hosts_available():
        sys.exit(f"benchmarks/codecs_network.py: {why}")
    with Hosts(hosts, rate=rate) as links:
        world = world_across([per_host] * hosts, on=links, timeout_s=300)
        result = world.run(timed, SIZES, SPECS)[0]
    placed = tuple(r // per_host for r in range(hosts * per_host))
    bits = float(rate.removesuffix("gbit")) * 1e9
    # One step, to one other host and back: what the smallest call takes but for bytes.
    start = result["seconds"][""][str(SIZES[0])]
    model = replace(MODEL, byte=8 / (bits * PAYLOAD), start=start, message=0.0)
    result["model"] = {}
    print(f"all_reduce of float32 on {hosts} hosts of {per_host} at {rate}")
    for spec in SPECS[1:]:
        measured = {
            s: (result["seconds"][spec][str(s)], result["seconds"][""][str(s)])
            for s in SIZES
        }
        predicted = {s: modelled(s, spec, placed, model)[:2] for s in SIZES}
        result["model"][spec] = {str(s): predicted[s] for s in SIZES}
        whole = measured[SIZES[-1]]
        even = [break_even(measured), break_even(predicted)]
        result.setdefault("break_even", {})[spec] = even
        print(
            f"{spec:6} {format_bytes(SIZES[-1])}: {format_seconds(whole[0])} against "
            f"{format_seconds(whole[1])}, {whole[1] / whole[0]:.2f} times quicker "
            f"(model {predicted[SIZES[-1]][1] / predicted[SIZES[-1]][0]:.2f}); error "
            f"{result['error'][spec]:.3%}; pays from {even[0]} bytes on, "
            f"model {even[1]}"
        )
    kept = {"hosts": hosts, "per_host": per_host, "rate": rate, **result}
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[f"{hosts}x{per_host} at {rate}"] = kept
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    given = sys.argv[1:]
    # By its name, so that ranks find its functions.
    import_module("codecs_network").main(*map(int, given[:2]), *given[2:])
