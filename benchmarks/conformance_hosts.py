"""Every algorithm between hosts: what its schedule says, to the bit.

    python benchmarks/conformance_hosts.py [--loopback] [placement ...]

Hosts are network namespaces, which needs root; with --loopback they are emulated ones,
whose ranks speak over TCP all the same. A placement is how many ranks each host has, as
in 2,3,1. By default: two to four hosts with one to four ranks each, uneven ones
included, and 13 ranks on three. On each, all algorithms of the library with several
sizes, roots and styles of buffers, and all element types and operations. The tests run
a few of these.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

from unisono.runtime.communicator import Communicator
from unisono.testing import Hosts, hosts_available, world_across

TESTS = Path(__file__).parents[1] / "tests"
PLACEMENTS = (
    *((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1), (3, 2), (4, 4)),
    *((1, 1, 1), (2, 3, 1), (1, 2, 2), (3, 3, 3), (5, 4, 4)),
    *((1, 1, 1, 1), (2, 1, 1, 2), (4, 3, 2, 1)),
)


def main() -> int:
    """Run all, and tell what differs."""
    words = [word for word in sys.argv[1:] if word != "--loopback"]
    loopback = "--loopback" in sys.argv
    why = hosts_available()
    if why and not loopback:
        print(f"not run: {why}")
        return 0
    asked = [tuple(int(n) for n in word.split(",")) for word in words] or PLACEMENTS
    failures = 0
    for placement in asked:
        began = time.monotonic()
        text = f"{len(cases(sum(placement)))} cases"
        try:
            if loopback:
                run(placement, None)
            else:
                with Hosts(len(placement)) as hosts:
                    run(placement, hosts)
        except AssertionError as wrong:
            failures += 1
            text = f"WRONG: {wrong}"
        print(f"{placement!s:15} {text}, {time.monotonic() - began:.0f} s", flush=True)
    return int(bool(failures))


def run(placement: tuple[int, ...], hosts: Hosts | None) -> None:
    """All cases on one placement."""
    world = world_across(placement, on=hosts, timeout_s=900.0, grace_s=60.0)
    results = world.run(perform, sum(placement))
    _suite().check(cases(sum(placement)), results)


def perform(comm: Communicator, n: int) -> Any:
    """A rank's part: which cases there are, every process finds by itself."""
    return _suite().perform(comm, cases(n))


def cases(n: int) -> list[Any]:
    """What is called, the same on all ranks."""
    suite = _suite()
    elements = [0, 1, n + 1, 2777, 70_001] if n < 6 else [1, 2777]
    found: list[Any] = suite.every_algorithm(n, elements)
    if n < 6:
        found += [*suite.every_reduction(n), *suite.every_type(n)]
    return found


def _suite() -> Any:
    """The cases and their results, which the tests have."""
    return importlib.import_module("conformance")


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "algorithms")]
    # By its name, under which new processes find it.
    sys.exit(importlib.import_module("conformance_hosts").main())
