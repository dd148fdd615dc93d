"""Communicators: made, split, duplicated, closed; barriers and objects."""

import gc
import time

import numpy as np
import pytest

import unisono
from processes import on_processes
from unisono.errors import BadArgument, CollectiveTimeout, PeerLost, UsageError
from unisono.runtime.observe.failures import FailureCode
from unisono.testing import world

# --- alone


def test_world_of_one_is_no_special_case():
    with unisono.init(0, 1) as comm:
        x = np.arange(4.0)
        assert comm.all_reduce(x) is x
        assert comm.all_reduce(x, op="mean").tolist() == [0, 1, 2, 3]
        assert comm.broadcast(x) is x
        assert comm.reduce(x) is x
        for gathered in (comm.all_gather(x), comm.gather(x), comm.all_to_all(x)):
            assert gathered is not x
            assert (gathered == x).all()
        assert (comm.reduce_scatter(x, op="prod") == x).all()
        assert (comm.scatter(x) == x).all()
        assert comm.barrier() is None
        assert comm.broadcast_object({"a": 1}) == {"a": 1}
        assert comm.gather_objects("b") == comm.all_gather_objects("b") == ["b"]
        assert comm.split(3).world_size == 1
        assert comm.duplicate().rank == 0
        assert comm.split(None) is None
        for algorithm in ("ring", "tree", "recursive_doubling"):
            assert comm.all_reduce(x, algorithm=algorithm) is x
        assert comm.all_reduce(x, async_op=True).wait() is x


def test_repr_of_a_communicator(worlds):
    def describe(comm):
        peer = comm.peers[comm.rank]
        assert str(peer).startswith(f"rank {comm.rank} (pid ")
        return comm.rank, comm.world_size, comm.name, repr(comm), len(comm.peers)

    assert worlds(2).run(describe) == [
        (0, 2, "world", "<Communicator 'world': rank 0 of 2>", 2),
        (1, 2, "world", "<Communicator 'world': rank 1 of 2>", 2),
    ]


# --- the end


def test_closed_communicator_cannot_be_used():
    comm = unisono.init(0, 1)
    with comm as same:
        assert same is comm
    comm.close()  # again
    assert repr(comm) == "<Communicator 'world': rank 0 of 1, closed>"
    x = np.ones(2)
    for call in (
        lambda: comm.all_reduce(x),
        lambda: comm.broadcast(x),
        lambda: comm.all_gather(x, out=np.ones(2)),
        lambda: comm.barrier(),
        lambda: comm.send(x, 0),
        lambda: comm.recv(x),
        lambda: comm.empty(3),
        lambda: comm.split(0),
        lambda: comm.all_gather_objects(1),
    ):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_cached_calls_notice_that_it_is_closed():
    comm = unisono.init(0, 1)
    x = np.ones(2)
    for _ in range(3):
        comm.all_reduce(x)
    comm.close()
    with pytest.raises(UsageError, match="closed"):
        comm.all_reduce(x)


def test_other_ranks_notice_a_close():
    def closed(comm):
        comm.all_reduce(np.ones(1))
        if comm.rank == 1:
            comm.close()
            return None
        with pytest.raises(PeerLost, match=r"rank 1 .* closed its") as e:
            comm.all_reduce(np.ones(1))
        return e.value.ranks, e.value.collective, e.value.seq

    with world(3) as w:
        found = w.run(closed)
    assert found[0] == found[2] == ((1,), "all_reduce", 2)


def test_world_ends_when_one_of_its_ranks_raises():
    def fails(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        comm.all_reduce(np.ones(1))

    with world(3) as w, pytest.raises(KeyError, match="mine") as caught:
        w.run(fails)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]


def test_errors_keep_their_attributes_across_processes():
    with pytest.raises(CollectiveTimeout, match="timed out waiting for rank 1") as e:
        on_processes(one_is_late, 2)
    assert e.value.ranks == (1,)
    assert e.value.collective == "all_reduce"


