"""Names that people know from MPI, NCCL and PyTorch; and old ones, which warn."""

import threading

import numpy as np
import pytest

import unisono
from unisono import BadArgument, PeerLost, ReduceOp
from unisono.dtypes import OPS
from unisono.runtime.observe import monitor
from unisono.testing import world, world_across


def test_reduce_op_constants_and_avg_name_the_same_reductions():
    def rank(comm):
        x = np.full(3, float(comm.rank))
        for op in ("mean", "avg", ReduceOp.AVG):
            for _ in range(2):  # the second time it skips Python
                assert (comm.all_reduce(x.copy(), op=op) == 0.5).all()
        assert (comm.all_reduce(x.copy(), op=ReduceOp.MAX) == 1).all()
        with pytest.raises(BadArgument, match="op='mean' is meant"):
            comm.all_reduce(x, op="average")

    world(2).run(rank)
    assert {str(op) for op in ReduceOp} == set(OPS)


@pytest.mark.parametrize("algorithm", ["naive", "ring", "tree", "halving_doubling"])
def test_mean_of_integers_is_the_exact_quotient_towards_zero(algorithm):
    """Also above 2^53, where a float64 has no odd numbers; sums wrap before."""
    large = (1 << 60) + 1
    values = [[large, -7, 100], [large, 0, 100], [large, -1, 100]]

    def rank(comm):
        x = np.array(values[comm.rank] * 3)  # nine elements, divided by every algorithm
        mean = comm.all_reduce(x.copy(), op="mean", algorithm=algorithm)
        assert mean.dtype == np.int64
        assert mean.tolist() == [large, -2, 100] * 3  # -8 / 3
        small = comm.all_reduce(x.astype(np.int8), op="mean", algorithm=algorithm)
        assert small.tolist() == [1, -2, 14] * 3  # 300 wraps to 44
        unsigned = comm.all_reduce(np.full(9, 255, np.uint8), op="avg")
        assert unsigned.tolist() == [84] * 9  # 765 wraps to 253

    world(3).run(rank)


def test_size_is_world_size():
    assert world(3).run(lambda comm: comm.size) == [3, 3, 3]


@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_sendrecv_passes_a_ring(count):
    def rank(comm):
        x, out = np.full(count, float(comm.rank)), np.empty(count)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        assert comm.sendrecv(x, right, out, left) is out
        assert (out == left).all()
        theirs = comm.sendrecv(x, right, out, left, tag=comm.rank, recv_tag=left)
        assert (theirs == left).all()

    world(3).run(rank)


def test_scatter_objects_gives_each_rank_its_own():
    def rank(comm):
        things = [{"rank": r, "x": "y" * r * 1000} for r in range(comm.size)]
        mine = comm.scatter_objects(things if comm.rank == 1 else None, root=1)
        assert mine == things[comm.rank]
        assert comm.all_gather_objects(comm.rank) == [0, 1, 2]
        assert comm.gather_objects(comm.rank, 2) == (
            [0, 1, 2] if comm.rank == 2 else None
        )

    world(3).run(rank)


def test_scatter_objects_with_a_wrong_number_is_refused_on_all_ranks():
    def rank(comm):
        with pytest.raises(BadArgument, match="scatter_objects"):
            comm.scatter_objects([1] if comm.rank == 0 else None)
        comm.barrier()  # it can still be used

    world(3).run(rank)


def test_abort_ends_calls_of_all_ranks_and_names_the_rank():
    began = threading.Barrier(3)

    def rank(comm):
        if comm.rank == 2:
            began.wait()
            comm.abort()
            comm.abort()  # once more means nothing
            with pytest.raises(unisono.UsageError, match="closed"):
                comm.barrier()
            return
        work = comm.all_reduce(np.ones(3), async_op=True)
        began.wait()
        with pytest.raises(PeerLost, match="aborted the communicator") as lost:
            work.wait()
        assert lost.value.ranks == (2,)
        with pytest.raises(PeerLost, match="aborted"):
            comm.barrier()

    world(3).run(rank)


def test_abort_ends_calls_on_other_hosts():
    def rank(comm):
        if comm.rank == 0:
            comm.abort()
            return
        with pytest.raises(PeerLost) as lost:
            comm.barrier(timeout_s=60)
        assert lost.value.ranks == (0,)

    world(4, hosts=(0, 0, 1, 2)).run(rank)


def old_copy():
    return unisono.copy(0, src=0, dst=1)


def old_reduce():
    return unisono.reduce(0, src=0, dst=1)


def old_gather():
    return world(2).run(lambda comm: comm.gather_object(comm.rank))


def old_all_gather():
    return world(2).run(lambda comm: comm.all_gather_object(comm.rank))


def old_coded():
    def rank(comm):
        x = np.ones(1000, np.float32)
        comm.all_reduce(x, codec="fp8", coded="hosts", error_bound=1.0)

    world(2, hosts=(0, 1)).run(rank)


def old_meeting():
    unisono.init(meeting_s=1.0).close()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (old_copy, "copy_step"),
        (old_reduce, "reduce_step"),
        (old_gather, "gather_objects"),
        (old_all_gather, "all_gather_objects"),
        (old_coded, 'codec="fp8@hosts"'),
        (old_meeting, "rendezvous_timeout_s"),
    ],
)
def test_old_names_work_and_warn(old, new):
    with pytest.warns(DeprecationWarning, match="is now .*" + new):
        old()


def test_old_name_of_rendezvous_timeout_sets_it():
    with (
        pytest.warns(DeprecationWarning, match="meeting_s"),
        pytest.raises(unisono.ConnectFailed, match=r"within 0\.2 s"),
    ):
        unisono.init(join=True, job="nowhere", meeting_s=0.2)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False)])
def test_old_variable_of_the_monitor_works_and_warns(value, expected, monkeypatch):
    monkeypatch.setenv(monitor.MONITOR, "1" if value == "0" else "0")
    assert monitor.is_requested() != expected
    monkeypatch.setenv("UNISONO_WATCH", value)
    with pytest.warns(DeprecationWarning, match="is now UNISONO_MONITOR"):
        assert monitor.is_requested() is expected


def test_old_option_of_world_across_works_and_warns():
    with pytest.warns(DeprecationWarning, match=r"is now world_across\(init=\)"):
        assert not world_across([1], meets=False).init
