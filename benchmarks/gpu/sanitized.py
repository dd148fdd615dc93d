"""A few calls between two ranks on a GPU, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool racecheck python -m benchmarks.gpu.sanitized

and likewise with memcheck and synccheck. Kernels run many times slower under it, so the
calls are few and small: several algorithms, an odd size, and one of several pieces.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.ranks import StreamRanks, array, prepare_streams

COUNTS = 1, 1001, 1 << 18
CALLS = (
    ("all_reduce", "direct"),
    ("all_reduce", "ring"),
    ("all_reduce", "recursive_doubling"),
    ("all_gather", "direct"),
)


def main() -> None:
    """Make the calls, and check what they give."""
    prepare_streams()
    ranks = StreamRanks(2)
    for collective, algorithm in CALLS:
        for count in COUNTS:
            xs = [array(count) for _ in range(2)]

            def call(
                comm: Any,
                rank: int,
                stream: Any,
                xs: list[Any] = xs,
                how: tuple[str, str] = (collective, algorithm),
            ) -> Any:
                name, algorithm = how
                made = getattr(comm, name)(xs[rank], algorithm=algorithm, stream=stream)
                return xs[rank] if made is None else made

            made = ranks.world.run(lambda c: call(c, c.rank, ranks.streams[c.rank]))
            ranks.synchronize()
            expected = 2 if collective == "all_reduce" else 1
            right = all((x.numpy() == expected).all() for x in made)
            print(f"{collective} by {algorithm}, {count} elements:", _word(right))
    ranks.close()


def _word(right: bool) -> str:
    return "right" if right else "WRONG"


if __name__ == "__main__":
    main()
