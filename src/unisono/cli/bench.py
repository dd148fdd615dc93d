"""`unisono bench`: how fast collectives are here, and those of other libraries.

The options and columns are those of nccl-tests, except for `-n`, which means ranks. How
it is measured is described in `_bench`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from unisono.algorithms import library
from unisono.algorithms import schedule as make_schedule
from unisono.cli._bench import cases, devices, groups, plot
from unisono.cli._bench.cases import Case
from unisono.cli._bench.devices import Placement
from unisono.cli._bench.driver import BenchSettings, device_use, measure
from unisono.cli._bench.report import BenchReport
from unisono.cli._plot import refuse_unknown_format
from unisono.cli._progress import Progress
from unisono.cli.output import (
    load_warning,
    parse_rank,
    parse_world,
    print_aligned,
    print_json,
    print_text,
    refuse_unwritable,
    write_file,
)
from unisono.dtypes import DTYPES, check_op, numpy_dtype
from unisono.errors import BadArgument, UnsupportedWorld, UsageError, unknown
from unisono.units import format_bytes, parse_bytes

_MOST_RANKS = 256
_PEERS = tuple(dict.fromkeys((*groups.PEERS, *devices.DEVICE_PEERS)))


def bench(
    collective: str = "all_reduce",
    /,
    *,
    n: Annotated[str, Parameter(name=["-n", "--ranks"], metavar="N")] = "4",
    begin: Annotated[str, Parameter(name=["-b", "--minbytes"], metavar="SIZE")] = "8",
    end: Annotated[str, Parameter(name=["-e", "--maxbytes"], metavar="SIZE")] = "64M",
    factor: Annotated[int, Parameter(name=["-f", "--stepfactor"])] = 2,
    step: Annotated[str, Parameter(name=["-i", "--stepbytes"], metavar="SIZE")] = "0",
    iterations: Annotated[int | None, Parameter(name="--iters")] = None,
    warmup: Annotated[int | None, Parameter(name=["-w", "--warmup-iters"])] = None,
    rounds: int = 5,
    check: Annotated[int, Parameter(name=["-c", "--check"])] = 1,
    dtype: Annotated[str, Parameter(name=["-d", "--datatype"])] = "float32",
    op: Annotated[str, Parameter(name=["-o", "--op"])] = "sum",
    root: Annotated[str, Parameter(name=["-r", "--root"], metavar="RANK")] = "0",
    algorithm: str = "",
    vs: str = "",
    device: str = devices.CPU,
    ranks_as: str = devices.PROCESSES,
    per_host: Annotated[str, Parameter(metavar="N")] = "",
    shared: bool = False,
    json: bool = False,
    csv_: Annotated[bool, Parameter(name="--csv")] = False,
    output_file: Annotated[Path | None, Parameter(name=["-J", "--output-file"])] = None,
    plot_: Annotated[Path | None, Parameter(name="--plot")] = None,
) -> int:
    """Measure collectives between processes of this machine, and check every result.

    The first thirteen columns are those of nccl-tests. Ctrl-C prints what is known.

    Example: unisono bench all_reduce -n 4 -b 8 -e 64M -f 2 --vs gloo,openmpi,mpich

    Example: unisono bench all_reduce -n 8 -e 1G --device cuda --vs nccl

    Parameters
    ----------
    collective
        A collective, send_recv, several with commas between, or "all".
    n
        Number of ranks.
    begin
        The smallest size, as 8, 32M or 1G.
    end
        The largest size.
    factor
        Multiply the size by this from row to row.
    step
        Add so many bytes from row to row instead.
    iterations
        Calls in a batch; by default as many as take a fiftieth of a second.
    warmup
        Calls before a batch that do not count; by default a tenth of the batch.
    rounds
        Batches of each system; a time is the median of them.
    check
        1 counts wrong elements, 0 does not.
    dtype
        Element type, by our name or that of nccl-tests.
    op
        Reduction.
    root
        Root of those that have one.
    algorithm
        One, several with commas between, or "all"; otherwise what unisono chooses.
    vs
        Peers to measure in the same run: gloo, openmpi, mpich (see make peers); with
        --device cuda: nccl, which needs a GPU for each rank, and gloo.
    device
        Where the arrays are: cpu or cuda. Rank r has GPU r modulo their number, so
        several ranks can share one. Then the bus bandwidth is N/A, and the column copy
        shows the share of the GPU's copy speed.
    ranks_as
        With --device cuda: processes, or streams: unisono's ranks are threads of one
        process with a stream each, whose kernels run at the same time without MPS.
    per_host
        Emulate hosts with so many of unisono's ranks on each: between hosts they
        communicate by TCP, on this machine's loopback.
    shared
        Measure on buffers from comm.empty, which are in shared memory.
    json
        Print one JSON document, under the keys of nccl-tests.
    csv_
        Print comma-separated values.
    output_file
        Write the JSON document to this file as well.
    plot_
        Draw time and bandwidth into this file, for example bench.png.
    """
    if json and csv_:
        raise BadArgument("choose one of --json and --csv")
    if plot_:
        plot.require()
    refuse_unknown_format(plot_)
    refuse_unwritable(output_file, plot_)
    task = _Task.of(
        collective, parse_world(n), (dtype, op, parse_rank(root)), algorithm, vs
    )
    hosts = parse_world(per_host) if per_host else 0
    place = task.placed(Placement(hosts, device, ranks_as))
    least, most = parse_bytes(begin), parse_bytes(end)
    sizes = cases.sizes_between(least, most, factor=factor, step=parse_bytes(step))
    shared = shared or place.on_device
    plan = _plan(rounds, iterations, warmup, check, shared=shared)
    arguments = {
        "collective": collective,
        "n": task.n,
        "minimum": least,
        "maximum": most,
    }
    arguments |= {"factor": factor, "step": parse_bytes(step)}
    report = BenchReport(arguments, plan, task.peers, place)
    _refuse_too_large(task, most)
    _run(task, sizes, report, quiet=json or csv_)
    if csv_:
        report.write_csv(sys.stdout)
    if json:
        print_json(report.plain())
    if output_file:
        document = msgspec.json.format(msgspec.json.encode(report.plain()), indent=1)
        write_file(output_file, document.decode() + "\n")
    if plot_ and report.rows:
        plot.draw(report.rows, plot_)
    return 130 if report.interrupted else 1 if report.wrong else 0


@dataclass
class _Task:
    """What is to be measured, of which systems."""

    n: int
    collectives: list[str]
    algorithms: dict[str, list[str]]
    peers: list[str]
    dtype: str
    op: str
    root: int

    @classmethod
    def of(
        cls, collective: str, n: int, what: tuple[str, str, int], names: str, vs: str
    ) -> _Task:
        """The task that the command line means, or the reason why it cannot be."""
        chosen, root = cases.collectives_named(collective), what[2]
        if not 1 <= n <= _MOST_RANKS:
            raise BadArgument(f"-n {n}: expected 1 to {_MOST_RANKS} ranks")
        if not 0 <= root < n:
            raise BadArgument(f"-r {root}: ranks are 0..{n - 1}")
        dtype, op = cases.dtype_named(what[0]), cases.op_named(what[1])
        check_op(DTYPES[dtype], op)
        numpy_dtype(dtype)
        peers = [name for name in vs.split(",") if name]
        for name in peers:
            if name not in _PEERS:
                raise unknown("peer", name, _PEERS)
        algorithms = {c: _algorithms(c, n, names) for c in chosen}
        return cls(n, chosen, algorithms, peers, dtype, op, root)

    def placed(self, place: Placement) -> Placement:
        """The same placement, if all of the task can be measured there."""
        place.check(self.n)
        if place.on_device:
            self.collectives = devices.collectives_on_devices(self.collectives)
            devices.check_peers(self.peers, self.n)
        elif "nccl" in self.peers:
            raise BadArgument("--vs nccl: needs --device cuda")
        return place

    def cases_of(self, collective: str, sizes: list[int]) -> list[Case]:
        """The rows of one collective; sizes that come to the same are one."""
        what = self.dtype, self.op, self.root
        made = [cases.case_of(collective, self.n, size, *what) for size in sizes]
        return list(dict.fromkeys(made))


def _algorithms(collective: str, n: int, text: str) -> list[str]:
    """The algorithms to measure; "" is what unisono chooses."""
    if not text or collective == "send_recv":
        return [""]
    mine = [a for (c, _), a in library().items() if c == collective]
    if text == "all":
        names = [a.spelled(**variant) for a in mine for variant in a.variants]
    else:
        names = _names(text)
    offered, why = [], None
    for name in names:
        try:
            make_schedule(collective, name, n)
        except UnsupportedWorld as error:
            why = error
        except UsageError:
            if text != "all":
                raise
        else:
            offered.append(name)
    if not offered:
        raise why or BadArgument(f"{collective}: no algorithm for {n} ranks")
    return offered


def _names(text: str) -> list[str]:
    """Names with commas between; parameters of one may have commas between, too."""
    known = {name for _, name in library()}
    names: list[str] = []
    for part in text.split(","):
        if names and re.split(r"[:+]", part)[0] not in known and ":" in names[-1]:
            names[-1] += "," + part
        else:
            names.append(part)
    return names


def _plan(
    rounds: int, iterations: int | None, warmup: int | None, check: int, *, shared: bool
) -> BenchSettings:
    for option, value, least in (
        ("--rounds", rounds, 1),
        ("--iters", iterations, 1),
        ("-w", warmup, 0),
    ):
        if value is not None and value < least:
            raise BadArgument(f"{option} {value}: expected {least} or more")
    if check not in (0, 1):
        raise BadArgument(f"-c {check}: expected 0 or 1")
    calls = iterations or 0, -1 if warmup is None else warmup
    return BenchSettings(rounds, *calls, bool(check), shared)


def _refuse_too_large(task: _Task, most: int) -> None:
    """Where memory does not suffice, swapping would be measured."""
    needed = 3 * most * task.n * (1 + len(task.peers))
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise BadArgument(
            f"-e {most}: the buffers of {task.n} ranks need {format_bytes(needed)}, "
            f"and this machine has {format_bytes(there)}; take a smaller size"
        )


def _run(task: _Task, sizes: list[int], report: BenchReport, *, quiet: bool) -> None:
    """Measure everything; Ctrl-C ends it early, and what is known is kept."""

    def tell(lines: Iterator[str] | list[str]) -> None:
        if not quiet:
            print_text("\n".join(lines))

    def tell_rows(lines: Iterable[str]) -> None:
        if not quiet:
            print_aligned(lines, report.ruler)

    progress = Progress()
    tell([*filter(None, [load_warning()]), *report.preamble()])
    try:
        systems = ["unisono", *task.peers]
        with groups.running(systems, task.n, report.place) as started:
            use = device_use(started, max(sizes))
            report.add_devices(started[0], use)
            tell(report.device_lines())
            for collective in task.collectives:
                tell_rows(report.header(collective))
                for case in task.cases_of(collective, sizes):
                    progress.what = f"{collective}, {format_bytes(case.size)}"
                    names = task.algorithms[collective]
                    rows = measure(case, started, names, report.plan, progress, use)
                    progress.clear()
                    report.rows += rows
                    tell_rows(map(report.line, rows))
    except KeyboardInterrupt:
        report.interrupted = True
        progress.clear()
    tell(report.footer())
