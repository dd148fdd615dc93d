"""The library's rule for dividing a number of elements or rows among ranks."""

from __future__ import annotations


def shard_sizes(count: int, n: int) -> list[int]:
    """How many of `count` elements each of n ranks has: the first ones one more."""
    return [count // n + (rank < count % n) for rank in range(n)]