def one_is_late(comm):
    while comm.rank and comm.core.native.failure()[0] == FailureCode.NONE:
        time.sleep(0.01)  # until rank 0 has timed out
    comm.all_reduce(np.ones(1), timeout_s=0.2)


# --- parts of it


def parts(comm):
    """Every kind of split; runs on threads and on processes."""
    n, rank = comm.world_size, comm.rank
    halves = comm.split(rank % 2)
    assert halves.world_size == (n + 1 - rank % 2) // 2
    assert halves.rank == rank // 2
    assert halves.name == f"world/{rank % 2}"
    members = halves.all_gather(np.array([rank]))
    assert members.tolist() == list(range(rank % 2, n, 2))
    turned = comm.split(0, key=-rank)
    assert turned.rank == n - 1 - rank
    assert turned.all_gather(np.array([rank])).tolist() == list(reversed(range(n)))
    assert turned.broadcast(np.array([rank]), root=0)[0] == n - 1
    some = comm.split(7 if rank < 2 else None)
    assert (some is None) == (rank >= 2)
    if some is not None:
        assert some.all_reduce(np.array([1]))[0] == 2
    equal = comm.split(1, key=5)  # equal keys: in the order of ranks
    assert equal.rank == rank
    nested = halves.split(0, key=-halves.rank)
    assert nested.name == f"world/{rank % 2}/0"
    assert nested.all_gather(np.array([rank])).tolist() == members.tolist()[::-1]
    assert nested.world_ranks == tuple(members.tolist()[::-1])
    alone = nested.split(nested.rank)
    assert alone.world_size == 1
    assert alone.all_reduce(np.array([rank]))[0] == rank
    nested.send(np.array([rank]), (nested.rank + 1) % nested.world_size)
    got = nested.recv(np.array([0]), (nested.rank - 1) % nested.world_size)
    assert got[0] % 2 == rank % 2
    for one in (alone, nested, equal, some, turned, halves):
        if one is not None:
            one.close()
    assert comm.all_reduce(np.array([1]))[0] == n


@pytest.mark.parametrize("n", [2, 3, 5])
def test_splits_on_threads(worlds, n):
    worlds(n).run(parts)


def test_split_of_many_ranks_plans_no_all_gather(worlds):
    """Every rank plans the transfers of all, and those of an all_gather are n²."""

    def split(comm):
        half = comm.split(comm.rank % 2, key=-comm.rank)
        assert half.world_ranks == tuple(range(comm.rank % 2, 18, 2))[::-1]
        assert half.all_reduce(np.array([1]))[0] == 9
        return {call["profiling_name"] for call in comm.records()}

    for calls in worlds(18).run(split):
        assert "all_gather" not in calls


def test_splits_on_processes():
    on_processes(parts, 4)


def test_duplicate_is_independent_of_its_parent(worlds):
    def twice(comm):
        other = comm.duplicate()
        assert (other.rank, other.world_size) == (comm.rank, comm.world_size)
        flying = comm.all_reduce(np.ones(3), async_op=comm.rank == 0)
        assert other.all_reduce(np.ones(3))[0] == 2
        if comm.rank == 0:
            flying.wait(100)
        comm.send(np.array([1]), 1 - comm.rank)
        other.send(np.array([2]), 1 - comm.rank)
        assert other.recv(np.array([0]), 1 - comm.rank)[0] == 2
        assert comm.recv(np.array([0]), 1 - comm.rank)[0] == 1
        other.close()
        return comm.all_reduce(np.ones(1))[0]

    assert worlds(2).run(twice) == [2, 2]


def test_broken_group_does_not_break_its_parent(worlds):
    def broken(comm):
        part = comm.duplicate()
        if comm.rank == 1:
            part.close()
        else:
            with pytest.raises(PeerLost):
                part.all_reduce(np.ones(2))
            part.close()
        return comm.all_reduce(np.ones(1))[0]

    assert worlds(3).run(broken) == [3, 3, 3]


