"""Collectives between hosts, beside gloo on the same loopback.

    .venv/bin/python benchmarks/network.py [ranks ...] [--sizes 64K,1M,8M,64M,256M]
        [--collectives all_reduce,all_gather,reduce_scatter,broadcast,all_to_all]

Each rank is alone on an emulated host, so everything goes over TCP; ranks of gloo are
processes of the same machine. Runs take turns; a ratio is our time over gloo's, in the
middle of the rounds. UNISONO_LANES and UNISONO_IO_THREADS hold as everywhere: without
them, ranks use the cores that the machine has for them (`comm.explain` shows it).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from unisono.cli._bench import groups
from unisono.cli._bench.cases import case_of
from unisono.cli._bench.devices import Placement
from unisono.cli._bench.driver import BenchSettings, measure
from unisono.cli._bench.figures import BenchRow
from unisono.transports.lanes import choose_lanes
from unisono.transports.session import cores_here
from unisono.units import format_bytes, parse_bytes

RESULTS = Path(__file__).parent / "results" / "network.json"
WORLDS = (2, 4, 8)
SIZES = "64K,1M,8M,64M,256M"
COLLECTIVES = "all_reduce,all_gather,reduce_scatter,broadcast,all_to_all"


def target(collective: str, size: int) -> float:
    """The largest ratio to gloo that is good enough, with a core for every rank."""
    if collective != "all_reduce":
        return 0.7
    return 0.15 if size <= 64 << 10 else 0.5 if size <= 1 << 20 else 0.6


def world(n: int, collectives: Sequence[str], sizes: str) -> Iterator[BenchRow]:
    """Every row of a number of ranks, as it is measured."""
    with groups.running(["unisono", "gloo"], n, Placement(per_host=1)) as started:
        for name in collectives:
            for size in sizes.split(","):
                case = case_of(name, n, parse_bytes(size), "float32", "sum", 0)
                yield from measure(case, started, [""], BenchSettings())


def line(row: BenchRow) -> str:
    """One row, as it is printed while measuring."""
    case, ours, peer = row.case, row.compared, row.peers.get("gloo")
    limit = target(case.collective, case.size)
    parts = [f"{case.collective:<15}{case.n:>2} {format_bytes(case.size):>8}"]
    parts.append(f"{row.algorithm:<16}")
    parts.append(f"{ours.seconds * 1e6:10.1f} us" if ours else "         -")
    parts.append(f"gloo {peer.seconds * 1e6:10.1f} us" if peer else "gloo -")
    mark = "" if row.ratio <= limit else " !"
    parts.append(f"ratio {row.ratio:.2f} of {limit:g}{mark}")
    parts.append(f"wrong {row.wrong}" if row.wrong else "")
    return "  ".join(parts).rstrip()


def main() -> int:
    """Measure, print and write down; 1 if an element was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", nargs="*", type=int, help="2, 4 and 8 if not given")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--collectives", default=COLLECTIVES)
    args = parser.parse_args()
    rows: list[BenchRow] = []
    for n in args.ranks or WORLDS:
        print(f"{n} ranks: {choose_lanes(cores_here(), n)}", flush=True)
        for row in world(n, args.collectives.split(","), args.sizes):
            rows.append(row)
            print(line(row), flush=True)
    if (args.sizes, args.collectives) == (SIZES, COLLECTIVES) and not args.ranks:
        found = [
            [row.case.collective, row.case.n, row.case.size, round(row.ratio, 3)]
            for row in rows
        ]
        document = {"cores": os.cpu_count(), "ratios": found}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
