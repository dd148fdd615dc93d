"""The order of a pipeline stage's actions: forward and backward of micro-batches.

gpipe   F0 F1 F2 F3 B0 B1 B2 B3                 all forward, then all backward
1f1b    F0 F1 B0 F2 B1 F3 B2 B3  (stage 1 of 3) a backward as soon as there is one
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class PipelineAction(NamedTuple):
    """One action of a stage: forward or backward of one micro-batch."""

    forward: bool
    number: int

    def __str__(self) -> str:
        """As in the table: F0, B3."""
        return f"{'F' if self.forward else 'B'}{self.number}"


def gpipe(stage: int, n: int, m: int) -> list[PipelineAction]:
    """All micro-batches forward, then all backward."""
    return [PipelineAction(forward, i) for forward in (True, False) for i in range(m)]


def one_forward_one_backward(stage: int, n: int, m: int) -> list[PipelineAction]:
    """As many forward as stages follow, then alternately, then the rest backward."""
    ahead = min(n - 1 - stage, m)
    turns = [
        action for i in range(m - ahead) for action in ((True, ahead + i), (False, i))
    ]
    first = [(True, i) for i in range(ahead)]
    last = [(False, i) for i in range(m - ahead, m)]
    return [PipelineAction(*action) for action in (*first, *turns, *last)]


ORDERS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def table(order: str, n: int, m: int) -> Iterator[str]:
    """The actions of each stage, one line per stage."""
    for stage in range(n):
        yield " ".join(str(action) for action in ORDERS[order](stage, n, m))
