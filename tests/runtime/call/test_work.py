"""Calls in flight: many at once, waited for, aborted, dropped; and several threads."""

import gc
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest

from processes import on_processes
from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    DroppedWork,
    PeerLost,
)
from unisono.testing import world


def many_in_flight(comm):
    """Begun in one order, waited for in another, of every collective."""
    n, rank = comm.world_size, comm.rank
    works = []
    for i in range(40):
        x = np.full(200 * i, rank + i, np.int64)
        works.append((i, comm.all_reduce(x, async_op=True)))
    total = sum(range(n))
    for i, work in reversed(works):
        found = work.wait(30.0)
        assert work.done()
        assert work.exception() is None
        assert (found == total + n * i).all()
        assert work.wait() is found  # again
    x = np.arange(6 * n) + rank
    flying = [
        comm.all_gather(x[:2], async_op=True),
        comm.reduce_scatter(x, async_op=True, algorithm="ring"),
        comm.all_to_all(x, async_op=True),
        comm.broadcast(x.copy(), root=n - 1, async_op=True),
        comm.reduce(x.copy(), root=0, async_op=True),
        comm.gather(x[:1], root=0, async_op=True),
        comm.barrier(async_op=True),
    ]
    gathered, share, exchanged, cast, reduced, heads, nothing = (
        work.wait(30.0) for work in flying
    )
    assert gathered.tolist() == [r + i for r in range(n) for i in range(2)]
    assert (share == n * np.arange(6 * rank, 6 * rank + 6) + total).all()
    assert exchanged[::6].tolist() == [6 * rank + r for r in range(n)]
    assert (cast == np.arange(6 * n) + n - 1).all()
    assert (reduced is None) == (heads is None) == (rank != 0)
    assert nothing is None


@pytest.mark.parametrize("n", [1, 2, 4])
def test_many_calls_in_flight(worlds, n):
    worlds(n).run(many_in_flight)


def test_many_calls_in_flight_on_processes():
    on_processes(many_in_flight, 3)


def test_plain_calls_queue_behind_those_in_flight(worlds):
    def mixed(comm):
        x, y = np.full(50_000, 1.0), np.full(5, 1.0)
        work = comm.all_reduce(x, async_op=True)
        comm.all_reduce(y)  # comes after it, so it is done
        done = work.done()
        work.wait()
        return done, x[0], y[0]

    assert worlds(3).run(mixed) == [(True, 3.0, 3.0)] * 3


def test_wait_has_its_own_timeout(worlds):
    given_up = threading.Event()

    def waited(comm):
        if comm.rank == 1:
            assert given_up.wait(100)
        work = comm.all_reduce(np.ones(3), async_op=True)
        if comm.rank == 0:
            assert not work.done()
            assert "in flight" in repr(work)
            with pytest.raises(CollectiveTimeout, match=r"not done after 0\.05 s") as e:
                work.wait(0.05)
            given_up.set()
            assert e.value.ranks == (1,)
            assert e.value.collective == "all_reduce"
            assert isinstance(e.value, TimeoutError)
            assert work.exception() is None  # the call itself continues
        found = work.wait(100)
        assert "done" in repr(work)
        return found.tolist()

    assert worlds(2).run(waited) == [[2.0] * 3] * 2


def test_call_timeout_ends_it_on_all_ranks():
    ended = threading.Barrier(3)

    def late(comm):
        if comm.rank == 2:
            ended.wait(100)
        with pytest.raises(CollectiveTimeout) as caught:
            comm.all_reduce(np.ones(3), timeout_s=0.2)
        if comm.rank != 2:
            ended.wait(100)
        return 2 in caught.value.ranks, caught.value.seq

    with world(3) as w:
        assert w.run(late) == [(True, 1)] * 3


def test_work_keeps_its_exception(worlds):
    def failed(comm):
        x = np.ones(3 + comm.rank)
        work = comm.all_reduce(x, async_op=True)
        with pytest.raises(CollectiveMismatch):
            work.wait(100)
        assert isinstance(work.exception(), CollectiveMismatch)
        assert "failed" in repr(work)
        with pytest.raises(CollectiveMismatch):
            comm.all_reduce(np.ones(3))
        return sorted(work.exception().calls)

    with world(2) as w:
        assert w.run(failed) == [[0, 1]] * 2


def test_calls_in_flight_end_when_a_peer_leaves():
    begun = threading.Event()

    def left(comm):
        if comm.rank == 1:
            assert begun.wait(60)
            comm.close()
            return None
        works = [comm.all_reduce(np.ones(4), async_op=True) for _ in range(3)]
        begun.set()
        for work in works:
            with pytest.raises(PeerLost, match="rank 1"):
                work.wait(100)
            assert work.done()
        return [work.exception().ranks for work in works]

    with world(2) as w:
        assert w.run(left)[0] == [(1,)] * 3


@pytest.mark.filterwarnings("ignore::unisono.errors.DroppedWork")
def test_dropped_work_completes_and_keeps_its_arrays(worlds):
    def dropped(comm):
        kept = np.full(40_000, 1.0)
        comm.all_reduce(kept, async_op=True)
        for i in range(50):
            comm.all_reduce(np.full(1000 + i, 1.0), async_op=True)
        gc.collect()
        # Where the others' arrays were, if they have been freed.
        junk = [np.zeros(1000 + i) for i in range(50)]
        comm.barrier()
        assert all((j == 0).all() for j in junk)
        return kept[0], kept[-1]

    assert worlds(3).run(dropped) == [(3.0, 3.0)] * 3


