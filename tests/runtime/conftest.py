"""Worlds of threads that many tests share."""

import pytest

from unisono.testing import World, world


class Worlds:
    """One world for each number of ranks and size of window, made when first asked."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, int], World] = {}

    def __call__(self, n: int, window: int = 4096) -> World:
        found = self.made.get((n, window))
        if found is None or any("closed" in repr(c) for c in found.comms):
            found = self.made[n, window] = world(n, window=window, timeout_s=100)
        return found

    def close(self) -> None:
        for one in self.made.values():
            one.close()


@pytest.fixture(scope="module")
def worlds():
    made = Worlds()
    yield made
    made.close()
