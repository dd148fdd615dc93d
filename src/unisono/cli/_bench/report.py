"""The table, JSON and CSV: nccl-tests' columns and keys first, then ours.

Lines that are not rows begin with `#`, and a row has the thirteen columns of nccl-tests
in its widths; in-place or out-of-place columns that a collective does not have show
N/A, and so does the bus bandwidth of ranks that share a GPU. To their right:

    algorithm   what unisono ran
    i_p99       the 99th percentile of single calls, in the place compared (µs)
    floor       the share of the memory floor reached, from 1 MiB on; on GPUs instead
    copy        the share of the copy speed of the GPU that all ranks share, likewise
    PEER        the peer's time (µs), and at the end
    ratio       our time over the best peer's, in the place compared
"""

from __future__ import annotations

import csv
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import IO, Any

import unisono
from unisono.cli._bench.cases import TYPE_NAMES
from unisono.cli._bench.devices import DeviceUse, Placement
from unisono.cli._bench.driver import BenchSettings
from unisono.cli._bench.figures import BenchRow, Timing, per_iteration
from unisono.cli._bench.groups import SystemGroup
from unisono.units import format_bandwidth, format_bytes

_JSON_VERSION = 3
"""The version of nccl-tests' JSON whose keys these are."""

_FIRST = ("size", "count", "type", "redop", "root")
_TIMES = ("time", "algbw", "busbw", "#wrong")
_WIDTHS = (10, 12, 8, 6, 6, *(7, 6, 6, 6) * 2)
_UNITS = ("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2)


_ABOVE_THE_FLOOR = (
    "floor above 100 %: sums were read from caches; the floor is copies through memory"
)


class BenchReport:
    """All results so far, and their tables."""

    def __init__(
        self,
        arguments: dict[str, Any],
        plan: BenchSettings,
        peers: Sequence[str],
        place: Placement,
    ) -> None:
        """Nothing is known yet but how it will be measured."""
        self.arguments = arguments
        self.plan = plan
        self.peers = list(peers)
        self.place = place
        self.use: DeviceUse | None = None
        self.rows: list[BenchRow] = []
        self.devices: list[dict[str, Any]] = []
        self.interrupted = False
        self.began = _now()
        self.load = os.getloadavg()[0]

    def add_devices(self, group: SystemGroup, use: DeviceUse | None) -> None:
        """Where the ranks of unisono are."""
        self.use = use
        places = [(rank, _processor()) for rank in range(group.n)]
        if use is not None:
            places = [(device.ordinal, device.name) for device in use.devices]
        self.devices = [
            {
                "rank": rank,
                "group": 0,
                "pid": pid,
                "hostname": socket.gethostname(),
                "device": number,
                "device_hex": "",
                "device_info": name,
            }
            for rank, (pid, (number, name)) in enumerate(
                zip(group.pids, places, strict=True)
            )
        ]

    @property
    def wrong(self) -> int:
        """Wrong elements of unisono, all together."""
        return sum(row.wrong for row in self.rows)

    @property
    def average_busbw(self) -> float | None:
        """The mean bus bandwidth of all rows and both places; None without links."""
        if self.use is not None and not self.use.has_links:
            return None
        bandwidths = [
            row.bandwidths(times)[1]
            for row in self.rows
            for times in (row.out_of_place, row.in_place)
        ]
        known = [value for value in bandwidths if math.isfinite(value)]
        return fmean(known) if known else 0.0

    def preamble(self) -> Iterator[str]:
        """The lines before anything is measured."""
        arguments = self.arguments
        grow = (
            f"{arguments['step']}(bytes)"
            if arguments["step"]
            else f"{arguments['factor']}(factor)"
        )
        plan = self.plan
        yield f"# unisono version {unisono.__version__}, columns of nccl-tests"
        yield f"# Collective test starting: {arguments['collective']}"
        yield (
            f"# nRanks {arguments['n']} minBytes {arguments['minimum']} maxBytes "
            f"{arguments['maximum']} step: {grow} "
            f"warmup iters: {_or_auto(plan.warmup, -1)} "
            f"iters: {_or_auto(plan.iterations, 0)} rounds: {plan.rounds} "
            f"validation: {int(plan.check)}"
        )
        yield (
            "# time: median over rounds of the slowest rank's mean; "
            "barrier before a batch, none within; perf_counter"
        )
        yield from self._placement_lines()
        cores = os.cpu_count() or 1
        if self.load > 0.5 * cores:
            yield (
                f"# note: other processes are running, with a load of {self.load:.1f} "
                f"on {cores} cores; times will be too long and ratios uncertain"
            )
        yield "#"

    def _placement_lines(self) -> Iterator[str]:
        if self.place.on_device:
            yield (
                f"# ranks: {self.place.ranks_as}, on CUDA devices; the host waits for "
                "them at the end of a batch, and after each single call (i_p99)"
            )
            yield '# buffers: comm.empty(device="cuda")'
        elif self.plan.shared:
            yield "# buffers: comm.empty (shared memory)"

    def device_lines(self) -> Iterator[str]:
        """Where the ranks are, in the format of nccl-tests."""
        yield "# Using devices"
        for d in self.devices:
            yield (
                f"#  Rank {d['rank']:2d} Group {d['group']:2d} Pid {d['pid']:6d} on "
                f"{d['hostname']:>10} device {d['device']:2d} [{self.place.device}] "
                f"{d['device_info']}"
            )
        if self.use is not None:
            for note in self.use.notes(self.place):
                yield f"# note: {note}"
            if math.isfinite(self.use.copy_speed):
                speed = format_bandwidth(self.use.copy_speed)
                yield f"# copy: {speed}, read and written, by the driver on the device"

    @property
    def ruler(self) -> str:
        """The names of the columns, each of which ends where its name does."""
        names = (*_FIRST, *_TIMES, *_TIMES)
        more = [name for name, _ in self._own_heads()]
        return (_line(names, _WIDTHS) + self._own_line(more)).rstrip()

    def header(self, collective: str) -> Iterator[str]:
        """The lines above the rows of one collective."""
        _, units = zip(*self._own_heads(), strict=True)
        yield "#" if collective == self.arguments["collective"] else f"# {collective}"
        blank = _line([""] * len(_FIRST), _WIDTHS)
        yield blank + "           out-of-place                       in-place          "
        yield self.ruler
        yield (_line(_UNITS, _WIDTHS) + self._own_line(units)).rstrip()

    def line(self, row: BenchRow) -> str:
        """One row."""
        case = row.case
        cells = [str(case.size), str(case.count)]
        cells += [TYPE_NAMES.get(case.dtype, case.dtype), case.redop]
        cells += [str(case.shown_root)]
        for times in (row.out_of_place, row.in_place):
            cells += _time_cells(row, times)
        text = _line(cells, (12, *_WIDTHS[1:]), start="")
        return (text + self._own_line(self._own_cells(row))).rstrip()

    def _own_heads(self) -> list[tuple[str, str]]:
        bound = "copy" if self.place.on_device else "floor"
        heads = [("algorithm", ""), ("i_p99", "(us)"), (bound, "(share)")]
        heads += [(name, "(us)") for name in self.peers]
        return heads + ([("ratio", "")] if self.peers else [])

    def _own_cells(self, row: BenchRow) -> list[str]:
        ours, share = row.compared, row.floor_share
        if self.place.on_device:
            share = row.copy_share(row.case.compared)
        single = per_iteration(ours.by_rank)["p99_us"] if ours and ours.by_rank else 0
        cells = [row.algorithm or "-", number(single, 7) if single else "-"]
        cells.append(f"{share:.0%}" if math.isfinite(share) else "-")
        for name in self.peers:
            times = row.peers[name]
            cells.append(number(times.seconds * 1e6, 8) if times.rounds else "-")
        if self.peers:
            cells.append(f"{row.ratio:.2f}" if math.isfinite(row.ratio) else "-")
        return cells

    def _own_line(self, cells: Iterable[str]) -> str:
        widths = [24, 8, 7, *[8] * len(self.peers), 5]
        return "".join("  " + c.rjust(w) for c, w in zip(cells, widths, strict=False))

    def footer(self) -> Iterator[str]:
        """The lines after the last row."""
        result = "FAILED" if self.wrong else "OK"
        yield f"# {'Out of bounds values':<20} : {self.wrong} {result}"
        average = self.average_busbw
        busbw = "N/A (ranks share a GPU)" if average is None else f"{average:g} "
        yield f"# {'Avg bus bandwidth':<20} : {busbw}"
        yield "#"
        yield from self._ratio_lines()
        for note in self.notes():
            yield f"# {note}"
        name = self.arguments["collective"]
        how = "interrupted" if self.interrupted else "concluded"
        yield f"# Collective test {how}: {name}"

    def _ratio_lines(self) -> Iterator[str]:
        ratios = [(r.ratio, r) for r in self.rows if math.isfinite(r.ratio)]
        if not ratios:
            return
        middle = median(ratio for ratio, _ in ratios)
        worst, at = max(ratios, key=lambda pair: pair[0])
        name = at.case.collective
        yield (
            f"# ratio to the best peer: median {middle:.2f}, worst {worst:.2f} "
            f"({name}, {format_bytes(at.case.size)}, against {at.best_peer})"
        )

    def notes(self) -> list[str]:
        """What was refused or wrong, once each."""
        notes: dict[str, None] = {}
        for row in self.rows:
            for place, times in (
                ("out of place", row.out_of_place),
                ("in place", row.in_place),
                *row.peers.items(),
            ):
                if times and times.refused:
                    why = times.refused.splitlines()[0][:120]
                    notes[f"{row.case.collective}, {place}: not measured: {why}"] = None
                if times and times.wrong and place in row.peers:
                    notes[f"{place}: {times.wrong} wrong at {row.case.size} B"] = None
        if any(row.floor_share > 1 for row in self.rows):
            notes[_ABOVE_THE_FLOOR] = None
        return list(notes)

    def plain(self) -> dict[str, Any]:
        """Everything, as JSON."""
        arguments, plan = self.arguments, self.plan
        step = {"step_bytes": arguments["step"]} if arguments["step"] else {}
        config = {
            "nthreads": arguments["n"] if self.place.as_streams else 1,
            "ngpus": int(self.place.on_device),
            "minimum_bytes": arguments["minimum"],
            "maximum_bytes": arguments["maximum"],
            **(step or {"step_factor": arguments["factor"]}),
            "warmup_iters": plan.warmup,
            "iterations": plan.iterations,
            "aggregated_iterations": 1,
            "validation": int(plan.check),
            "graph": 0,
            "blocking_collectives": False,
            "per_iter_timing": True,
            "per_iter_skip": 0,
            "parallel_init": False,
            "devices": self.devices,
            "nranks": arguments["n"],
            "rounds": plan.rounds,
            "shared": plan.shared,
            "device": self.place.device,
            "ranks_as": self.place.ranks_as,
            "copy_bw": self._copy_bandwidth(),
            "peers": self.peers,
            "load_average": self.load,
        }
        return {
            "version": _JSON_VERSION,
            "start_time": self.began,
            "args": sys.argv,
            "env": [f"{k}={v}" for k, v in os.environ.items() if "UNISONO_" in k],
            "unisono_version": unisono.__version__,
            "config": config,
            "results": [row.plain() for row in self.rows],
            "out_of_bounds": {"count": self.wrong, "okay": not self.wrong},
            "average_bus_bandwidth": {
                "bandwidth": self.average_busbw,
                "okay": "unchecked",
            },
            "errors": self.notes(),
            "interrupted": self.interrupted,
            "end_time": _now(),
        }

    def _copy_bandwidth(self) -> float | None:
        """Of the GPU that all ranks share, in GB/s."""
        known = self.use is not None and math.isfinite(self.use.copy_speed)
        return self.use.copy_speed / 1e9 if self.use and known else None

    def write_csv(self, file: IO[str]) -> None:
        """The columns of the table, with the place before those that occur twice."""
        heads = [*_FIRST, *(f"out_of_place_{t}" for t in _TIMES)]
        heads += [f"in_place_{t}" for t in _TIMES]
        heads += [name for name, _ in self._own_heads()]
        writer = csv.writer(file)
        writer.writerow(["collective", *(h.replace("#", "n") for h in heads)])
        for row in self.rows:
            own = self._own_cells(row)
            cells = self.line(row).split()[: len(_WIDTHS)]
            writer.writerow([row.case.collective, *cells, *own])


def number(value: float, width: int) -> str:
    """As many decimals as fit, two at most."""
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:.{1 if width >= 7 else 0}e}"


def _time_cells(row: BenchRow, times: Timing | None) -> list[str]:
    if not times or not times.rounds:
        return ["N/A"] * 4
    algbw, busbw = row.bandwidths(times)
    wrong = "N/A" if times.wrong is None else f"{times.wrong:g}"
    bus = number(busbw, 6) if row.has_links else "N/A"
    return [number(times.seconds * 1e6, 7), number(algbw, 6), bus, wrong]


def _line(cells: Iterable[str], widths: Sequence[int], start: str = "# ") -> str:
    return start + "  ".join(
        cell.rjust(width) for cell, width in zip(cells, widths, strict=False)
    )


def _or_auto(value: int, auto: int) -> str:
    return "auto" if value == auto else str(value)


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _processor() -> str:
    """The name of the processor, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()
