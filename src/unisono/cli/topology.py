"""`unisono topology`: what a topology is made of, and what this machine is."""

from __future__ import annotations

from unisono.cli.output import print_json, print_text
from unisono.errors import BadArgument
from unisono.topology import PRESETS, detect
from unisono.tune import topology_named
from unisono.units import format_bandwidth

_LINKS_SHOWN = 12


def topology(action: str = "list", name: str = "", /, *, json: bool = False) -> int:
    """Show a topology (show NAME), this machine (detect), or the presets (list).

    Example: unisono topology show dgx-h100:16,nics=1

    Parameters
    ----------
    action
        list, show or detect.
    name
        With show: a preset, as torus:4x4x4, a .toml file, or "this".
    json
        Print one JSON object.
    """
    if (action == "show") != bool(name):
        raise BadArgument("topology: list, show NAME or detect")
    if action == "show":
        return _show(name, json=json)
    if action == "detect":
        return _detect(json=json)
    if action != "list":
        raise BadArgument(f"topology {action}: expected list, show NAME or detect")
    if json:
        print_json(
            {
                key: {"about": p.about, "example": p.example}
                for key, p in PRESETS.items()
            }
        )
        return 0
    for preset in PRESETS.values():
        print_text(f"{preset.example:<20} {preset.about}")
    print_text("my.toml              your own; docs/simulation.md has the format")
    return 0


def _show(name: str, *, json: bool) -> int:
    topology = topology_named(name)
    if json:
        print_json(topology.describe())
        return 0
    print_text(topology)
    wiring = topology.wiring
    shown = min(_LINKS_SHOWN, len(wiring.links))
    names = ", ".join(wiring.link_name(link) for link in range(shown))
    more = (
        f", and {len(wiring.links) - shown} more" if shown < len(wiring.links) else ""
    )
    print_text(f"  links: {names}{more}" if shown else "  no links")
    return 0


def _detect(*, json: bool) -> int:
    machine = detect()
    if json:
        print_json(machine.as_dict())
        return 0
    cores, nodes = machine.cores, len(machine.numa)
    print_text(f"{machine.model}: {cores} cores on {nodes} NUMA nodes")
    for i, numbers in enumerate(machine.numa):
        print_text(f"  numa {i:<4} cores {', '.join(map(str, numbers))}")
    for level, size in machine.caches.items():
        print(f"  {level:<9} {size}")
    for card in machine.cards:
        rate = (
            format_bandwidth(card.megabits * 1e6 / 8)
            if card.megabits
            else "unknown rate"
        )
        print_text(f"  card      {card.name}: {rate}")
    for gpu in machine.gpus:
        links = f"{gpu.nvlinks} NVLinks, {format_bandwidth(gpu.nvlink_bandwidth)}"
        print_text(f"  gpu       {gpu.name}: {links if gpu.nvlinks else 'no NVLink'}")
    print_text("  `unisono simulate -t this` simulates a rank on each core")
    return 0
