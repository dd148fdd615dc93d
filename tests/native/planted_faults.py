"""Faults that the model of the protocol must find, and constants that it changes.

Each is an exact piece of the product's text and what stands in its place in the model. If
the text has changed, the build says which fault has to be planted anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Change:
    """`original`, which is found once in `file`, becomes `planted`."""

    name: str
    file: str
    original: str
    planted: str


@dataclass(frozen=True)
class Fault(Change):
    """A change that is made when its name is asked for, and the scenario that finds it."""

    scenario: str = ""
    options: dict[str, int] = field(default_factory=dict)


def _if(name: str) -> str:
    return f'model::planted("{name}")'


def _relaxed(name: str, file: str, text: str, order: str, scenario: str) -> Fault:
    """An operation that has lost its order."""
    weak = f"({_if(name)} ? std::memory_order_relaxed : std::{order})"
    return Fault(name, file, text, text.replace(f"std::{order}", weak), scenario)


CONSTANTS = (
    # A ring that a scenario can fill.
    Change(
        "a small ring",
        "ring.hpp",
        "inline std::size_t ring_capacity(std::size_t n) {\n",
        "inline std::size_t ring_capacity(std::size_t n) {\n  if (n > 0)\n    return 64;\n",
    ),
)

FAULTS: tuple[Fault, ...] = ()
