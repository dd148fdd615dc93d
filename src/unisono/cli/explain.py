"""`unisono explain`: the steps of an algorithm, its cost, and the proof.

With `--html` it writes a page that plays it. With `--on this` it prints instead what
would be chosen on this machine, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.algorithms import LANGUAGES
from unisono.algorithms import schedule as make
from unisono.algorithms.library import advice_on
from unisono.cli import _chosen
from unisono.cli.output import (
    counter_example,
    parse_rank,
    parse_world,
    print_json,
    print_picture,
    refuse_unwritable,
    write_file,
)
from unisono.errors import BadArgument, ScheduleError
from unisono.schedule.files import as_dict
from unisono.schedule.schedule import Schedule
from unisono.units import format_bytes, parse_bytes
from unisono.view import explain as explained
from unisono.view import picture, to_svg
from unisono.view.frames import refuse_if_huge

_SUFFIXES = {"--svg": ("", ".svg"), "--html": ("", ".htm", ".html")}


def explain(
    collective: str,
    algorithm: str = "",
    /,
    *,
    n: Annotated[str, Parameter(name=["-n", "--ranks"], metavar="N")] = "4",
    root: Annotated[str, Parameter(name="--root", metavar="RANK")] = "0",
    size: Annotated[str, Parameter(name=["-b", "--size"], metavar="SIZE")] = "",
    svg_file: Annotated[Path | None, Parameter(name="--svg")] = None,
    html_file: Annotated[Path | None, Parameter(name="--html")] = None,
    topology: Annotated[str, Parameter(name=["-t", "--topology"])] = "",
    beside: str = "",
    on: str = "",
    per_host: Annotated[str, Parameter(metavar="N")] = "",
    lang: str = "en",
    json: bool = False,
) -> int:
    """Draw an algorithm step by step, with its cost and the proof that it is right.

    Below it stands in words when the algorithm is good and when it is not.

    With --on this and no algorithm: which one would be chosen here, which is next, and
    what both are predicted to take and took when `unisono tune` measured them.

    With --html FILE it becomes a page that plays it, by step or by a topology's clock.

    Example: unisono explain all_reduce ring -n 5 --html ring.html

    Parameters
    ----------
    collective
        all_reduce, all_gather, broadcast, ...; `unisono algorithms` lists them.
    algorithm
        A name, as ring, tree:radix=4, ring+recursive_doubling, or a Python file.
    n
        Number of ranks.
    root
        The root of broadcast, reduce, scatter and gather.
    size
        Bytes of one rank's buffer, as 64M: the cost is given in bytes as well.
    svg_file
        Write the picture to this file instead.
    html_file
        Write a page that plays it to this file instead.
    topology
        Where it runs in the page, as switch:8; a link for every pair if not given.
    beside
        A second algorithm in the page, under the same clock.
    on
        "this": print what this machine would choose, for -b or a few sizes.
    per_host
        With --on this: so many ranks on each host; all on one if it is not given.
    lang
        The language of the words below the picture: en or zh.
    json
        Print steps, cost, proof and words as one JSON object.
    """
    world, nbytes = parse_world(n), parse_bytes(size) if size else 0
    files = {"--svg": svg_file, "--html": html_file}
    wanted = [option for option, file in files.items() if file is not None]
    if lang != LANGUAGES[0] and (on or wanted):
        raise BadArgument("--lang is for text and --json; not for --svg, --html, --on")
    if on or not algorithm:
        if on != "this" or algorithm or wanted:
            raise BadArgument("explain: ALGORITHM: name one, or use --on this instead")
        sizes = [nbytes] if size else list(_chosen.SIZES)
        ranks = parse_world(per_host) if per_host else world
        return _chosen.tell(collective, sizes, world, ranks, json=json)
    _refuse(wanted, size=size, topology=topology, beside=beside, json=json)
    _refuse_files(files)
    refuse_if_huge(world)
    makes = partial(make, collective, n=world, root=parse_rank(root))
    made = makes(_fitting(algorithm, topology))
    if json:
        return _print_json(made, lang)
    if svg_file is not None:
        return _write(svg_file, to_svg(made), made.title)
    if html_file is not None:
        other = makes(_fitting(beside, topology)) if beside else None
        return _page(html_file, made, other, topology, size)
    return _print(made, nbytes, lang)


def _refuse(
    wanted: list[str], *, size: str, topology: str, beside: str, json: bool
) -> None:
    """Refuse options that exclude each other."""
    if json and (wanted or size):
        raise BadArgument("--json stands alone: leave out --svg, --html and --size")
    if len(wanted) > 1:
        raise BadArgument("--svg and --html: choose one")
    if (topology or beside) and wanted != ["--html"]:
        option = "--topology" if topology else "--beside"
        raise BadArgument(f"{option}: goes with --html FILE (or `unisono simulate`)")


def _refuse_files(files: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written or have another format's suffix."""
    for option, file in files.items():
        if file is not None and file.suffix.lower() not in _SUFFIXES[option]:
            expected = _SUFFIXES[option][-1]
            raise BadArgument(f"{option} {file}: expected a name with {expected}")
    refuse_unwritable(*files.values())


def _fitting(algorithm: str, topology: str) -> str:
    """The algorithm's name, completed from the topology."""
    if not topology:
        return algorithm
    from unisono.simulate.candidates import fitted
    from unisono.topology import parse

    return fitted(algorithm, parse(topology))


def _write(file: Path, text: str, title: str) -> int:
    write_file(file, text)
    print(f"wrote {file}: {title}")
    return 0


def _page(
    file: Path, made: Schedule, beside: Schedule | None, topology: str, size: str
) -> int:
    from unisono.view.html import to_html
    from unisono.view.story import SIZE

    text = to_html(made, beside=beside, topology=topology, nbytes=size or SIZE)
    titles = made.title if beside is None else f"{made.title}, and {beside.name}"
    return _write(file, text, titles)


def _print(made: Schedule, nbytes: int, lang: str) -> int:
    try:
        print_picture(explained(made, lang=lang))
    except ScheduleError:
        _print_wrong(made)
        raise
    if nbytes:
        print(_in_bytes(made, nbytes))
    return 0


def _print_wrong(made: Schedule) -> None:
    """The picture of a wrong schedule, as far as it can be drawn."""
    try:
        print_picture(picture(made))
    except ScheduleError:
        print(f"{made!r}: cannot be drawn")


def _in_bytes(made: Schedule, nbytes: int) -> str:
    cost = made.cost(nbytes)
    low, high = format_bytes(cost.sent.min()), format_bytes(cost.sent.max())
    each = low if low == high else f"{low} to {high}"
    return (
        f"{'size':<7}{format_bytes(nbytes)}: span {format_bytes(cost.span)}; each rank "
        f"sends {each}"
    )


def _print_json(made: Schedule, lang: str) -> int:
    document = as_dict(made) | {
        "about": made.about,
        "paper": made.paper,
        "advice": {
            name: asdict(one.words(lang))
            for name, one in advice_on(made.collective, made.name)
        },
        "verified": True,
        "cost": None,
    }
    try:
        proof = made.verify()
    except ScheduleError as wrong:
        document |= {
            "verified": False,
            "same_bits_on_all_ranks": None,
            "error": str(wrong),
            "counter_example": counter_example(wrong),
        }
        print_json(document)
        return 1
    bits = made.consistency()
    document |= {
        "cost": made.cost().as_dict(),
        "same_bits_on_all_ranks": bits.same_bits_on_all_ranks,
        "depth": bits.depth,
        "proof": {"exact": proof.exact, "seed": proof.seed, "seconds": proof.seconds},
    }
    print_json(document)
    return 0