def test_colors_and_keys_are_whole_numbers(worlds):
    def refused(comm):
        for color, key in ((1.5, 0), ("a", 0), (True, 0), (0, 1.5)):
            with pytest.raises(BadArgument, match="whole number"):
                comm.split(color, key)
        return comm.all_reduce(np.ones(1))[0]

    assert worlds(2).run(refused) == [2, 2]


# --- waiting


@pytest.mark.parametrize("algorithm", [None, "dissemination", "direct"])
def test_barrier_waits_for_all(worlds, algorithm):
    def waited(comm):
        how = {} if algorithm is None else {"algorithm": algorithm}
        comm.barrier(**how)
        for late in range(comm.world_size):
            if comm.rank == late:
                time.sleep(0.05)
                came.append(late)
            comm.barrier(**how)
            assert came[-1] == late
            comm.barrier(**how)

    came: list[int] = []
    worlds(3).run(waited)
    assert came == [0, 1, 2]


# --- objects


def objects(comm):
    n, rank = comm.world_size, comm.rank
    mine = {"rank": rank, "list": [None, (1, 2.5), "ü" * rank], "x": np.arange(rank)}
    for root in (0, n - 1):
        found = comm.broadcast_object(mine if rank == root else None, root=root)
        assert found["rank"] == root
        assert found["list"][1] == (1, 2.5)
        gathered = comm.gather_objects(mine, root=root)
        assert (gathered is None) == (rank != root)
        assert gathered is None or [g["rank"] for g in gathered] == list(range(n))
    every = comm.all_gather_objects(mine)
    assert [g["x"].size for g in every] == list(range(n))
    every[0]["x"] = 5  # ours to change
    large = comm.broadcast_object("a" * 3_000_000 if rank == 0 else None)
    assert len(large) == 3_000_000
    assert comm.all_gather_objects(None) == [None] * n


@pytest.mark.parametrize("n", [1, 2, 4])
def test_objects_on_threads(worlds, n):
    worlds(n).run(objects)


def test_objects_on_processes():
    on_processes(objects, 3)


class Opaque:
    """Something that only pickle can send."""

    def __eq__(self, other):
        return type(other) is Opaque

    __hash__ = None


def test_nothing_is_pickled_unless_allowed(worlds):
    def sent(comm):
        with pytest.raises(BadArgument, match="Opaque"):
            comm.all_gather_objects([1, Opaque()])
        with pytest.raises(BadArgument, match="Opaque"):
            comm.gather_objects(Opaque())
        every = comm.all_gather_objects(Opaque(), allow_pickle=True)
        assert every == [Opaque()] * comm.world_size
        assert comm.broadcast_object(Opaque(), allow_pickle=True) == Opaque()
        gathered = comm.gather_objects({"o": Opaque()}, root=1, allow_pickle=True)
        assert gathered is None or gathered == [{"o": Opaque()}] * comm.world_size

    worlds(2).run(sent)


def test_unsendable_object_does_not_block_others():
    """The root raises the cause; the others, at the latest, that it is gone."""

    def sent(comm):
        if comm.rank == 0:
            with pytest.raises(BadArgument, match="Opaque"):
                comm.broadcast_object(Opaque())
            comm.close()
            return
        with pytest.raises((PeerLost, BadArgument)):
            comm.broadcast_object()

    with world(2) as w:
        w.run(sent)


def test_communicators_that_have_ended_are_forgotten(monkeypatch):
    monkeypatch.setattr("unisono.transports.session.MOST_KNOWN", 5)
    gc.collect()
    gc.freeze()  # what other tests left: to collect is then a matter of microseconds

    def run(comm):
        kept = [comm.duplicate() for _ in range(3)]
        for _ in range(20):
            comm.duplicate().close()
            gc.collect()
        numbers = {c.core.native.id() for c in (comm, *kept)}
        known = comm.core.session.logbook.known
        assert numbers <= known.keys()
        return len(known)

    try:
        with world(2) as w:
            assert max(w.run(run)) <= 6
    finally:
        gc.unfreeze()
