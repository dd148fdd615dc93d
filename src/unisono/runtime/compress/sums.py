"""The base class of compressed sums over the ranks.

A `CompressedSum` is made for one tensor and may keep state between calls (`memory`,
plain arrays by name, which can be saved and loaded). All ranks make the same ones and
call them in the same order.
"""

from __future__ import annotations

from itertools import accumulate

from unisono.codecs.feedback import Memory
from unisono.codecs.topk import Floats
from unisono.runtime.call.shard_sizes import shard_sizes
from unisono.runtime.collectives import Collectives
from unisono.runtime.stages import Stages


class CompressedSum:
    """A compressed sum of one tensor over the ranks of a communicator."""

    def __init__(self, comm: Collectives, count: int) -> None:
        """`steps` is the number of calls so far."""
        self.comm, self.count = comm, count
        self.memory: Memory = {}
        self.steps = 0
        sizes = shard_sizes(count, comm.world_size)
        self.bounds = list(accumulate(sizes, initial=0))

    def reduce(self, x: Floats, *, whole: bool = True, label: str = "") -> Stages:
        """Turn x (flat float32) into the sum, in place.

        With `whole` false only this rank's part of it has to be right: the elements
        from bounds[rank] to bounds[rank + 1].
        """
        raise NotImplementedError

    @property
    def mine(self) -> slice:
        """This rank's part."""
        return slice(self.bounds[self.comm.rank], self.bounds[self.comm.rank + 1])
