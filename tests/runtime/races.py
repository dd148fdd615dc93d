"""Everything at once on threads, for the race detector: `make sanitize` runs it.

Not a test by itself: what it shows, ThreadSanitizer says.
"""

import sys
import threading

import numpy as np

from unisono.testing import world

ROUNDS = 20


def everything(comm):
    n, rank = comm.world_size, comm.rank
    pending = []
    for count in (1, 10, 1000, 100_003):
        x = np.full(count, rank + 1.0, dtype=np.float32)
        comm.all_reduce(x)
        assert (x == n * (n + 1) / 2).all()
        for algorithm in ("ring", "recursive_doubling", "tree", "naive"):
            comm.all_reduce(x, op="max", algorithm=algorithm)
        pending.append(comm.all_gather(x, async_op=True))
        pending.append(comm.reduce_scatter(np.ones((n, 7)), async_op=True))
        comm.broadcast(x, root=n - 1)
        comm.all_to_all(np.arange(n * 3))
        right, left = (rank + 1) % n, (rank - 1) % n
        sent = comm.send(x, right, tag=count, async_op=True)
        comm.recv(np.empty_like(x), left, tag=count)
        sent.wait()
    for work in pending:
        work.wait()
    part = comm.split(rank % 2)
    part.all_reduce(np.ones(5))
    part.close()
    return rank


def two_threads(comm):
    """Two threads of every rank, each on a communicator of its own."""
    other = comm.duplicate()
    beside = threading.Thread(target=everything, args=(other,))
    beside.start()
    everything(comm)
    beside.join()
    other.close()


for n in (2, 3, 4):
    for window in (4096, 65536):
        with world(n, window=window) as w:
            for _ in range(ROUNDS // n):
                w.run(everything)
            w.run(two_threads)
sys.stdout.write("no races seen\n")
