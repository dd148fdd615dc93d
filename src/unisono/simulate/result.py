"""What a simulation found: when, over which links, and what decided it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.schedule.collective import (
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    REDUCE,
    Collective,
    Ints,
)
from unisono.topology.topology import Floats, Topology
from unisono.units import format_bandwidth, format_bytes, format_seconds, html_table


@dataclass(frozen=True)
class Hop:
    """One message of the critical path, and the link that held it up most."""

    step: int
    src: int
    dst: int
    nbytes: float
    start: float
    end: float
    link: str

    def __str__(self) -> str:
        """One line, as in "step 3: 4 → 5, 1 MiB over 4>5, 3.1 µs to 4.2 µs"."""
        span = f"{format_seconds(self.start)} to {format_seconds(self.end)}"
        size = format_bytes(self.nbytes)
        ends = f"{self.src} → {self.dst}"
        return f"step {self.step}: {ends}, {size} over {self.link}, {span}"


@dataclass(frozen=True, eq=False)
class Timeline:
    """Every message with its times, for traces; steps count from 1."""

    step: Ints
    src: Ints
    dst: Ints
    nbytes: Floats
    start: Floats
    end: Floats


@dataclass(frozen=True, eq=False)
class Result:
    """How long a schedule takes on a topology, and why.

    `bound` is the time that no schedule can beat there (see `bound`). `carried` are the
    bytes that went over each link; `path` the messages that decided, first to last;
    both are None where the fidelity does not know, or where there are too many messages
    to remember. `exact` is false where `time` is an upper bound only. `compute` are the
    seconds that the ranks compute meanwhile. `bandwidth` is what the links had, where
    some were slow.
    """

    collective: Collective
    algorithm: str
    topology: Topology
    nbytes: int
    fidelity: str
    time: float
    bound: float
    messages: int = 0
    events: int = 0
    finished: Floats | None = None
    carried: Floats | None = None
    path: tuple[Hop, ...] | None = None
    timeline: Timeline | None = None
    exact: bool = True
    compute: float = 0.0
    bandwidth: Floats | None = None

    @property
    def exposed(self) -> float:
        """The seconds that are left of the collective when the computing has ended."""
        return max(0.0, self.time - self.compute)

    @property
    def algbw(self) -> float:
        """Bytes of a rank's buffer per second."""
        return self.nbytes / self.time if self.time else 0.0

    @property
    def busbw(self) -> float:
        """What that means for each rank's port, as nccl-tests counts it."""
        return self.algbw * bus_factor(self.collective, self.topology.n)

    @property
    def optimum(self) -> float:
        """Which part of the topology's own optimum is reached: 1 is all of it."""
        return min(1.0, self.bound / self.time) if self.time else 1.0

    @property
    def utilisation(self) -> Floats | None:
        """For each link, the part of the time that it was busy, at full rate."""
        if self.carried is None or not self.time:
            return None
        had = self.bandwidth
        rate = self.topology.wiring.links.bandwidth if had is None else had
        share: Floats = self.carried / rate / self.time
        return share

    def busiest(self, count: int = 5) -> list[tuple[str, float]]:
        """The links with the highest utilisation, by name."""
        used = self.utilisation
        if used is None:
            return []
        order = np.argsort(-used, kind="stable")[:count]
        name = self.topology.wiring.link_name
        return [(name(int(k)), float(used[k])) for k in order if used[k] > 0]

    def by_kind(self) -> dict[str, float]:
        """The mean utilisation of the links of each kind."""
        used, links = self.utilisation, self.topology.wiring.links
        if used is None:
            return {}
        return {
            kind: float(used[links.kind == k].mean())
            for k, kind in enumerate(links.kinds)
            if (links.kind == k).any()
        }

    def as_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return {
            "collective": self.collective.name,
            "algorithm": self.algorithm,
            "topology": self.topology.name,
            "n": self.topology.n,
            "size": self.nbytes,
            "fidelity": self.fidelity,
            "exact": self.exact,
            "time": self.time,
            "compute": self.compute,
            "exposed": self.exposed,
            "algbw": self.algbw,
            "busbw": self.busbw,
            "bound": self.bound,
            "optimum": self.optimum,
            "messages": self.messages,
            "events": self.events,
            "utilisation": self.by_kind(),
            "busiest_links": dict(self.busiest()),
            "critical_path": None
            if self.path is None
            else [_plain(h) for h in self.path],
        }

    def __repr__(self) -> str:
        """What it means, in one line."""
        most = "" if self.exact else "at most "
        return f"<Result: {self._title}: {most}{format_seconds(self.time)}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        most = "" if self.exact else "at most "
        facts = {
            "time": f"{most}{format_seconds(self.time)} ({self.fidelity})",
            "bus bandwidth": format_bandwidth(self.busbw),
            "bound": f"{format_seconds(self.bound)}: {self.optimum:.1%} of the optimum",
            **{name: f"busy {part:.0%} of the time" for name, part in self.busiest(3)},
        }
        return html_table(self._title, facts)

    @property
    def _title(self) -> str:
        what = f"{self.collective.name} by {self.algorithm}"
        return f"{what} of {format_bytes(self.nbytes)} on {self.topology.name}"

    def __str__(self) -> str:
        """A few lines for people: time, bandwidth, busiest links, critical path."""
        most = "" if self.exact else "at most "
        lines = [
            f"{self._title} ({self.fidelity})",
            f"  time    {most}{format_seconds(self.time)}, bus bandwidth "
            f"{format_bandwidth(self.busbw)}",
            f"  bound   {format_seconds(self.bound)}: {self.optimum:.1%} of the "
            "optimum",
        ]
        if self.compute:
            lines.append(
                f"  beside  {format_seconds(self.compute)} of computing: "
                f"{format_seconds(self.exposed)} exposed"
            )
        for name, part in self.busiest(3):
            lines.append(f"  link    {name}: busy {part:.0%} of the time")
        path = self.path or ()
        lines += (
            [f"  path    {len(path)} messages, the first and last:"] if path else []
        )
        shown = path if len(path) <= 6 else (*path[:3], *path[-3:])
        lines += [f"    {hop}" for hop in shown]
        return "\n".join(lines)


def _plain(hop: Hop) -> dict[str, object]:
    return {name: getattr(hop, name) for name in Hop.__dataclass_fields__}


def bus_factor(what: Collective, n: int) -> float:
    """What passes through each rank's port at best, in buffers."""
    if what is BARRIER:
        return 0.0
    if what in (BROADCAST, REDUCE):
        return 1.0
    return (2.0 if what is ALL_REDUCE else 1.0) * (n - 1) / n
