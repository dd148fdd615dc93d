"""Engines: how long the calls of a library take, by the quickest of its paths.

    engine("nccl").time("all_reduce", Fabric.of(topology), nbytes)

A path is an algorithm with a protocol. It takes

    latency · (call + steps · seconds a step)  +  latency of links  +  bytes / rate

where bytes are those of the more loaded of a rank's link and its host's cards. Where
chunks grow with the call, the first bytes are slower by the part `fill`: pipelines are
full from `channels` chunks a rank on. A library chooses about what is quickest, so the
least of all paths is taken. The constants are in engines.toml, with their sources.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path as FilePath

import msgspec

from unisono.errors import NotOffered, unknown
from unisono.simulate.engines.fabric import Fabric
from unisono.simulate.engines.measured import MeasuredEngine, load
from unisono.simulate.engines.paths import PATTERNS


@dataclass(frozen=True)
class Calibration:
    """What a machine makes of an engine's constants; found by fitting, or 1.

    `latency` multiplies all fixed costs, `inside` and `across` are the parts of the
    bandwidths that are reached, `fill` and `channels` say how pipelines fill, and
    `small` is the part of its rate that a protocol for small calls reaches.
    """

    latency: float = 1.0
    inside: float = 1.0
    across: float = 1.0
    fill: float = 0.0
    channels: float = 1.0
    small: float = 1.0


@dataclass(frozen=True)
class EngineTime:
    """How long a call takes, and by which algorithm and protocol."""

    seconds: float
    algorithm: str
    protocol: str = ""


class Path(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An algorithm with a protocol; see engines.toml."""

    algorithm: str
    protocol: str
    call: float
    inside: float
    across: float
    rate: float
    fills: bool = False
    small: bool = False


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A library: its paths, and what its data passes through."""

    about: str
    source: str
    chunk: int
    chunk_source: str
    staging: float
    latency: tuple[float, float]
    fill: tuple[float, float]
    channels: tuple[float, float]
    small: tuple[float, float]
    fitted_source: str
    paths: tuple[Path, ...]
    adds_inside_latency: bool = True
    staging_source: str = ""
    name: str = ""

    def usual(self, fabric: Fabric) -> Calibration:
        """The calibration of a machine that was not measured."""
        several = fabric.hosts > 1
        return Calibration(
            latency=self.latency[several],
            fill=self.fill[several],
            channels=self.channels[several],
            small=self.small[several],
        )

    def time(
        self,
        collective: str,
        fabric: Fabric,
        nbytes: float,
        calibration: Calibration | None = None,
    ) -> EngineTime:
        """The quickest path for a call of so many bytes.

        Buffers that are `staged` an engine may have to copy to the host and back.
        """
        if fabric.ranks == 1:
            return EngineTime(0.0, "nothing to do")
        given = calibration or self.usual(fabric)
        times = [
            EngineTime(seconds, path.algorithm, path.protocol)
            for path in self.paths
            if (seconds := self._path(path, collective, fabric, nbytes, given)) >= 0
        ]
        if not times:
            raise NotOffered(f"engine {self.name}: {collective} is not modelled")
        best = min(times, key=lambda found: found.seconds)
        if fabric.staged and self.staging:
            copied = best.seconds + 2 * nbytes / self.staging
            return EngineTime(copied, best.algorithm, f"{best.protocol}, staged")
        return best

    def _path(
        self, path: Path, what: str, fabric: Fabric, nbytes: float, given: Calibration
    ) -> float:
        """Seconds by one path; below 0 if it is none for this call."""
        work = PATTERNS[path.algorithm](what, fabric)
        if work is None:
            return -1.0
        rate = path.rate * (given.small if path.small else 1.0)
        moved = max(
            work.bytes_inside / (fabric.inside * given.inside)
            if work.bytes_inside
            else 0.0,
            work.bytes_across / (fabric.across * given.across)
            if work.bytes_across
            else 0.0,
        )
        slow = nbytes
        if path.fills:
            full = given.channels * self.chunk * fabric.ranks
            slow += given.fill * min(nbytes, full)
        near = fabric.inside_latency if self.adds_inside_latency else 0.0
        steps = work.steps_inside * path.inside + work.steps_across * path.across
        wires = work.steps_inside * near + work.steps_across * fabric.across_latency
        return given.latency * (path.call + steps) + wires + slow * moved / rate


@cache
def engines() -> dict[str, Engine]:
    """All engines that are described, by name."""
    text = (resources.files(__package__) / "engines.toml").read_text("utf-8")
    found = msgspec.convert(tomllib.loads(text), dict[str, Engine])
    return {
        name: msgspec.structs.replace(one, name=name) for name, one in found.items()
    }


def modelled(name: str) -> Engine:
    """An engine that answers for any machine; not one of measured times."""
    found = engine(name)
    if isinstance(found, MeasuredEngine):
        raise NotOffered(f"engine {name}: answers for whole machines alone, not groups")
    return found


OURS = "unisono"
"""The engine that the simulator itself is: schedules, message by message."""
ENGINES = (OURS, "nccl", "gloo", "mpi", "xla")
"""Libraries whose calls can be simulated, by name."""


def engine(name: str) -> Engine | MeasuredEngine:
    """An engine by its name, or a file that `unisono fit` has written."""
    if name in engines():
        return engines()[name]
    if name.endswith(".json"):
        return load(FilePath(name))
    if name == OURS:
        raise NotOffered(
            "engine unisono: the simulator itself; ask `simulate` for an algorithm"
        )
    raise unknown("engine", name, [*ENGINES, "FILE.json"])
