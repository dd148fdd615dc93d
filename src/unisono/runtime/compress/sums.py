"""Sums over the ranks for which less is sent than there is.

A `Summing` is made for one tensor, of which it may remember something from call to call
(`memory`, plain arrays by name: to save them and to load them is to go on as before).
All ranks make the same ones and call them in the same order.
"""

from __future__ import annotations

from itertools import accumulate

from unisono.codecs.feedback import Memory
from unisono.codecs.topk import Floats
from unisono.runtime.collectives import Collectives
from unisono.runtime.stages import Stages


class Summing:
    """The base: where it runs, how long the tensor is, what it remembers."""

    def __init__(self, comm: Collectives, count: int) -> None:
        """`steps` are the calls that were made."""
        self.comm, self.count = comm, count
        self.memory: Memory = {}
        self.steps = 0
        sizes = shares(count, comm.world_size)
        self.bounds = list(accumulate(sizes, initial=0))

    def reduce(self, x: Floats, *, whole: bool = True, label: str = "") -> Stages:
        """Turn x (flat float32) into the sum, in place.

        With `whole` false only this rank's share of it has to be right: the elements
        from bounds[rank] to bounds[rank + 1].
        """
        raise NotImplementedError

    @property
    def mine(self) -> slice:
        """This rank's share."""
        return slice(self.bounds[self.comm.rank], self.bounds[self.comm.rank + 1])


def shares(count: int, n: int) -> list[int]:
    """How many elements each of n ranks has of `count`: the first ones one more."""
    return [count // n + (rank < count % n) for rank in range(n)]
