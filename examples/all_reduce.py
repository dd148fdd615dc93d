"""Four processes add up their arrays: unisono run -n 4 examples/all_reduce.py"""

import numpy as np

import unisono

with unisono.init() as comm:
    x = np.full(1_000_000, comm.rank + 1, dtype=np.float32)
    comm.all_reduce(x)
    n = comm.world_size
    right = bool((x == n * (n + 1) / 2).all())
    print(f"rank {comm.rank} of {n}: the sum is {x[0]:g}, {right}")
    print(comm.explain("all_reduce", x))
