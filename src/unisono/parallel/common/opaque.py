"""What torch.compile leaves as it is: code that communicates.

The compiler would trace through a strategy into the communicator, whose calls it knows
nothing of, and would compile a part of each. Functions that are marked here are called
as they are, with everything that they call; what is before and after them is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def opaque(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which torch.compile does not look into."""
    return cast(Callable[P, R], torch.compiler.disable(function))
