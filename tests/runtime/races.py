"""Everything at once on threads, for the race detector: `make sanitize` runs it.

Not a test by itself: what it shows, ThreadSanitizer says. `make arm` runs fewer rounds
of it, as many as the argument says.
"""

import sys
import threading

import numpy as np

from unisono.errors import CollectiveTimeout, UnisonoError
from unisono.testing import world

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 20


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
        pending.append(comm.all_reduce(x.copy(), codec="fp8", async_op=True))
        comm.all_reduce(x.copy(), codec="int8", algorithm="ring")
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


def exposed(comm):
    """Large calls on buffers that all can reach."""
    n, rank = comm.world_size, comm.rank
    x, whole = comm.empty(50_000), comm.empty(n * 50_000)
    for algorithm in (None, "ring", "direct"):
        x[:] = rank + 1
        comm.all_gather(x, out=whole, algorithm=algorithm)
        comm.all_reduce(x, algorithm=algorithm)
        assert (x == n * (n + 1) / 2).all()
        assert (whole.reshape(n, -1)[:, -1] == np.arange(1, n + 1)).all()


def messages(comm):
    """Messages that are waited for by two threads, some of them in vain."""
    n, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    x = np.full(30_000, rank)
    for tag in range(5):
        works = [
            comm.send(x, right, tag=tag, async_op=True),
            comm.recv(np.empty_like(x), left, tag=tag, async_op=True),
            comm.recv(np.empty(1), left, tag=99, async_op=True, timeout_s=0.01),
        ]
        beside = threading.Thread(target=ends, args=(works,))
        beside.start()
        result = ends(works)
        beside.join()
        assert result == [None, None, CollectiveTimeout]
    comm.barrier()


def ends(works):
    """How each of them ends: with nothing, or with which error."""
    parts = []
    for work in works:
        try:
            work.wait()
            parts.append(None)
        except UnisonoError as error:
            parts.append(type(error))
    return parts


def two_threads(comm):
    """Two threads of every rank, each on a communicator of its own."""
    other = comm.duplicate()
    beside = threading.Thread(target=everything, args=(other,))
    beside.start()
    everything(comm)
    beside.join()
    other.close()


for n in (2, 3, 4):
    for window, hosts in (
        (4096, ()),
        (65536, ()),
        (65536, range(n)),  # each on an emulated host of its own,
        (4096, [r % 2 for r in range(n)]),  # or on two, in turn
    ):
        with world(n, window=window, hosts=hosts) as w:
            for _ in range(ROUNDS // n // (1 if not hosts else 2)):
                w.run(everything)
                w.run(exposed)
                w.run(messages)
            w.run(two_threads)
sys.stdout.write("no races seen\n")
