"""The names of the engines of calls on CUDA arrays, and which one is asked for.

Apart from the engines, which are imported when the first such call is made.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from unisono.devices.variables import ENGINE as VARIABLE
from unisono.errors import BadArgument

UNISONO, NCCL = NAMES = ("unisono", "nccl")


class Wish(NamedTuple):
    """The engine that is asked for, and by whom."""

    name: str
    why: str


def wish(given: str) -> Wish:
    """The engine that this rank asks for; `given` is that of the communicator."""
    if given:
        return Wish(given, "engine= of the communicator")
    if said := os.environ.get(VARIABLE, ""):
        return Wish(said, f"{VARIABLE}={said}")
    return Wish(UNISONO, f"the default; {VARIABLE} or engine= choose another")


def checked(name: str) -> str:
    """The name of an engine; BadArgument if there is no such."""
    if name not in NAMES:
        raise BadArgument(f"engine = {name!r}: expected 'unisono' or 'nccl'")
    return name
