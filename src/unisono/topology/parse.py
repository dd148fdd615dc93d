"""Topologies by name: `dgx-h100:128`, `torus:4x4x4`, `cloud:16x8,latency=50us`, a file.

After the colon comes the size, then options with commas between. Options are the
keyword parameters of the function that makes the preset, `staged` and `network_sums`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import BadTopology, unknown
from unisono.topology.clusters import cloud, dgx_a100, dgx_h100, wan
from unisono.topology.detect import detect
from unisono.topology.files import load
from unisono.topology.presets import dragonfly, fat_tree, full, ring, switch, torus
from unisono.topology.topology import Topology
from unisono.units import parse_seconds

MOST = 1 << 24
"""The most ranks that a name may ask for."""
_PROPERTIES = ("staged", "network_sums")
"""Options of every preset: ranks keep their buffers on GPUs; the network adds up."""
_SWITCHED = (*_PROPERTIES, "rails")
"""Options that are 0 or 1."""


@dataclass(frozen=True)
class Preset:
    """How a preset is made, and how many numbers its size has: 0 is any, from 1 on."""

    make: Callable[..., Topology]
    numbers: tuple[int, int]
    example: str

    @property
    def about(self) -> str:
        """The first line of the function's docstring."""
        return (self.make.__doc__ or "").partition("\n")[0]


PRESETS = {
    "ring": Preset(ring, (1, 1), "ring:8"),
    "full": Preset(full, (1, 1), "full:8"),
    "switch": Preset(switch, (1, 1), "switch:8"),
    "torus": Preset(torus, (1, 6), "torus:4x4x4"),
    "fat-tree": Preset(fat_tree, (1, 1), "fat-tree:4"),
    "dragonfly": Preset(dragonfly, (3, 3), "dragonfly:5x4x2"),
    "dgx-h100": Preset(dgx_h100, (1, 1), "dgx-h100:16,nics=1"),
    "dgx-a100": Preset(dgx_a100, (1, 1), "dgx-a100:4"),
    "cloud": Preset(cloud, (2, 2), "cloud:16x8"),
    "wan": Preset(wan, (1, 2), "wan:3x4"),
}
"""Topologies by name: how each is made, how many sizes it takes, an example."""


def parse(text: str) -> Topology:
    """The topology that a name, a .toml file, or "this" (the machine we are on) is."""
    if text == "this":
        return detect().topology()
    if text.endswith(".toml"):
        return load(Path(text))
    name, _, rest = text.partition(":")
    preset = PRESETS.get(name)
    if preset is None:
        raise BadTopology(f"{unknown('topology', name, PRESETS)} (or a .toml file)")
    size, *options = rest.split(",")
    sides = _sides(text, size, preset)
    keywords = _options(text, preset, options)
    asked = [one for one in _PROPERTIES if keywords.pop(one, 0)]
    made = _made(name, preset, sides, keywords)
    for one in asked:
        made = made.but(name=f"{made.name},{one}=1", **{one: True})
    return made


def _made(
    name: str,
    preset: Preset,
    sides: tuple[int, ...],
    keywords: dict[str, float | int],
) -> Topology:
    if preset.numbers == (1, 1):
        return preset.make(sides[0], **keywords)
    if name == "wan" and len(sides) == 1:
        sides = (*sides, 1)
    return preset.make(sides, **keywords)


def _sides(text: str, size: str, preset: Preset) -> tuple[int, ...]:
    least, most = preset.numbers
    match = re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", size)
    sides = tuple(int(side) for side in size.split("x")) if match else ()
    if not least <= len(sides) <= most:
        raise BadTopology(f"topology {text!r}: wrong shape; as in {preset.example}")
    ranks = 1
    for side in sides:
        ranks *= side
    if ranks < 1:
        raise BadTopology(f"topology {text!r}: all sides must be at least 1")
    if ranks > MOST:
        raise BadTopology(f"topology {text!r}: at most {MOST} ranks")
    return sides


def _options(text: str, preset: Preset, options: list[str]) -> dict[str, float | int]:
    known = [*list(inspect.signature(preset.make).parameters)[1:], *_PROPERTIES]
    values: dict[str, float | int] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in known or not equals:
            raise BadTopology(
                f"topology {text!r}: {unknown('option', key, known)}; as in "
                f"{preset.example},{known[0]}=..."
            )
        values[key] = _value(text, key, value)
    return values


def _value(text: str, key: str, value: str) -> float | int:
    try:
        if key == "latency":
            return parse_seconds(value)
        if key in _SWITCHED and value not in ("0", "1"):
            raise ValueError("expected 0 or 1")
        return int(value) if key in ("nics", *_SWITCHED) else float(value)
    except ValueError as why:
        raise BadTopology(f"topology {text!r}: {key}={value}: {why}") from why
