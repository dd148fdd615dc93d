"""Groups of some ranks: made, used from several threads, thrown away."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import expect, group
from torch.distributed.device_mesh import init_device_mesh

from forked import attempt, await_that


def summed(of, who):
    """An all_reduce of one group, and what it must give."""
    x = torch.full((7,), float(dist.get_rank()))
    dist.all_reduce(x, group=of)
    expect(x, torch.full((7,), float(sum(who))))


def some_groups(rank):
    me = rank.number
    with group(rank):
        for who in ([0, 2], [1, 3], [3, 1, 0], [2], [0, 1, 2, 3]):
            made = dist.new_group(who)
            if me in who:
                summed(made, who)
                place = dist.get_group_rank(made, me)
                assert place == made.rank()
                assert dist.get_global_rank(made, place) == me
                y = torch.tensor([me])
                dist.broadcast(y, src=who[0], group=made)
                assert int(y) == who[0]
                out = [None] * len(who)
                dist.all_gather_object(out, me, group=made)
                assert out == dist.get_process_group_ranks(made)
                dist.barrier(made)
            else:
                assert made is dist.GroupMember.NON_GROUP_MEMBER
        mine, all_of = dist.new_subgroups(2)
        assert len(all_of) == 2
        summed(mine, [me // 2 * 2, me // 2 * 2 + 1])
        mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        summed(mine, [0, 3] if me in (0, 3) else [1, 2])


def test_overlapping_groups_work(ranks):
    ranks(4, some_groups)


def meshes(rank):
    me = rank.number
    with group(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        summed(mesh["row"].get_group(), [me % 2, me % 2 + 2])
        summed(mesh["column"].get_group(), [me // 2 * 2, me // 2 * 2 + 1])
        flat = mesh["row", "column"]._flatten("all")
        summed(flat.get_group(), range(4))
        cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
        summed(cube["a"].get_group(), [me % 2, me % 2 + 2])
        summed(cube["b"].get_group(), [me])
        summed(cube["c"].get_group(), [me // 2 * 2, me // 2 * 2 + 1])
        assert list(cube.get_coordinate()) == [me // 2, 0, me % 2]


def test_device_meshes_work(ranks):
    ranks(4, meshes)


def resources():
    threads = len(os.listdir("/proc/self/task"))
    return len(os.listdir("/proc/self/fd")), threads


def many(rank, times):
    with group(rank, kind="tcp"):
        for round_ in range(times):
            made = dist.new_group([0, 1])
            if round_ % 3:  # some are never used
                summed(made, [0, 1])
            dist.destroy_process_group(made)
            if round_ == 20:
                before = resources()
        dist.barrier()
        # What a rank lets go of, the other hears of a moment later.
        await_that(lambda: resources()[0] <= before[0] + 3, "the end of descriptors")
        await_that(lambda: resources()[1] <= before[1] + 3, "the end of threads")


@pytest.mark.sweep
def test_hundreds_of_groups_leak_nothing(ranks):
    assert ranks(2, many, 300) == [None, None]


def from_threads(rank):
    n, failures = rank.n, []
    with group(rank, kind="tcp"):
        groups = [dist.new_group(list(range(n))) for _ in range(4)]

        def use(number):
            try:
                for i in range(50):
                    x = torch.full((100 * number + 1,), float(number + i))
                    work = dist.all_reduce(x, group=groups[number], async_op=True)
                    work.get_future().wait() if i % 2 else work.wait()
                    expect(x, torch.full_like(x, n * float(number + i)))
            except BaseException as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return failures


@pytest.mark.sweep
def test_groups_work_from_threads(ranks):
    assert ranks(3, from_threads) == [[], [], []]


def only_messages(rank):
    """Rank 0 is the group's first member, and never uses it."""
    with group(rank):
        made = dist.new_group([0, 1, 2])
        if rank.number == 1:
            dist.send(torch.arange(5), 2, group=made)
        elif rank.number == 2:
            y = torch.empty(5, dtype=torch.int64)
            dist.recv(y, 1, group=made)
            assert y.tolist() == list(range(5))
        dist.barrier()


def test_group_works_if_its_first_member_never_uses_it(ranks):
    ranks(3, only_messages)


def of_itself(rank):
    """Groups that only their members make."""
    pair = [rank.number // 2 * 2, rank.number // 2 * 2 + 1]
    with group(rank):
        made = dist.new_group(pair, use_local_synchronization=True)
        summed(made, pair)


def test_groups_made_only_by_their_members_work(ranks):
    ranks(4, of_itself)


def used_after(rank):
    with group(rank):
        made = dist.new_group([0, 1])
        summed(made, [0, 1])
        dist.destroy_process_group(made)
        result = attempt(made.allreduce, [torch.ones(1)])
        summed(None, [0, 1])
        return result


def test_destroyed_group_is_closed(ranks):
    for result in ranks(2, used_after):
        assert "closed" in result["message"]


def shut_down(rank, how):
    with group(rank):
        made = dist.new_group([0, 1])
        summed(made, [0, 1])
        result = None
        if rank.number == 0:
            time.sleep(0.2)  # the other waits by now, most likely
            getattr(made, how)()
        else:
            result = attempt(made.allreduce([torch.ones(5)]).wait)
        summed(None, [0, 1])  # the other groups go on
        return result


@pytest.mark.parametrize("how", ["shutdown", "abort"])
def test_destroyed_group_is_peer_lost_on_the_others(ranks, how):
    result = ranks(2, shut_down, how)[1]
    assert result["error"] == "PeerLost"
    assert result["attributes"]["ranks"] == [0]


def aborted_in_flight(rank):
    """Who aborts finds that its own calls have ended."""
    with group(rank):
        made = dist.new_group([0, 1])
        if rank.number == 0:
            work = made.allreduce([torch.ones(5)])
            future = work.get_future()
            threading.Timer(0.2, made.abort).start()
            result = [attempt(work.wait), attempt(future.wait)]
        else:
            time.sleep(0.5)
            result = None
        return result


def test_calls_in_flight_end_with_the_group(ranks):
    result = ranks(2, aborted_in_flight)[0]
    assert all(result)
