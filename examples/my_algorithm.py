"""An algorithm of one's own, in a file of one's own.

    unisono verify examples/my_algorithm.py -n 1..64
    unisono explain all_gather examples/my_algorithm.py -n 5

The file is the algorithm, the function is the collective. A step is one line of
arithmetic for all ranks at once; everything in it is read before anything is written.
"""

from collections.abc import Iterator

import numpy as np

from unisono import Step, algorithm
from unisono.schedule import copy_step


@algorithm
def all_gather(n: int) -> Iterator[Step]:
    """Chunk c leaves rank c and drops a copy at every other rank."""
    c = np.arange(n)
    for hop in range(n - 1):
        yield copy_step(c, src=(c + hop) % n, dst=(c + hop + 1) % n)
