"""A collective during computation: how much of it is hidden, and what that costs.

While ranks compute, a collective has less of them: memory, cores or multiprocessors
serve both, and it keeps `share` of its speed. So its clock runs slower for as long as
the computing lasts, and as ever after. What is left when the computing ends is exposed:
it is what a training step waits for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from unisono.errors import BadArgument
from unisono.simulate.result import Result, Timeline
from unisono.topology.topology import Floats


@dataclass(frozen=True)
class Compute:
    """So many seconds of it on every rank, from the beginning of the collective on."""

    seconds: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not 0 <= self.seconds < float("inf"):
            raise BadArgument(f"compute: {self.seconds:g} s; expected 0 or more")
        if not 0 < self.share <= 1:
            raise BadArgument(
                f"compute: share {self.share:g}: expected above 0, at most 1: the part "
                "of its speed that a collective keeps meanwhile"
            )

    def when(self, alone: Floats) -> Floats:
        """The times at which happens what would happen at these without computing."""
        slow = alone / self.share
        after = alone + self.seconds * (1 - self.share)
        return np.where(slow <= self.seconds, slow, after)

    def at(self, alone: float) -> float:
        """The same for one time."""
        return float(self.when(np.array(alone)))


def beside(found: Result, compute: Compute) -> Result:
    """The result of the collective alone, changed for computation at the same time."""
    if not compute.seconds:
        return found
    line, path = found.timeline, found.path
    return replace(
        found,
        time=compute.at(found.time),
        compute=compute.seconds,
        finished=None if found.finished is None else compute.when(found.finished),
        path=path
        and tuple(
            replace(hop, start=compute.at(hop.start), end=compute.at(hop.end))
            for hop in path
        ),
        timeline=line
        and Timeline(
            line.step,
            line.src,
            line.dst,
            line.nbytes,
            compute.when(line.start),
            compute.when(line.end),
        ),
    )
