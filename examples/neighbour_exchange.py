"""An algorithm that is not for every number of ranks: neighbour exchange.

    unisono verify examples/neighbour_exchange.py -n 1..64
    unisono explain all_gather examples/neighbour_exchange.py -n 6

Ranks in pairs swap all they have, first with the neighbour on one side, then with the
other, and so on in turn. From the second step on two chunks travel together, so this
takes half as many steps as a ring.
"""

from collections.abc import Iterator

import numpy as np

from unisono import Step, algorithm
from unisono.algorithms import Requirement
from unisono.schedule import copy_step

even = Requirement("an even number of ranks (or one)", lambda n: n == 1 or n % 2 == 0)


@algorithm(needs=even, alike="ring or circulant")
def all_gather(n: int) -> Iterator[Step]:
    """Even and odd neighbours swap what they learnt last, now left, now right."""
    if n == 1:
        return
    r = np.arange(n)
    side = np.where(r % 2 == 0, 1, -1)  # whom each rank speaks to first
    yield copy_step(r, src=r, dst=(r + side) % n)
    news = r - r % 2  # the pair of chunks learnt last begins here
    for step in range(1, n // 2):
        other = (r - side) % n if step % 2 else (r + side) % n
        pair = np.stack([news, news + 1], axis=1)
        yield copy_step(pair, src=r[:, None], dst=other[:, None])
        news = news[other]
