"""Which algorithms there are for a collective on a topology, under fitting names.

A hierarchy needs the number of ranks of a host, and a torus its sides. Where a name
does not have them and the topology does, the name is completed: `hierarchical` on
dgx-h100:16 is `hierarchical:levels=8x16`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from unisono.algorithms import choices, library
from unisono.algorithms import schedule as make
from unisono.schedule.schedule import Schedule
from unisono.topology.topology import Topology


def fitted(algorithm: str, topology: Topology) -> str:
    """The name, completed from the topology."""
    name, _, options = algorithm.partition(":")
    if name == "hierarchical" and "levels=" not in options:
        levels = _levels(topology)
        return _with(name, options, f"levels={levels}") if levels else algorithm
    if name == "torus" and "shape=" not in options and topology.shape:
        return _with(name, options, f"shape={'x'.join(map(str, topology.shape))}")
    return algorithm


def unfitted(algorithm: str, topology: Topology) -> str:
    """The name without what `fitted` completes, to be had at another size as well.

    A name that says something else than the topology stays as it is.
    """
    name, colon, options = algorithm.partition(":")
    if not colon:
        return algorithm
    given = options.split(",")
    rest = [part for part in given if not part.startswith(("levels=", "shape="))]
    plain = f"{name}:{','.join(rest)}" if rest else name
    completed = fitted(plain, topology).partition(":")[2]
    same = plain != algorithm and sorted(completed.split(",")) == sorted(given)
    return plain if same else algorithm


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


def candidates(
    collective: str, topology: Topology, files: Sequence[str] = ()
) -> list[str]:
    """All algorithms, with their variants, that can be had on this topology.

    They are those of the one list, `algorithms/choices.py`, with those of files and
    entry points; so what the runtime chooses is among them.
    """
    hosts = tuple(topology.wiring.host.tolist())
    return [
        name
        for name in choices.candidates(collective, hosts, files)
        if _made(collective, name, topology)
    ]


def _made(collective: str, name: str, topology: Topology) -> bool:
    """Whether there is such a schedule; of large worlds that is seen later."""
    if topology.n > 4096:
        return True
    name = fitted(name, topology)
    return choices.can_be_made(collective, name, topology.n) is not None


def listed(text: str, collective: str, topology: Topology) -> list[str]:
    """The algorithms that "all", or names with commas between, mean.

    "all,mine.py" are all there are, and that of a file.
    """
    known = {name for _, name in library()} | {"all"}
    names: list[str] = []
    for part in text.split(","):
        if names and re.split(r"[:+]", part)[0] not in known and ":" in names[-1]:
            names[-1] += "," + part  # one more parameter of the one before
        else:
            names.append(part)
    if names[0] not in ("", "all"):
        return names
    found = candidates(collective, topology, names[1:])
    for name in names[1:]:
        if name not in found:  # as if it had been named alone: this says why not
            schedule_for(collective, name, topology)
    return found
