"""The same on several hosts: messages between them, memory within, to the bit.

The ranks are threads on emulated hosts: their streams are
real sockets, with frames, seals and checksums.
"""

import numpy as np
import pytest
from variants import VARIANTS

from conformance import check, every_algorithm, every_reduction, every_type, perform
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


@pytest.mark.sweep
@pytest.mark.quick(hosts=[(0, 1), (0, 0, 1, 1, 2)])
@pytest.mark.parametrize("hosts", PLACES, ids=str)
def test_every_algorithm_on_any_hosts_is_correct(hosts):
    """Sizes from nothing to many pieces, and to what is read in place."""
    n = len(hosts)
    elements = [0, 1, n - 1, n, 2777, 9001] if n < 6 else [1, 2777, 9001]
    cases = every_algorithm(n, elements)
    with world(n, window=2048, hosts=hosts) as w:
        check(cases, w.run(perform, cases), hosts)


@pytest.mark.quick(hosts=[(0, 1)])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 0, 1, 2)], ids=str)
def test_algorithms_with_parameters_on_any_hosts_are_correct(hosts):
    n = len(hosts)
    cases = every_algorithm(n, [3 * n + 1, 1999], SPECIAL)
    with world(n, window=2048, hosts=hosts) as w:
        check(cases, w.run(perform, cases), hosts)


@pytest.mark.sweep
@pytest.mark.quick(hosts=[(0, 0, 1)])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 1, 2)], ids=str)
def test_every_type_and_operation_on_any_hosts_is_correct(hosts):
    n = len(hosts)
    cases = [*every_reduction(n), *every_type(n)]
    with world(n, window=1024, hosts=hosts) as w:
        check(cases, w.run(perform, cases), hosts)


@pytest.mark.quick(hosts=[(0, 0, 1, 1)])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1)], ids=str)
def test_calls_of_many_frames_are_correct(hosts):
    """More than the sockets buffer, so that all ranks send and receive at once."""
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


def test_only_needed_peers_are_connected():
    """A ring has two neighbours, whatever its length."""

    def streams(comm):
        comm.all_reduce(np.ones(1000), algorithm="ring")
        others = [r for r in range(6) if r != comm.rank]
        return [r for r in others if comm.core.native.is_connected_to(r, False)]

    with world(6, hosts=range(6)) as w:
        assert w.run(streams) == [[(r + 1) % 6] for r in range(6)]


def test_communicators_do_not_block_each_other():
    """One has more under way than sockets hold, and its reader has not come yet."""

    def both(comm):
        other = comm.split(0)
        x = np.full(4_000_000, 1.0 + comm.rank)
        if comm.rank == 0:
            work = comm.broadcast(x, async_op=True)
            small = [other.all_reduce(np.ones(3))[0] for _ in range(50)]
            work.wait()
        else:
            small = [other.all_reduce(np.ones(3))[0] for _ in range(50)]
            comm.broadcast(x)
        return small, x[0], x[-1]

    with world(2, hosts=(0, 1)) as w:
        assert w.run(both) == [([2.0] * 50, 1.0, 1.0)] * 2


def test_explain_shows_hosts():
    with world(4, hosts=(0, 0, 1, 1)) as w:
        text = w.run(lambda comm: comm.explain("all_reduce", np.ones(100_000)))[0]
    assert "hosts      2; a rank sends to at most 1 on others" in text
