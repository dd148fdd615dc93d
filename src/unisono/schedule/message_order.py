"""The order of a rank's messages to another in one step, for those who simulate them.

`lower.py` sends what was made first before what was made later, and among those by the
slot that they go to. Here the transfers of a step are put in this order, each pair's in
the places that the pair has among them. It is exact for what is copied. What is added
up may come from several ranks, and then the last of them counts in a program; those who
simulate send what is added up as one message in any case.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from unisono.schedule.collective import Ints
from unisono.schedule.step import Bools, Step

Arrays = tuple[Ints, Ints, Ints, Bools, Ints]
"""src, dst, chunk, whether it adds, into: the transfers of a step, as `Step.flat`."""


def as_simulated(n: int, num_slots: int, *, streams: bool) -> Callable[[Step], Arrays]:
    """What puts each step in the order that a simulation sends it in, step by step.

    Without streams a pair has one message a step, and there is nothing to order.
    """
    return MessageOrder(n, num_slots).sent if streams else Step.flat


class MessageOrder:
    """Puts the transfers of each step in the order in which they are sent.

    Steps come one after the other: in which of them each slot was last written is kept.
    """

    def __init__(self, n: int, num_slots: int) -> None:
        """Begin with what is given, before the first step."""
        self._n = n
        self._num_slots = num_slots
        self._made = np.full(n * num_slots, -1, dtype=np.int32)
        self._step = 0

    def sent(self, step: Step) -> Arrays:
        """The next step's transfers, in arrays as those of `Step.flat`."""
        src, dst, chunk, reduces, into = step.flat()
        made = self._made[src * self._num_slots + chunk]
        pair = src * self._n + dst
        order = np.empty(src.size, dtype=np.int64)
        order[np.argsort(pair, kind="stable")] = np.lexsort((into, made, pair))
        self._made[dst * self._num_slots + into] = self._step
        self._step += 1
        return src[order], dst[order], chunk[order], reduces[order], into[order]
