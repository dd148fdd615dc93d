"""A few calls between two ranks on a GPU, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool racecheck python -m benchmarks.gpu.sanitized

and likewise with memcheck and synccheck. Kernels run many times slower under it, so the
calls are few and small: several algorithms, an odd size, and one of several pieces.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from benchmarks.gpu.ranks import StreamRanks, array, prepare_streams

COUNTS = 1, 1001, 1 << 18
CALLS = (
    ("all_reduce", "direct"),
    ("all_reduce", "ring"),
    ("all_reduce", "recursive_doubling"),
    ("all_gather", "direct"),
)


def is_right(ranks: StreamRanks, collective: str, algorithm: str, count: int) -> bool:
    """Make one call on ones: are the results what they must be?"""
    xs = [array(count) for _ in range(ranks.n)]  # before any kernel waits

    def call(comm: Any) -> Any:
        x, stream = xs[comm.rank], ranks.streams[comm.rank]
        made = getattr(comm, collective)(x, algorithm=algorithm, stream=stream)
        return x if made is None else made

    made = ranks.world.run(call)
    ranks.synchronize()
    expected = ranks.n if collective == "all_reduce" else 1
    return all((x.numpy() == expected).all() for x in made)


def main() -> None:
    """Make the calls, and say what they gave."""
    prepare_streams()
    ranks = StreamRanks(2)
    for (collective, algorithm), count in product(CALLS, COUNTS):
        right = is_right(ranks, collective, algorithm, count)
        said = "right" if right else "WRONG"
        print(f"{collective} by {algorithm}, {count} elements: {said}", flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
