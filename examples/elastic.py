"""Training that survives: ranks die, the others go on, replacements join.

    unisono run -n 4 examples/elastic.py 1000      then kill -9 any of its ranks, and
    UNISONO_JOIN=1 UNISONO_JOB=... python examples/elastic.py 1000     start another

Each step adds up the gradients of a batch, in buckets; each rank works out those of its
share of the batch. When a rank is lost the step in flight is, and no more: a rank may
be one step ahead of another by then, and all go on from the one that has got furthest.
Whatever happens, the weights at the end are those of a run in which nothing did.
"""

import os
import sys
import time

import numpy as np

import unisono

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
BATCH, BUCKETS, SIZE = 48, 4, 4096


class State:
    """What a newcomer must be given: the weights, and how far they are."""

    def __init__(self) -> None:
        self.step = 0
        self.weights = [np.zeros(SIZE) for _ in range(BUCKETS)]


def share(comm: unisono.Communicator, state: State) -> None:
    """Give all ranks the state of the one that has got furthest."""
    steps = comm.all_gather(np.array([state.step]))
    furthest = int(steps.argmax())
    for weights in state.weights:
        comm.broadcast(weights, root=furthest)
    state.step = int(steps[furthest])


def train(comm: unisono.Communicator, state: State) -> None:
    """One step; the weights change only when all of it is there."""
    sums = []
    for bucket in range(BUCKETS):
        mine = np.zeros(SIZE)
        for sample in range(comm.rank, BATCH, comm.world_size):
            mine += gradient(state.step, bucket, sample)
        sums.append(comm.all_reduce(mine))
    for weights, total in zip(state.weights, sums, strict=True):
        weights -= total
    state.step += 1


def gradient(step: int, bucket: int, sample: int) -> np.ndarray:
    """Whole numbers, so that the order of additions does not matter."""
    return (np.arange(SIZE) * (step + 3) + 7 * bucket + sample) % 31.0


def main() -> None:
    """Train; after every change of the world make sure that all have the same state."""
    pause_s = float(os.environ.get("ELASTIC_PAUSE_S", "0"))
    comm = unisono.init()
    wanted = int(os.environ.get("ELASTIC_WORLD", comm.world_size))
    state, known = State(), None
    while True:
        try:
            while comm.world_size < wanted:
                comm = comm.grow(wanted, timeout_s=60)
            if comm is not known:
                share(comm, state)
                known = comm
            if state.step >= STEPS:
                comm.barrier()
                break
            train(comm, state)
        except unisono.PeerLost as lost:
            print(f"step {state.step}: {lost}", flush=True)
            comm = comm.shrink()
        if comm.rank == 0 and state.step % 10 == 0:
            print(f"at {state.step}, {comm.world_size} ranks", flush=True)
        time.sleep(pause_s)
    total = sum(float(np.dot(w, np.arange(1, SIZE + 1))) for w in state.weights)
    print(f"end: {state.step} steps, {comm.world_size} ranks, {total:.0f}", flush=True)
    comm.close()


if __name__ == "__main__":
    main()
