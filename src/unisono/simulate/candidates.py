"""Which algorithms there are for a collective on a topology, under fitting names.

A hierarchy needs the number of ranks of a host, and a torus its sides. Where a name
does not have them and the topology does, the name is completed: `hierarchical` on
dgx-h100:16 is `hierarchical:levels=8x16`.
"""

from __future__ import annotations

import re

import numpy as np

from unisono.algorithms import library
from unisono.algorithms import schedule as make
from unisono.algorithms.choices import FLAT, chosen_from, spelled
from unisono.errors import UsageError
from unisono.schedule.schedule import Schedule
from unisono.topology.topology import Topology

MOST_CHOSEN = 128
"""Up to so many ranks the runtime's hierarchies are all simulated, too."""


def fitted(algorithm: str, topology: Topology) -> str:
    """The name, completed from the topology."""
    name, _, options = algorithm.partition(":")
    if name == "hierarchical" and "levels=" not in options:
        levels = _levels(topology)
        return _with(name, options, f"levels={levels}") if levels else algorithm
    if name == "torus" and "shape=" not in options and topology.shape:
        return _with(name, options, f"shape={'x'.join(map(str, topology.shape))}")
    return algorithm


def _with(name: str, options: str, more: str) -> str:
    return f"{name}:{','.join(filter(None, [more, options]))}"


def _levels(topology: Topology) -> str:
    """As 8x16, or 5+4+4 where hosts differ; nothing if there is one host."""
    if topology.per_host:
        hosts = topology.n // topology.per_host
        return f"{topology.per_host}x{hosts}" if hosts > 1 else ""
    host = topology.wiring.host
    if host[-1] == 0 or (np.diff(host) < 0).any():
        return ""
    return "+".join(str(size) for size in np.bincount(host))


def schedule_for(
    collective: str, algorithm: str, topology: Topology, segments: int = 1
) -> Schedule:
    """The schedule of an algorithm on all ranks of a topology."""
    schedule = make(collective, fitted(algorithm, topology), topology.n)
    return schedule.split(segments) if segments > 1 else schedule


def candidates(collective: str, topology: Topology) -> list[str]:
    """All algorithms, with their variants, that can be had on this topology.

    With those from files and entry points, and with what the runtime chooses from.
    """
    names: dict[str, None] = {}
    for (what, _), algorithm in library().items():
        if what != collective:
            continue
        for variant in algorithm.variants:
            name = algorithm.spelled(**variant)
            full = {**algorithm.params, **variant}
            if algorithm.supports(topology.n, **full) and _made(what, name, topology):
                names[name] = None
    for name in _chosen(collective, topology):
        if name not in names and _made(collective, name, topology):
            names[name] = None
    return list(names)


def _chosen(collective: str, topology: Topology) -> list[str]:
    """What the runtime would choose from; there are too many for a large world."""
    if not 1 < topology.n <= MOST_CHOSEN:
        return []
    hosts = tuple(topology.wiring.host.tolist())
    stacked = [spelled(*choice) for choice in chosen_from(collective, hosts)]
    return [*FLAT[collective], *stacked]


def _made(collective: str, name: str, topology: Topology) -> bool:
    """Whether there is such a schedule; of large worlds that is seen later."""
    if topology.n > 4096:
        return True
    try:
        schedule_for(collective, name, topology)
    except UsageError:
        return False
    return True


def listed(text: str, collective: str, topology: Topology) -> list[str]:
    """The algorithms that "all", or names with commas between, mean."""
    if text in ("", "all"):
        return candidates(collective, topology)
    known = {name for _, name in library()}
    names: list[str] = []
    for part in text.split(","):
        if names and re.split(r"[:+]", part)[0] not in known and ":" in names[-1]:
            names[-1] += "," + part  # one more parameter of the one before
        else:
            names.append(part)
    return names
