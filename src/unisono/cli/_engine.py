"""`unisono simulate --engine`: what the calls of another library would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.cli.output import print_json, print_row, print_text
from unisono.errors import BadArgument
from unisono.schedule.collective import collective as find_collective
from unisono.simulate.engines import EngineTime, Fabric, MeasuredEngine, engine
from unisono.simulate.result import bus_factor
from unisono.topology import Topology
from unisono.units import format_bandwidth, format_bytes, format_seconds

_WIDTHS = (-9, -10, -11, 12, 14)


def by_engine(
    name: str,
    collective: str,
    where: Topology,
    sizes: Sequence[int],
    refused: Mapping[str, bool],
    *,
    json: bool,
) -> int:
    """A table of sizes; options that only schedules have are refused."""
    refuse_beside(name, refused)
    one = engine(name)
    factor = bus_factor(find_collective(collective), where.n)
    rows: list[tuple[int, EngineTime, float]] = []
    for size in sizes:
        if isinstance(one, MeasuredEngine):
            seconds = one.find(collective, where.n).at(size)
            found = EngineTime(seconds, "measured")
        else:
            found = one.time(collective, Fabric.of(where), size)
        rows.append((size, found, factor * size / found.seconds))
    if json:
        print_json(_plain(name, collective, where, rows))
        return 0
    source = "measured times" if isinstance(one, MeasuredEngine) else one.about
    print_text(f"# engine {name}: {source}")
    print_row(("size", "time", "busbw", "algorithm", "protocol"), _WIDTHS)
    for size, found, rate in rows:
        shown = format_bytes(size), format_seconds(found.seconds)
        row = (*shown, format_bandwidth(rate), found.algorithm, found.protocol)
        print_row(row, _WIDTHS)
    return 0


def refuse_beside(name: str, refused: Mapping[str, bool]) -> None:
    """Refuse the first option that was given and that this engine has not."""
    for option, value in refused.items():
        if value:
            raise BadArgument(
                f"--{option}: is for schedules, and --engine {name} has none; leave "
                "one of the two out"
            )


def _plain(
    name: str,
    collective: str,
    where: Topology,
    rows: Sequence[tuple[int, EngineTime, float]],
) -> dict[str, object]:
    return {
        "collective": collective,
        "topology": where.name,
        "n": where.n,
        "engine": name,
        "results": [
            {
                "size": size,
                "time": found.seconds,
                "busbw": rate,
                "algorithm": found.algorithm,
                "protocol": found.protocol,
            }
            for size, found, rate in rows
        ],
    }
