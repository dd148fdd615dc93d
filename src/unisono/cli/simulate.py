"""`unisono simulate`: how long collectives would take on any machines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.cli import _chart
from unisono.cli._engine import by_engine
from unisono.cli._jobs import compared
from unisono.cli._plot import refuse_unknown_format
from unisono.cli._progress import Progress, waiting
from unisono.cli._train import train
from unisono.cli.output import (
    print_json,
    print_row,
    print_text,
    refuse_unwritable,
    write_file,
)
from unisono.errors import BadArgument
from unisono.schedule.collective import collective as find_collective
from unisono.simulate import (
    FIDELITIES,
    CodecModel,
    Comparison,
    Compute,
    Result,
    compare,
    to_chrome,
)
from unisono.simulate import simulate as run
from unisono.simulate.candidates import listed
from unisono.simulate.engines.engine import OURS
from unisono.topology import Topology
from unisono.tune import topology_named
from unisono.units import (
    format_bandwidth,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)

BELOW = (train,)
_WIDTHS = (-9, 30, -10, -11, -8, 30, -7)
_MOST_SIZES = 200


def simulate(
    collective: str = "all_reduce",
    /,
    *,
    topology: Annotated[str, Parameter(name=["-t", "--topology"])] = "dgx-h100:1",
    begin: Annotated[str, Parameter(name=["-b", "--minbytes"], metavar="SIZE")] = "1K",
    end: Annotated[str, Parameter(name=["-e", "--maxbytes"], metavar="SIZE")] = "",
    factor: Annotated[int, Parameter(name=["-f", "--stepfactor"])] = 4,
    engine: str = OURS,
    algorithm: str = "all",
    fidelity: str = "auto",
    segments: int = 1,
    delay: list[str] | None = None,
    slow: list[str] | None = None,
    failed: list[str] | None = None,
    codec: str = "",
    reduce: str = "",
    compute: str = "",
    share: float = 1.0,
    jobs: Annotated[int, Parameter(name=["-j", "--jobs"])] = 1,
    plot: bool = False,
    picture: Path | None = None,
    trace: Path | None = None,
    json: bool = False,
) -> int:
    """Simulate a collective on a topology: the winner for each size, and crossovers.

    With one algorithm and one size, also the busiest links and the critical path.

    Example: unisono simulate all_reduce --topology dgx-h100:128 -b 1K -e 1G

    Parameters
    ----------
    collective
        all_reduce, all_gather, broadcast, ...; `unisono algorithms` lists them.
    topology
        A preset, as switch:8, torus:4x4x4, dgx-h100:16,nics=1, a .toml file, or "this".
    begin
        The smallest size, as 8, 32M or 1G.
    end
        The largest size; without it, there is one size.
    factor
        Multiply the size by this from row to row.
    engine
        Whose calls: unisono (schedules, simulated), or by a model nccl, gloo, mpi, xla,
        or FILE.json, which `unisono fit` has written.
    algorithm
        One, several with commas between, or "all"; also files: all,mine.py.
    fidelity
        auto, closed, steps or events.
    segments
        Cut the data into so many parts that follow each other.
    delay
        A rank that begins late, as 3=1ms; may be given again.
    slow
        A link with a part of its bandwidth, as "0>switch=0.1"; may be given again.
    failed
        A link that is down, as 4-5 (both ways) or "4>5"; may be given again.
    codec
        What travels instead, as ratio=0.26,encode=1e-11,decode=1e-11 (seconds a byte).
    reduce
        How fast a rank reduces, as 20GB/s; otherwise that of the topology.
    compute
        What every rank computes meanwhile, as 5ms: what is left then is exposed.
    share
        The part of its speed that the collective keeps while ranks compute.
    jobs
        Simulate so many algorithms at a time, each in a process of its own.
    plot
        Draw times over sizes in the terminal.
    picture
        Draw them into this file, for example simulate.png (needs matplotlib).
    trace
        Write the messages to this file, for Perfetto; one algorithm and one size.
    json
        Print one JSON document.
    """
    _check(factor, fidelity, jobs)
    refuse_unknown_format(picture)
    refuse_unwritable(trace, picture)
    what, where = find_collective(collective).name, topology_named(topology)
    sizes = _sizes(parse_bytes(begin), parse_bytes(end or begin), factor)
    if not json:
        about = f"# {what} on {where.name}, {where.n} ranks. {where.about}"
        print_text(about.rstrip())
    options = _options(fidelity, delay, slow, failed, codec)
    options |= _beside(compute, share) | _adding(reduce)
    if engine != OURS:
        refused = {"algorithm": algorithm != "all", "segments": segments != 1}
        refused |= {"plot": plot, "picture": bool(picture), "trace": bool(trace)}
        refused |= {key.removesuffix("s"): True for key in options}
        return by_engine(engine, what, where, sizes, refused, json=json)
    names = listed(algorithm, what, where)
    one = len(names) == 1 and len(sizes) == 1
    if trace and not one:
        raise BadArgument("--trace: takes one --algorithm and one size (-b alone)")
    if one:
        more = {"collective": what, "segments": segments, **options}
        with waiting(lambda: f"simulating {names[0]} on {where.name}"):
            result = run(names[0], where, sizes[0], **more)
        return _one(result, trace, json=json)
    options |= {"segments": segments}
    by = partial(compared, jobs=jobs, spelled=topology) if jobs > 1 else compare
    comparison = _compared(by, what, names, where, sizes, options)
    if json:
        print_json(_plain(what, comparison))
        return 0
    _print(comparison)
    if plot:
        print()
        print(_chart.text_chart(comparison))
    if picture:
        _chart.draw(comparison, picture)
        print(f"wrote {picture}")
    return 0


def _check(factor: int, fidelity: str, jobs: int) -> None:
    if factor < 2:
        raise BadArgument(f"-f {factor}: expected 2 or more")
    if fidelity not in FIDELITIES:
        raise BadArgument(f"--fidelity {fidelity}: one of {', '.join(FIDELITIES)}")
    if jobs < 1:
        raise BadArgument(f"--jobs {jobs}: expected 1 or more")


def _compared(
    by: Callable[..., Comparison],
    what: str,
    names: Sequence[str],
    where: Topology,
    sizes: Sequence[int],
    options: dict[str, Any],
) -> Comparison:
    """All algorithms, while a terminal shows which. Ctrl-C says what is kept."""
    progress = Progress("simulating")
    done: list[str] = []

    def show(name: str) -> None:
        done.append(name)
        progress.what = f"{what} on {where.name}, {len(done)} of {len(names)}"
        progress(name)

    try:
        return by(what, names, where, sizes, progress=show, **options)
    except KeyboardInterrupt:
        print(
            f"unisono: interrupted while simulating {done[-1] if done else what}: "
            "nothing is kept, for results are printed when all algorithms are done "
            "(--algorithm takes less time)",
            file=sys.stderr,
        )
        raise
    finally:
        progress.clear()


def _one(result: Result, trace: Path | None, *, json: bool) -> int:
    if json:
        print_json(result.as_dict())
    else:
        print_text(result)
    if trace:
        write_file(trace, to_chrome(result))
        if not json:
            print(f"wrote {trace}: open it in https://ui.perfetto.dev")
    return 0


def _sizes(low: int, high: int, factor: int) -> list[int]:
    if low < 1 or high < low:
        raise BadArgument(f"-b {low} -e {high}: sizes ascend, from 1 byte on")
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    if len(sizes) > _MOST_SIZES:
        raise BadArgument(f"{len(sizes)} sizes: at most {_MOST_SIZES}")
    return sizes


def _options(
    fidelity: str,
    delay: list[str] | None,
    slow: list[str] | None,
    failed: list[str] | None,
    codec: str,
) -> dict[str, Any]:
    """What was asked for besides the usual; nothing if nothing was."""
    options: dict[str, Any] = {} if fidelity == "auto" else {"fidelity": fidelity}
    if delay:
        options["delays"] = {
            _number("--delay", text, rank, int): parse_seconds(late)
            for text, rank, late in map(_halves, delay)
        }
    if slow:
        options["slow"] = {
            link: _number("--slow", text, part, float)
            for text, link, part in map(_halves, slow)
        }
    if failed:
        options["failed"] = failed
    if codec:
        options["codec"] = _codec(codec)
    return options


def _beside(compute: str, share: float) -> dict[str, Any]:
    """Computation during the collective, if there is any."""
    if not compute:
        if share != 1.0:
            raise BadArgument(f"--share {share:g}: is only used with --compute")
        return {}
    return {"compute": Compute(parse_seconds(compute), share)}


def _adding(reduce: str) -> dict[str, Any]:
    """The seconds that a byte takes to be added, if given."""
    if not reduce:
        return {}
    rate = parse_bandwidth(reduce)
    if rate <= 0:
        raise BadArgument(f"--reduce {reduce}: expected above 0")
    return {"reduce": 1 / rate}


def _halves(text: str) -> tuple[str, str, str]:
    left, _, right = text.rpartition("=")
    return text, left, right


def _number(option: str, text: str, part: str, kind: type[Any]) -> Any:
    try:
        return kind(part)
    except ValueError:
        raise BadArgument(f"{option} {text}: {part!r} is not a number") from None


def _codec(text: str) -> CodecModel:
    parameters = {}
    for _, key, value in map(_halves, text.split(",")):
        if key not in ("ratio", "encode", "decode"):
            raise BadArgument(f"--codec {text}: expected ratio=, encode=, decode=")
        parameters[key] = _number("--codec", text, value, float)
    return CodecModel(**parameters)


def _print(comparison: Comparison) -> None:
    head = ("size", "winner", "time", "busbw", "optimum", "runner-up", "slower")
    print_row(head, _WIDTHS)
    for at, size in enumerate(comparison.sizes):
        first, *others = comparison.ranking(at)
        next_ = others[0] if others else None
        slower = f"{next_.time / first.time:.2f}x" if next_ and first.time else ""
        most = "" if first.exact else "<="
        print_row(
            (
                format_bytes(size),
                first.algorithm,
                most + format_seconds(first.time),
                format_bandwidth(first.busbw),
                f"{first.optimum:.1%}",
                next_.algorithm if next_ else "",
                slower,
            ),
            _WIDTHS,
        )
    for cross in comparison.crossovers():
        about = format_bytes(cross.nbytes)
        print_text(f"# from about {about} on {cross.winner} beats {cross.loser}")
    if comparison.left_out:
        for name, why in comparison.left_out.items():
            print_text(f"# left out: {name}: {why}")


def _plain(what: str, comparison: Comparison) -> dict[str, object]:
    topology: Topology = comparison.topology
    return {
        "collective": what,
        "topology": topology.name,
        "n": topology.n,
        "sizes": list(comparison.sizes),
        "winners": [
            comparison.ranking(at)[0].algorithm for at in range(len(comparison.sizes))
        ],
        "crossovers": [
            {"size": c.nbytes, "from": c.loser, "to": c.winner}
            for c in comparison.crossovers()
        ],
        "left_out": comparison.left_out,
        "results": [_row(r) for rs in comparison.results.values() for r in rs],
    }


def _row(result: Result) -> dict[str, object]:
    """A result without what belongs to one message or link."""
    document = result.as_dict()
    for long in ("critical_path", "busiest_links", "collective", "topology", "n"):
        document.pop(long)
    if result.fidelity == "closed":
        document["utilisation"] = {}
    return document
