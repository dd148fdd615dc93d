"""The ideas: one file each, one function per collective.

To add one, add a file. `registry` says how it is written, `library` how it is found.

In the cost tables of the files, *rounds* are messages one after the other, *span* is
what passes through the busiest rank of each step, summed over the steps, and *work*
what it adds up; both in buffers of one rank (see `schedule/cost.py`).
"""

from unisono.algorithms.advice import LANGUAGES, Advice, Words
from unisono.algorithms.library import (
    Library,
    Spec,
    find,
    library,
    load_file,
    read,
    schedule,
)
from unisono.algorithms.registry import Algorithm, Requirement, algorithm, power_of_two
from unisono.deprecation import old_names

__all__ = [
    "LANGUAGES",
    "Advice",
    "Algorithm",
    "Library",
    "Requirement",
    "Spec",
    "Words",
    "algorithm",
    "find",
    "library",
    "load_file",
    "power_of_two",
    "read",
    "schedule",
]

__getattr__ = old_names(__name__, {"Need": "Requirement"})
