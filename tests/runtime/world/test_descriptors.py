"""Descriptors of a rank: the formula of docs/performance.md."""

import os

import pytest

import unisono
from unisono.testing import world_across


def descriptors(comm):
    """How many are open here, after a call that every rank takes part in."""
    comm.barrier()
    found = len(os.listdir("/proc/self/fd"))
    comm.barrier()
    return found


def on_one_host(n):
    """The most of a rank."""
    return max(unisono.spawn(descriptors, n))


@pytest.mark.quick(worlds=[(2, 5)])
@pytest.mark.parametrize("worlds", [(2, 5), (3, 16)], ids=str)
def test_each_further_rank_of_a_host_takes_two(worlds):
    few, many = worlds
    assert on_one_host(many) - on_one_host(few) == 2 * (many - few)


def test_rank_0_has_one_more_for_each_rank_but_the_first_of_others():
    """Lifelines: rank 0 has n - 1, every other rank one."""
    n = 4
    first, *others = world_across([n], env={"UNISONO_PROBE": "0"}).run(descriptors)
    assert [first - other for other in others] == [n - 2] * (n - 1)
