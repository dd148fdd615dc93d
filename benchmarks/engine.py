"""The engine beside the peers, in the same run: the tables of docs/performance.md.

    make bench                     prints them and writes benchmarks/results/engine.json
    python benchmarks/engine.py 2 --sizes 8,64M      a part of it, written nowhere
    python benchmarks/engine.py 2 4 8 16 --json FILE     written to that file

all_reduce for 2, 4 and 8 ranks and four more collectives for 2 and 4 (for all of them
where every rank has a core), in float32, with gloo, Open MPI and MPICH taking turns
with unisono as `unisono bench --vs` has them. A cell is our time over the best peer's,
in the middle of the rounds; `!` marks those that miss their target. The last table is
all_reduce over the floor that memory sets: on ordinary buffers the staged one, on
buffers from comm.empty the other.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from unisono.cli._bench import groups
from unisono.cli._bench.cases import case_of
from unisono.cli._bench.driver import BenchSettings, measure
from unisono.cli._bench.figures import BenchRow
from unisono.units import format_bytes, parse_bytes

RESULTS = Path(__file__).parent / "results" / "engine.json"
WORLDS = (2, 4, 8)
ALL_REDUCE = "8,64,1K,4K,16K,64K,256K,1M,16M,64M"
OTHERS = "64,16K,1M,16M,64M"
CORES = os.cpu_count() or 1
OTHER_COLLECTIVES = ("reduce_scatter", "all_gather", "all_to_all", "broadcast")
_ALL_REDUCE_TARGETS = {
    4 << 10: {2: 0.5, 4: 0.4, 8: 0.5},
    1 << 20: {2: 0.4, 4: 0.4, 8: 0.5},
    16 << 20: {2: 0.6, 4: 0.55, 8: 0.5},
    64 << 20: {2: 0.4, 4: 0.4, 8: 0.5},
}


def target(collective: str, n: int, size: int) -> float:
    """The largest ratio to the best peer that is good enough."""
    if max(WORLDS) < CORES and n <= CORES:
        return 0.5 if collective == "all_reduce" else 0.7
    if collective == "all_reduce":
        above = min(s for s in _ALL_REDUCE_TARGETS if size <= s)
        return _ALL_REDUCE_TARGETS[above][n]
    if collective == "reduce_scatter":
        return 0.6
    if collective == "broadcast":
        return 1.0 if n == 4 and size <= 64 else 0.7
    return 0.7 if size <= 1 << 20 else 0.95


def world(
    n: int, sizes: str, peers: Sequence[str], settings: BenchSettings
) -> Iterator[BenchRow]:
    """Every row of a number of ranks, as it is measured."""
    several = n in (2, 4) or n <= CORES
    with groups.running(["unisono", *peers], n) as started:
        for name in ("all_reduce", *(OTHER_COLLECTIVES if several else ())):
            chosen = sizes or (ALL_REDUCE if name == "all_reduce" else OTHERS)
            for size in chosen.split(","):
                case = case_of(name, n, parse_bytes(size), "float32", "sum", 0)
                yield from measure(case, started, [""], settings)


def on_shared_buffers(n: int) -> BenchRow:
    """all_reduce of 64 MiB on buffers from comm.empty."""
    with groups.running(["unisono"], n) as started:
        case = case_of("all_reduce", n, 64 << 20, "float32", "sum", 0)
        return measure(case, started, [""], BenchSettings(shared=True))[0]


def line(row: BenchRow) -> str:
    """One row, as it is printed while measuring."""
    case, ours = row.case, row.compared
    time_us = ours.seconds * 1e6 if ours else math.nan
    limit = target(case.collective, case.n, case.size)
    parts = [f"{case.collective:<15}{case.n:>2} {format_bytes(case.size):>8}"]
    parts.append(f"{row.algorithm:<20} {time_us:10.1f}")
    parts += [f"{name} {times.seconds * 1e6:.1f}" for name, times in row.peers.items()]
    parts.append(
        f"ratio {row.ratio:.2f} of {limit:g}{'' if row.ratio <= limit else ' !'}"
    )
    parts.append(f"wrong {row.wrong}" if row.wrong else "")
    return "  ".join(parts).rstrip()


def table(rows: Sequence[BenchRow], collective: str) -> Iterator[str]:
    """Ratios of one collective: sizes down, numbers of ranks across."""
    mine = [row for row in rows if row.case.collective == collective]
    worlds = sorted({row.case.n for row in mine})
    yield f"{collective:<16}" + "".join(f"{f'{n} ranks':>16}" for n in worlds)
    for size in sorted({row.case.size for row in mine}):
        cells = []
        for n in worlds:
            found = [r for r in mine if (r.case.n, r.case.size) == (n, size)]
            ratio = found[0].ratio if found else math.nan
            limit = target(collective, n, size)
            mark = " " if not ratio > limit else "!"
            cells.append(f"{ratio:8.2f}{mark} /{limit:5g}")
        yield f"{format_bytes(size):<16}" + "".join(cells)


def floors(rows: Sequence[BenchRow], shared: Sequence[BenchRow]) -> Iterator[str]:
    """How near all_reduce of 64 MiB comes to the floor."""
    large = [r for r in rows if r.case.collective == "all_reduce"]
    for name, some in (("ordinary", large), ("comm.empty", shared)):
        for row in some:
            if row.case.size == 64 << 20 and row.compared:
                seconds, floor = row.compared.seconds, row.floor_s
                yield (
                    f"all_reduce 64 MiB, {row.case.n} ranks, {name} buffers: "
                    f"{seconds * 1e3:.2f} ms, floor {floor * 1e3:.2f} ms, "
                    f"{seconds / floor:.2f} times it"
                )


def gloo_line(rows: Sequence[BenchRow]) -> str:
    """How many times faster than gloo."""
    ratios = [1 / r.ratio_to("gloo") for r in rows if r.ratio_to("gloo") > 0]
    if not ratios:
        return "gloo was not measured"
    least, middle = min(ratios), median(ratios)
    return f"faster than gloo: {least:.1f} times at least, median {middle:.1f}"


def main() -> int:
    """Measure, print and write down; 1 if an element was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", nargs="*", type=int, help="2, 4 and 8 if not given")
    parser.add_argument("--sizes", default="", help="only these, as 8,16K,64M")
    parser.add_argument("--peers", default=",".join(groups.PEERS))
    parser.add_argument("--rounds", type=int, default=5, help="of all systems in turns")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    peers = [name for name in args.peers.split(",") if name]
    rows: list[BenchRow] = []
    try:
        for n in args.ranks or WORLDS:
            for row in world(n, args.sizes, peers, BenchSettings(rounds=args.rounds)):
                rows.append(row)
                print(line(row), flush=True)
        shared = [on_shared_buffers(n) for n in args.ranks or WORLDS]
    except KeyboardInterrupt:
        shared = []
    for collective in dict.fromkeys(row.case.collective for row in rows):
        print("\n" + "\n".join(table(rows, collective)))
    print("\n" + "\n".join([*floors(rows, shared), gloo_line(rows)]))
    kept = args.json or (None if args.ranks or args.sizes else RESULTS)
    if kept:
        machine = f"{platform.machine()}, {platform.system()}, {CORES} cores"
        plain = [row.plain() for row in rows + shared]
        document = {"machine": machine, "rows": [_short(row) for row in plain]}
        kept.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(row.wrong for row in rows) else 0


def _short(row: dict[str, object]) -> dict[str, object]:
    """Without the times of single calls, of which the statistics remain."""
    return {
        key: {k: v for k, v in value.items() if not isinstance(v, list)}
        if key.endswith("_per_iter") and isinstance(value, dict)
        else value
        for key, value in row.items()
    }


if __name__ == "__main__":
    sys.exit(main())
