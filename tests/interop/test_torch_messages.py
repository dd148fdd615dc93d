"""Sends and receives, objects, barriers, by way of torch.distributed."""

import gc
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import expect, group, until

from forked import attempt
from unisono.errors import DroppedWork

pytestmark = pytest.mark.one_in(3)


def ring(rank, name):
    """Everybody sends to the right, with and without tags, and in any order."""
    n, me = rank.n, rank.number
    kind = getattr(torch, name)
    right, left = (me + 1) % n, (me - 1) % n
    with group(rank):
        for count in (0, 1, 100, 100_000):
            x = torch.full((count,), me % 2, dtype=torch.uint8).to(kind)
            y = torch.empty(count, dtype=kind)
            work = dist.isend(x, right)
            dist.recv(y, left)
            work.wait()
            expect(y, torch.full((count,), left % 2, dtype=torch.uint8).to(kind))
        works = [dist.isend(torch.tensor([me, tag]), right, tag=tag) for tag in (1, 2)]
        for tag in (2, 1):
            y = torch.empty(2, dtype=torch.int64)
            assert dist.recv(y, left, tag=tag) == left
            assert y.tolist() == [left, tag]
        for work in works:
            work.wait()


@pytest.mark.quick(n=[3], name=["float32", "bfloat16"])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "name", ["float32", "bool", "bfloat16", "float8_e4m3fnuz", "uint64", "complex64"]
)
def test_messages_pass_around_a_ring(ranks, n, name):
    ranks(n, ring, name)


def dropped(rank):
    """torch's works may be dropped: no warning, and the calls go on."""
    n, me = rank.n, rank.number
    with group(rank), warnings.catch_warnings(record=True, action="always") as caught:
        x, y = torch.ones(3), torch.empty(3)
        for _ in range(100):  # the last ones are remembered
            dist.isend(torch.full((3,), float(me)), (me + 1) % n)
            dist.recv(y, (me - 1) % n)
        dist.all_reduce(x, async_op=True)
        dist.barrier()
        gc.collect()
    assert x.tolist() == [n] * 3
    assert not [w for w in caught if issubclass(w.category, DroppedWork)]


def test_dropped_works_do_not_warn(ranks):
    ranks(2, dropped)


def from_anybody(rank):
    n, me = rank.n, rank.number
    with group(rank) as pg:
        if me == 0:
            seen = set()
            for _ in range(1, n):
                y = torch.empty(3)
                who = dist.recv(y)
                assert y.tolist() == [who] * 3
                seen.add(who)
            assert seen == set(range(1, n))
            y = torch.empty(1)
            work = dist.irecv(y, tag=9)
            work.wait()
            assert work._source_rank() == work.source_rank() == 1
            work = pg.recv_anysource([y], 10)
            assert work.get_future().wait()[0] is not None
            assert int(y) == 2
        else:
            dist.send(torch.full((3,), float(me)), 0)
            if me == 1:
                dist.send(torch.ones(1), 0, tag=9)
            if me == 2:
                dist.send(torch.full((1,), 2.0), 0, tag=10)


def test_recv_from_any_source_gives_the_sender(ranks):
    ranks(4, from_anybody)


def before_collectives(rank):
    """A receive that was posted first does not hold up a collective."""
    n, me = rank.n, rank.number
    with group(rank):
        y = torch.empty(5)
        waiting = dist.irecv(y, (me - 1) % n)
        x = torch.ones(3)
        dist.all_reduce(x)
        later = dist.all_reduce(x, async_op=True)
        dist.barrier()
        assert not waiting.is_completed()
        dist.barrier()
        sent = dist.isend(torch.full((5,), float(me)), (me + 1) % n)
        waiting.wait()
        sent.wait()
        later.wait()
        expect(y, torch.full((5,), float((me - 1) % n)))
        expect(x, torch.full((3,), float(n * n)))


def test_posted_receive_does_not_block_a_collective(ranks):
    ranks(3, before_collectives)


