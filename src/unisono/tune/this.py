"""This machine as a topology, with measured links if there is a tuned table.

`topology.detect` reads the kernel's files, which have no bandwidths. If `unisono
tune` has left a table of this machine, the links inside a host have the latency and
bandwidth that were fitted there, and reductions have the measured cost. The description
of the topology says which of the two it is.
"""

from __future__ import annotations

import unisono
from unisono.errors import UsageError
from unisono.runtime.plan.tuned import TunedWorld, is_there, machine, path, read
from unisono.topology import Topology, detect, parse


def topology_named(text: str) -> Topology:
    """What the name means; "this" is this machine as it was measured, if it was."""
    return this_machine() if text == "this" else parse(text)


def this_machine() -> Topology:
    """A rank on each core, with measured links if there is a table; a description."""
    machine_ = detect()
    try:
        world = _measured(machine_.cores)
    except UsageError as why:
        plain = machine_.topology()
        return plain.but(about=f"{plain.about} (the tuned table is refused: {why})")
    if world is None:
        plain = machine_.topology()
        return plain.but(about=f"{plain.about}: `unisono tune` measures them")
    lines = [link for link in world.links if link.kind == "inside"]
    least, most = lines[0], lines[-1]
    about = (
        f"{machine_.model}; links as measured by `unisono tune` on {world.n} ranks"
        f"{f', {world.when}' if world.when else ''}"
    )
    return machine_.topology(
        latency=least.latency / 2,
        bandwidth=1 / most.byte if most.byte else 0.0,
        reduce=world.added_byte,
    ).but(about=about)


def _measured(cores: int) -> TunedWorld | None:
    """The world on one host whose number of ranks is nearest to that of the cores."""
    file = path()
    if file is None or not is_there():
        return None
    table = read(file)
    for mine, theirs in (
        (unisono.__version__, table.unisono),
        (machine(), table.machine),
    ):
        if mine != theirs:
            raise UsageError(f"{file} is of {theirs}, this is {mine}")
    known = [w for w in table.worlds if any(k.kind == "inside" for k in w.links)]
    known = [w for w in known if "." not in w.placement]
    return min(known, key=lambda w: (abs(w.n - cores), w.n), default=None)
