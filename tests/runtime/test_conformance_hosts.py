"""The same on several hosts: messages between them, memory within, to the bit.

The ranks are threads that behave as if they were on different hosts: their streams are
real sockets, with frames, seals and checksums.
"""

import pytest
from conformance import check, every_algorithm, every_reduction, every_type, perform
from variants import VARIANTS

from unisono.algorithms import library
from unisono.testing import world

SPECIAL = [v for v in VARIANTS if v not in library()]
PLACES = [
    (0, 1),
    (0, 1, 2),
    (0, 0, 1),
    (0, 1, 2, 3),
    (0, 1, 0, 1),
    (0, 0, 0, 1),
    (0, 1, 2, 3, 4),
    (0, 0, 1, 1, 2),
    (0, 0, 0, 0, 1, 1, 1, 1),
    (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0),
]


@pytest.mark.parametrize("hosts", PLACES, ids=str)
def test_every_algorithm_on_any_hosts(hosts):
    """Sizes from nothing to many pieces, and to what is read in place."""
    n = len(hosts)
    elements = [0, 1, n - 1, n, 2777, 9001] if n < 6 else [1, 2777, 9001]
    cases = every_algorithm(n, elements)
    with world(n, window=2048, hosts=hosts) as w:
        check(cases, w.run(perform, cases), hosts)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 0, 1, 2)], ids=str)
def test_algorithms_with_parameters_on_any_hosts(hosts):
    n = len(hosts)
    cases = every_algorithm(n, [3 * n + 1, 1999], SPECIAL)
    with world(n, window=2048, hosts=hosts) as w:
        check(cases, w.run(perform, cases), hosts)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 1, 2)], ids=str)
def test_every_type_and_operation_on_any_hosts(hosts):
    n = len(hosts)
    cases = [*every_reduction(n), *every_type(n)]
    with world(n, window=1024, hosts=hosts) as w:
        check(cases, w.run(perform, cases), hosts)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1)], ids=str)
def test_messages_of_many_frames(hosts):
    """More than the sockets hold, so that everybody sends and receives at once."""
    n = len(hosts)
    by = [
        ("all_reduce", "ring"),
        ("all_reduce", "direct"),
        ("all_reduce", "recursive_doubling"),
        ("all_to_all", "direct"),
        ("broadcast", "chain"),
    ]
    cases = every_algorithm(n, [1_500_001], by)
    with world(n, hosts=hosts) as w:
        check(cases, w.run(perform, cases), hosts)