def in_batches(rank):
    n, me = rank.n, rank.number
    with group(rank):
        outs = [torch.empty(300, 2).t() for _ in range(n)]
        ops = []
        for r in range(n):
            if r != me:
                ops.append(dist.P2POp(dist.irecv, outs[r], r))
                ops.append(dist.P2POp(dist.isend, torch.full((2, 300), float(me)), r))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for r in range(n):
            if r != me:
                expect(outs[r].contiguous(), torch.full((2, 300), float(r)))


@pytest.mark.quick(n=[4])
@pytest.mark.parametrize("n", [2, 4])
def test_batches_of_messages_arrive(ranks, n):
    ranks(n, in_batches)


def to_itself(rank):
    with group(rank):
        result = attempt(dist.send, torch.ones(1), rank.number)
        assert result["error"] == "ValueError"


def test_send_to_itself_is_refused(ranks):
    ranks(2, to_itself)


def wrong_size(rank):
    with group(rank):
        if rank.number == 0:
            dist.isend(torch.ones(5), 1).wait()
            return None
        return attempt(dist.recv, torch.empty(3), 0)


def test_message_that_does_not_fit_is_an_error(ranks):
    _, result = ranks(2, wrong_size)
    assert "20 bytes" in result["message"]


def objects(rank):
    n, me = rank.n, rank.number
    mine = {"rank": me, "text": "x" * (10 ** (me + 1)), "list": [1, (2, 3)]}
    with group(rank):
        out = [None] * n
        dist.all_gather_object(out, mine)
        assert [o["rank"] for o in out] == list(range(n))
        assert [len(o["text"]) for o in out] == [10 ** (r + 1) for r in range(n)]
        out = [None] * n if me == n - 1 else None
        dist.gather_object(mine, out, n - 1)
        assert out is None or [o["rank"] for o in out] == list(range(n))
        two = [mine, me]
        dist.broadcast_object_list(two, 0)
        assert two[0]["rank"] == two[1] == 0
        got = [None]
        dist.scatter_object_list(got, [f"for {r}" for r in range(n)], 0)
        assert got == [f"for {me}"]
        if n > 1 and me == 0:
            dist.send_object_list([mine, None], 1)
        elif me == 1:
            two = [None, 5]
            dist.recv_object_list(two, 0)
            assert two[0]["rank"] == 0
            assert two[1] is None


@pytest.mark.quick(n=[2])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_objects_are_gathered_and_broadcast(ranks, n):
    ranks(n, objects)


def barriers(rank):
    with group(rank) as pg:
        if rank.number == 0:
            time.sleep(0.3)
        came = time.monotonic()
        dist.barrier()
        went = time.monotonic()
        dist.barrier(async_op=True).wait()
        pg.monitored_barrier(timedelta(seconds=20))
        pg.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
        return [came, went]


@pytest.mark.quick(n=[2])
@pytest.mark.parametrize("n", [2, 4])
def test_no_rank_leaves_a_barrier_before_all_arrive(ranks, n):
    came, went = zip(*ranks(n, barriers), strict=True)
    assert max(came) <= min(went)  # nobody goes before all have come


def without_some(rank, wait_all):
    """Ranks 1 and 2 do not come to the monitored barrier; rank 3 has, before rank 0."""
    with group(rank) as pg:
        result, limit = None, timedelta(seconds=20)
        if rank.number == 0:
            rendezvous = pg._calls.rendezvous
            until(lambda: rendezvous._has("barrier/1/3"))
            limit = timedelta(seconds=0.4)
        if rank.number in (0, 3):
            result = attempt(pg.monitored_barrier, limit, wait_all_ranks=wait_all)
        dist.barrier()
        return result


@pytest.mark.parametrize("wait_all", [False, True])
def test_monitored_barrier_names_missing_ranks(ranks, wait_all):
    result = ranks(4, without_some, wait_all)
    who = "Ranks 1, 2" if wait_all else "Rank 1"
    assert result[0]["message"].startswith(f"{who} failed to pass monitoredBarrier")
    assert "Rank 3 successfully reached monitoredBarrier" in result[3]["message"]
