"""Which cores a rank may run on: its share of those that the launcher may use.

Hardware threads of one core stay together, and cores of one package. `core` gives every
rank its own share, `numa` all cores of the NUMA nodes that this share touches.
"""

from __future__ import annotations

import os
from pathlib import Path

from unisono.errors import BadArgument, unknown

BINDINGS = ("none", "core", "numa")
_CPUS = Path("/sys/devices/system/cpu")


def refuse_unknown_binding(binding: str) -> None:
    """Raise BadArgument unless it is one of BINDINGS."""
    if binding not in BINDINGS:
        raise unknown("binding", binding, BINDINGS)


def cores_of_ranks(binding: str, ranks: int) -> list[set[int]] | None:
    """The cores of each rank of this host; None if ranks are not bound."""
    refuse_unknown_binding(binding)
    if binding == "none":
        return None
    cores = sorted(os.sched_getaffinity(0), key=_place)
    if ranks > len(cores):
        raise BadArgument(
            f"--bind-to {binding}: {ranks} ranks, but {len(cores)} cores on this host; "
            "start fewer ranks, or leave out --bind-to"
        )
    at = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    shares = [set(cores[at[rank] : at[rank + 1]]) for rank in range(ranks)]
    if binding == "core":
        return shares
    from unisono.topology.detect import numa_nodes  # it needs NumPy

    nodes = [set(node) for node in numa_nodes()]
    return [share.union(*(node for node in nodes if node & share)) for share in shares]


def _place(cpu: int) -> tuple[int, int, int]:
    """Package and core of a hardware thread, by which they are ordered."""
    topology = _CPUS / f"cpu{cpu}" / "topology"
    try:
        package = int((topology / "physical_package_id").read_text())
        return package, int((topology / "core_id").read_text()), cpu
    except (OSError, ValueError):
        return 0, cpu, cpu