def warnings_of(drop, n=2):
    """What each rank of a new world is warned of as `drop(comm)` runs; sorted."""
    with (
        world(n) as w,
        warnings.catch_warnings(record=True, action="always") as caught,
    ):
        w.run(drop)
    assert {one.category for one in caught} <= {DroppedWork}
    return sorted(str(one.message).partition(": its Work")[0] for one in caught)


def test_dropped_work_warns():
    def drop(comm):
        comm.all_reduce(np.ones(3), async_op=True, label="loss")
        comm.barrier()

    call = "all_reduce(float64 × 3, sum) by naive for loss"
    assert warnings_of(drop) == [f"{call} on rank {r} of 'world'" for r in (0, 1)]


def test_warning_says_what_to_do(worlds):
    def drop(comm):
        if comm.rank == 0:
            with pytest.warns(DroppedWork, match=r"call wait\(\)$") as caught:
                comm.barrier(async_op=True)
            assert caught[0].filename == __file__  # whose line dropped it
        else:
            comm.barrier()

    worlds(2).run(drop)


def test_dropped_work_of_several_collectives_warns_once():
    assert warnings_of(lambda comm: comm.scan(np.ones(3), async_op=True), 1) == [
        "scan on rank 0 of 'world'"
    ]


def test_works_of_a_closed_communicator_do_not_warn():
    def close(comm):
        work = comm.barrier(async_op=True)
        comm.close()
        del work

    assert warnings_of(close, 1) == []


def test_work_that_was_watched_does_not_warn():
    given_up = threading.Event()

    def watched(comm):
        comm.all_reduce(np.ones(3), async_op=True).wait()
        comm.scan(np.ones(3), async_op=True).wait()
        comm.broadcast_object(3)
        polled = comm.barrier(async_op=True)
        while not polled.done():
            time.sleep(1e-3)
        if comm.rank == 1:
            assert given_up.wait(100)
        late = comm.all_reduce(np.ones(3), async_op=True)
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout):
                late.wait(0.01)
            given_up.set()
            del late  # its error has told
        else:
            late.wait()

    assert warnings_of(watched) == []


def test_work_whose_result_needs_wait_warns_although_it_is_done():
    def polled(comm):
        out = np.empty((4, 2))[:, 0]  # has to be copied to
        work = comm.all_reduce(np.ones(4), out=out, async_op=True)
        while not work.done():
            time.sleep(1e-3)

    assert len(warnings_of(polled, 1)) == 1


def test_shown_work_still_warns():
    def shown(comm):
        comm.barrier()
        work = comm.barrier(async_op=True)
        while "in flight" in repr(work):
            time.sleep(1e-3)

    assert len(warnings_of(shown, 1)) == 1


def test_works_of_a_failed_communicator_do_not_warn():
    def failed(comm):
        work = comm.all_reduce(np.ones(3), async_op=True)
        with pytest.raises(CollectiveMismatch):
            comm.all_reduce(np.ones(3 + comm.rank))
        del work
        gc.collect()

    assert warnings_of(failed) == []


def test_warning_as_error_does_not_stop_the_program(monkeypatch):
    seen = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda about: seen.append(about.exc_type)
    )

    def drop(comm):
        comm.barrier(async_op=True)
        return comm.rank

    with world(1) as w, warnings.catch_warnings(action="error"):
        assert w.run(drop) == [0]
    assert seen == [DroppedWork]


def test_works_at_exit_do_not_warn():
    program = """
import numpy, unisono
comm = unisono.init()
work = comm.all_reduce(numpy.ones(3), async_op=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stderr == ""


def test_several_threads_use_one_communicator(worlds):
    """All make the same call, so it matters not which thread's comes first."""

    def shared(comm):
        found = []

        def use():
            found.extend(comm.all_reduce(np.ones(100))[0] for _ in range(25))

        run_all([use] * 4)
        return found

    assert worlds(3).run(shared) == [[3.0] * 100] * 3


def test_several_communicators_at_once_do_not_wait_for_each_other(worlds):
    """Each thread uses its own; the ranks' threads come in different orders."""

    def apart(comm):
        comms = [comm.duplicate() for _ in range(4)]
        found = [[] for _ in comms]

        def use(which):
            time.sleep(0.01 * ((which + comm.rank) % 4))
            for turn in range(20):
                x = np.full(300, which + turn, np.int64)
                found[which].append(comms[which].all_reduce(x)[0])

        run_all([lambda which=which: use(which) for which in range(4)])
        for one in comms:
            one.close()
        return found

    wanted = [[3 * (which + turn) for turn in range(20)] for which in range(4)]
    assert worlds(3).run(apart) == [wanted] * 3


def test_calls_in_flight_on_several_communicators(worlds):
    """Begun in opposite orders by the ranks: only their own order matters to them."""

    def crossed(comm):
        comms = [comm.duplicate() for _ in range(3)]
        arrays = [np.full(9000, i + 1.0) for i in range(3)]
        order = range(3) if comm.rank % 2 else reversed(range(3))
        works = {i: comms[i].all_reduce(arrays[i], async_op=True) for i in order}
        for i in range(3):
            works[i].wait(100)
        for one in comms:
            one.close()
        return [x[0] for x in arrays]

    assert worlds(4).run(crossed) == [[4.0, 8.0, 12.0]] * 4


def run_all(functions):
    """Run them on threads; what any of them raises is raised here."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
