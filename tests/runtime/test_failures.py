"""Failures raise on every rank, with names, and soon: never a hang.

Functions named like what a rank does run on threads or in forked processes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from forked import (
    attempt,
    await_that,
    error_summary,
    interrupt_after,
    interrupt_in_call,
    until_broken,
)
from unisono import _native
from unisono.errors import (
    BadArgument,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    UsageError,
)
from unisono.runtime.core import Core
from unisono.runtime.observe.failures import late_hint
from unisono.testing import world

pytestmark = [pytest.mark.timeout(240), pytest.mark.one_in(2)]


def ones(count=10, dtype="float32"):
    return np.ones(count, dtype)


def until_called(comm, rank, seq):
    """Wait until a rank of this host has come to that call."""
    await_that(lambda: comm.core.native.states()[rank][0] >= seq, f"seq {seq}")


# --- mismatched calls


def calls_by_name(name):
    """A few calls; each differs from all others in something ranks must agree on."""
    return {
        "sum": lambda c: c.all_reduce(ones()),
        "max": lambda c: c.all_reduce(ones(), op="max"),
        "mean": lambda c: c.all_reduce(ones(), op="mean"),
        "float64": lambda c: c.all_reduce(ones(dtype="float64")),
        "int32": lambda c: c.all_reduce(ones(dtype="int32")),
        "eleven": lambda c: c.all_reduce(ones(11)),
        "many": lambda c: c.all_reduce(ones(300_000)),
        "ring": lambda c: c.all_reduce(ones(), algorithm="ring"),
        "in flight": lambda c: c.all_reduce(ones(12), async_op=True).wait(),
        "from 0": lambda c: c.broadcast(ones(), root=0),
        "from 1": lambda c: c.broadcast(ones(), root=1),
        "to 0": lambda c: c.reduce(ones(), root=0),
        "to 1": lambda c: c.reduce(ones(), root=1),
        "gather to 0": lambda c: c.gather(ones(), root=0),
        "gather to 1": lambda c: c.gather(ones(), root=1),
        "rows": lambda c: c.all_gather(ones()),
        "more rows": lambda c: c.all_gather(ones(12)),
        "parts": lambda c: c.reduce_scatter(ones(12)),
        "exchange": lambda c: c.all_to_all(ones(12)),
        "barrier": lambda c: c.barrier(),
        "objects": lambda c: c.all_gather_objects(["a", 1]),
        "split": lambda c: c.split(0),
    }[name]


CALLS = [
    *("sum", "max", "mean", "float64", "int32", "eleven", "many", "ring", "in flight"),
    *("from 0", "from 1", "to 0", "to 1", "gather to 0", "gather to 1"),
    *("rows", "more rows", "parts", "exchange", "barrier", "objects", "split"),
]


def differ(comm, usual, odd, who):
    """All ranks but one call the usual."""
    return attempt(calls_by_name(odd if comm.rank == who else usual), comm)


def check_mismatch(ends, who):
    """All ranks say the same: both sides, and whose they are."""
    for end in ends:
        assert end["error"] == "CollectiveMismatch", end
        calls = {int(r): call for r, call in end["attributes"]["calls"].items()}
        assert len(calls) == 2
        assert who in calls
        first, second = calls.values()
        assert first != second
        for call in calls.values():
            assert call in end["message"]
            assert "another collective" not in call


@pytest.mark.cases(3)
@pytest.mark.parametrize("usual", CALLS)
def test_different_calls_of_threads_raise_mismatch_on_all(usual):
    for number, odd in enumerate(CALLS):
        if odd != usual:
            who = number % 3
            with world(3, timeout_s=100) as w:
                check_mismatch(w.run(differ, usual, odd, who), who)


def differ_as_processes(rank, pairs):
    found = []
    for number, (usual, odd) in enumerate(pairs):
        with rank.init(timeout_s=100) as comm:
            found.append(differ(comm, usual, odd, number % rank.n))
    return found


def test_different_calls_of_processes_raise_mismatch_on_all(forks):
    pairs = [(CALLS[i], CALLS[(i + s) % len(CALLS)]) for i in range(22) for s in (1, 5)]
    for n in (2, 3):
        ends = forks.run(n, differ_as_processes, pairs)
        by_pair = zip(*[end.value for end in ends], strict=True)
        for number, told_by_all in enumerate(by_pair):
            check_mismatch(told_by_all, number % n)


def one_ahead(comm):
    """Rank 1 leaves out the second of three calls."""
    done = []
    error = None
    for number, size in enumerate((5, 6, 7)):
        if comm.rank != 1 or number != 1:
            error = error or attempt(comm.all_reduce, ones(size))
            done.append(error is None)
    return done, error


def test_rank_one_call_ahead_raises_mismatch():
    with world(3) as w:
        ends = w.run(one_ahead)
        assert any(done[0] for done, _ in ends)  # who is slow may hear of it in there
        for done, error in ends:
            assert not any(done[1:])
            assert error["attributes"]["calls"].keys() >= {1}
            assert error["attributes"]["seq"] == 2
            assert "× 6" in error["message"]
            assert "× 7" in error["message"]


def test_calls_after_a_mismatch_raise_it_again():
    def go_on(comm):
        errors = [attempt(comm.all_reduce, ones(5 + comm.rank)) for _ in range(3)]
        return [error["error"] for error in errors]

    assert world(2).run(go_on) == [["CollectiveMismatch"] * 3] * 2


def test_late_rank_gets_the_earlier_mismatch():
    def rank(comm):
        if comm.rank == 2:
            until_broken(comm)
            return attempt(comm.barrier)
        return attempt(comm.all_reduce, ones(5 + comm.rank))

    ends = world(3).run(rank)
    assert {e["error"] for e in ends} == {"CollectiveMismatch"}
    assert len({e["message"] for e in ends}) == 1


# --- deadlines


def is_late(comm, passed):
    """Rank 1 comes too late to a call, in which rank 2 is before rank 0."""
    comm.barrier()
    passed.wait(100)
    if comm.rank == 1:
        until_broken(comm)
    elif comm.rank == 0:
        until_called(comm, 2, 2)
    return attempt(comm.all_reduce, ones(), timeout_s=100 if comm.rank else 0.4)


def test_timeout_names_late_ranks_and_their_last_call():
    with world(3) as w:
        errors = w.run(is_late, threading.Barrier(3))
    for error in errors:
        assert error["error"] == "CollectiveTimeout"
        assert error["attributes"]["ranks"] == [1]
        assert error["attributes"]["collective"] == "all_reduce"
        assert error["attributes"]["seq"] == 2
        assert "rank 1 (" in error["message"]
    assert "all_reduce(float32 × 10, sum)" in errors[0]["message"]
    assert "0.4 s" in errors[0]["message"]
    assert "last seen at seq 1 in barrier()" in errors[0]["message"]


def test_timeout_says_what_names_the_cause(monkeypatch):
    for name in ("UNISONO_FLIGHT_DIR", "UNISONO_MONITOR"):
        monkeypatch.delenv(name, raising=False)

    def alone(comm):
        return attempt(comm.recv, ones(), 1 - comm.rank, timeout_s=0.01)["message"]

    hint = "UNISONO_FLIGHT_DIR=folder keeps records for unisono trace why"
    with world(2) as w:
        assert hint in w.run(alone)[0]
    monkeypatch.setenv("UNISONO_MONITOR", "1")
    with world(2) as w:
        assert f"unisono trace why {os.getpid()} names the cause" in w.run(alone)[0]


def waits_for_a_core(rank):
    """Each time it yields, others have the core for long."""
    comm = rank.init(timeout_s=100)
    comm.barrier()
    if rank.number == 1:
        rank.until("late", 0)
        return None
    _native.arm_failpoints("wait.yield:*:sleep=80,wait.yield:50:kill")
    error = attempt(comm.barrier, timeout_s=0.3)
    _native.arm_failpoints("")
    rank.tell("late")
    return error


def test_timeout_is_kept_when_yields_take_long(forks):
    end = forks.run(2, waits_for_a_core)[0]
    assert end.status == 0, "it has yielded 50 times without a look at the clock"
    assert end.value["error"] == "CollectiveTimeout", end
    assert end.value["attributes"]["ranks"] == [1]


def with_deadline_of_one_call(comm, passed):
    comm.all_reduce(ones())
    passed.wait(100)
    if comm.rank == 1:
        return "not there"
    began = time.monotonic()
    error = attempt(comm.all_reduce, ones(), timeout_s=0.3)
    return error, time.monotonic() - began


def test_timeout_applies_to_one_call():
    passed = threading.Barrier(2)
    error, took = world(2, timeout_s=100).run(with_deadline_of_one_call, passed)[0]
    assert error["error"] == "CollectiveTimeout"
    assert error["attributes"]["ranks"] == [1]
    assert "within 0.3 s" in error["message"]
    assert 0.29 < took < 60


def with_deadline_from(rank, where):
    options = {}
    if where == "environment":
        os.environ["UNISONO_TIMEOUT_S"] = "0.3"
    else:
        options["timeout_s"] = 0.3
    comm = rank.init(**options)
    comm.barrier(timeout_s=100)
    if rank.number == 0:
        found = comm.timeout_s, attempt(comm.recv, ones(), 1)
        comm.send(ones(1), 1, tag=1)
        return found
    comm.recv(ones(1), 0, tag=1, timeout_s=100)
    return None


@pytest.mark.parametrize("where", ["argument", "environment"])
def test_timeout_applies_to_all_calls(where, forks):
    ends = forks.run(2, with_deadline_from, where)
    seconds, error = ends[0].value
    assert seconds == 0.3
    assert error["error"] == "CollectiveTimeout"
    assert error["attributes"]["ranks"] == [1]


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan"])
def test_invalid_timeout_variable_is_refused(seconds, monkeypatch):
    import unisono

    monkeypatch.setenv("UNISONO_TIMEOUT_S", seconds)
    with pytest.raises(BadArgument, match="UNISONO_TIMEOUT_S"):
        unisono.init()


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_invalid_timeout_argument_is_refused(seconds):
    import unisono

    with pytest.raises(BadArgument, match="timeout_s"):
        unisono.init(timeout_s=seconds)
    with world(1) as w, pytest.raises(BadArgument, match="timeout_s"):
        w.comms[0].all_reduce(ones(), timeout_s=seconds)


def test_infinite_timeout_is_accepted():
    import unisono

    with unisono.init(timeout_s=float("inf")) as comm:
        comm.all_reduce(ones(), timeout_s=float("inf"))


def waits_for_work(comm, given_up):
    if comm.rank == 1:
        assert given_up.wait(100)
        comm.all_reduce(ones())
        return None
    work = comm.all_reduce(ones(), async_op=True)
    first, done = attempt(work.wait, timeout_s=0.1), work.done()
    given_up.set()
    return first, done, work.wait(timeout_s=100).tolist(), work.done()


def test_wait_timeout_leaves_the_work_running():
    found = world(2).run(waits_for_work, threading.Event())
    first, done, value, done_then = found[0]
    assert first["error"] == "CollectiveTimeout"
    assert first["attributes"]["ranks"] == [1]
    assert first["attributes"]["collective"] == "all_reduce"
    assert not done
    assert value == [2.0] * 10
    assert done_then


def work_with_deadline(comm, passed):
    comm.barrier()
    passed.wait(100)
    if comm.rank == 1:
        return None
    work = comm.all_reduce(ones(), async_op=True, timeout_s=0.2)
    error = attempt(work.wait)
    return error, work.done(), error_summary(work.exception())


def test_late_work_names_awaited_ranks():
    error, done, exception = world(2).run(work_with_deadline, threading.Barrier(2))[0]
    assert done
    assert error == exception
    assert error["error"] == "CollectiveTimeout"
    assert error["attributes"]["ranks"] == [1]
    assert error["attributes"]["seq"] == 2


def late_message(comm, direction):
    comm.barrier()
    if comm.rank == 0:
        how = {"timeout_s": 0.2}
        if direction == "send":
            return attempt(comm.send, ones(1_000_000), 1, **how)
        return attempt(comm.recv, ones(), 1, **how)
    comm.barrier(timeout_s=100)
    return None


@pytest.mark.parametrize("direction", ["send", "recv"])
def test_messages_have_timeouts(direction):
    with world(2) as w:

        def rank(comm):
            error = late_message(comm, direction) if comm.rank == 0 else None
            if comm.rank == 1:
                comm.barrier()
            comm.barrier()  # a message that was late spoils nothing else
            return error

        error = w.run(rank)[0]
    assert error["error"] == "CollectiveTimeout"
    assert error["attributes"]["ranks"] == [1]
    assert error["attributes"]["collective"] == direction


def test_aborted_message_does_not_affect_the_next():
    """What is received is one of the messages that were sent, or an error."""

    def rank(comm):
        if comm.rank == 0:
            late = attempt(comm.send, np.full(500_000, 1.0), 1, timeout_s=0.2)
            comm.barrier()
            second = attempt(comm.send, np.full(500_000, 2.0), 1, timeout_s=5)
            return late["error"], second and second["error"]
        comm.barrier()
        got = np.zeros(500_000)
        error = attempt(comm.recv, got, 0, timeout_s=5)
        return (error and error["error"]), sorted(set(got.tolist()))

    with world(2) as w:
        (late, _), (error, values) = w.run(rank)
    assert late == "CollectiveTimeout"
    assert error or values in ([1.0], [2.0]), f"a mixture of messages: {values}"


def exchanges(rank, rounds, count):
    comm = rank.init(timeout_s=100)
    others = [q for q in range(rank.n) if q != rank.number]
    got = np.zeros((rank.n, count), np.float32)
    for turn in range(rounds):
        given = np.full(count, turn, np.float32)
        sent = [comm.send(given, q, tag=turn, async_op=True) for q in others]
        received = [comm.recv(got[q], q, tag=turn, async_op=True) for q in others]
        for work in received + sent:
            work.wait()
        assert (got[others] == turn).all()
    comm.barrier()


def test_many_messages_in_flight_arrive(forks):
    """They are advanced by the waiting thread and the progress thread, at once."""
    for end in forks.run(3, exchanges, 1500, 50_000):
        assert (end.status, end.error) == (0, ""), end


def test_messages_of_one_tag_keep_their_order():
    """Several threads take in each other's messages and put them aside."""

    def rank(comm):
        wrong = []

        def talk(tag):
            for turn in range(300):
                comm.send(np.array([turn]), 1 - comm.rank, tag=tag)
                got = comm.recv(np.empty(1, int), 1 - comm.rank, tag=tag, timeout_s=100)
                if got[0] != turn:
                    wrong.append((tag, turn, int(got[0])))
                    return

        threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return wrong

    with world(2) as w:
        assert w.run(rank) == [[], []]


def test_receives_keep_their_order():
    """A plain one does not overtake one in flight that was called before it."""

    def rank(comm):
        found = set()
        for _ in range(150):
            if comm.rank == 0:
                for value, tag in ((1.0, 1), (2.0, 1), (0.0, 9)):
                    comm.send(np.array([value]), 1, tag=tag)
            else:
                comm.recv(np.empty(1), 0, tag=9)
                first, second = np.empty(1), np.empty(1)
                work = comm.recv(first, 0, tag=1, async_op=True)
                comm.recv(second, 0, tag=1)
                work.wait()
                found.add((first.item(), second.item()))
            comm.barrier()
        return found

    with world(2) as w:
        assert w.run(rank)[1] == {(1.0, 2.0)}


def is_a_slow_reader(rank, collective):
    """Others are in the next call, with another root, while one still reads."""
    comm, count = rank.init(timeout_s=100), 400_000
    moments = [f"action.begin:{hit}:sleep=30" for hit in range(5, 100, 7)]
    if rank.number < 2:
        _native.arm_failpoints(",".join(moments))
    wrong = []
    for turn in range(15):
        x = np.full(count, 10.0 * turn + rank.number, np.float32)
        if collective == "gather":
            found = comm.gather(x, root=turn % 3)
            if found is not None:
                wanted = np.repeat(10.0 * turn + np.arange(3), count)
                wrong += [turn] * int((found != wanted).any())
        else:
            found = comm.broadcast(x, root=turn % 3)
            wrong += [turn] * int((found != 10.0 * turn + turn % 3).any())
    return wrong


@pytest.mark.parametrize("collective", ["gather", "broadcast"])
def test_slow_reader_gets_the_data_of_its_own_call(collective, forks):
    for end in forks.run(3, is_a_slow_reader, collective):
        assert end.value == [], end


def warns(rank):
    """Rank 0 warns early, and arrives when only one is missing."""
    comm = rank.init(timeout_s=100)
    comm.barrier()
    if rank.number == 0:
        os.environ["UNISONO_MONITOR"] = "1"
        comm.core.native.set_late_hint(late_hint())
        comm.core.native.set_wait_policy(
            *comm.core.session.wait_policy, int(0.2e9), int(20e9)
        )
        threading.Thread(target=tells_of_warnings, args=(rank, 3)).start()
        until_called(comm, 1, 2)
    elif rank.number == 2:
        rank.until("1 warnings", 0)
    comm.all_reduce(ones())
    if rank.number == 0:
        comm.recv(ones(), 1)
        until_called(comm, 1, 3)
    elif rank.number == 1:
        rank.until("2 warnings", 0)
        comm.send(ones(), 0)
    else:
        rank.until("3 warnings", 0)
    comm.all_reduce(ones(), async_op=True).wait()


def tells_of_warnings(rank, count):
    """Let the others know how many lines this rank has written."""
    for number in range(1, count + 1):
        await_that(lambda n=number: os.pread(2, 1 << 16, 0).count(b"\n") >= n, "a line")
        rank.tell(f"{number} warnings")


def test_late_rank_is_warned_about(forks):
    ends = forks.run(3, warns)
    assert [end.error for end in ends] == [""] * 3
    assert len(re.findall(r"; see unisono trace why \d+\n", ends[0].stderr)) == 3
    text = re.sub(r"; see unisono trace why \d+\n", "\n", ends[0].stderr)
    lines = re.sub(r"waited \d+ s", "waited so long", text).splitlines()
    assert (
        lines[0]
        == "unisono: rank 0 has waited so long in all_reduce (seq 2) for rank 2"
    )
    assert lines[1].startswith("unisono: rank 0 has waited so long in recv")
    assert lines[1].endswith("for rank 1")
    assert (
        lines[2]
        == "unisono: rank 0 has waited so long in all_reduce (seq 3) for rank 2"
    )
    assert len(lines) == 3
    assert ends[2].stderr == ""


# --- signals


def blocked(name):
    """A call that only rank 0 makes."""
    return {
        "all_reduce": lambda c: c.all_reduce(ones()),
        "many": lambda c: c.all_reduce(ones(300_000)),
        "broadcast": lambda c: c.broadcast(ones(), root=1),
        "barrier": lambda c: c.barrier(),
        "send": lambda c: c.send(ones(1_000_000), 1),
        "recv": lambda c: c.recv(ones(), 1),
        "recv any": lambda c: c.recv(ones()),
        "work": lambda c: c.all_reduce(ones(), async_op=True).wait(),
        "work with limit": lambda c: c.barrier(async_op=True).wait(timeout_s=100),
        "queued": lambda c: (c.barrier(async_op=True), c.all_reduce(ones())),
        "split": lambda c: c.split(0),
        "objects": lambda c: c.all_gather_objects(1),
    }[name]


BLOCKED = [
    *("all_reduce", "many", "broadcast", "barrier", "send", "recv", "recv any"),
    *("work", "work with limit", "queued", "split", "objects"),
]
BREAKS = ("all_reduce", "many", "broadcast", "barrier", "split", "objects")


def is_interrupted(rank, name):
    comm = rank.init(timeout_s=100)
    comm.barrier()
    rank.tell("passed")
    if rank.number == 0:
        rank.until("passed", 1)
        began = time.monotonic()
        error = attempt(is_interrupted_in, blocked(name), comm)
        took = time.monotonic() - began
        rank.tell("interrupted")
        return error, took
    rank.until("interrupted", 0)
    return attempt(
        comm.barrier if name in BREAKS else lambda: comm.recv(ones(), 0, tag=9)
    )


def is_interrupted_in(call, comm):
    interrupt_in_call(comm)
    call(comm)


@pytest.mark.parametrize("name", BLOCKED)
def test_ctrl_c_ends_any_call(name, forks):
    ends = forks.run(2, is_interrupted, name)
    error, took = ends[0].value
    assert error["error"] == "KeyboardInterrupt", error
    assert took < 60
    lost = ends[1].value
    if name == "send":  # and so has aborted a message halfway
        assert lost["error"] in ("PeerLost", "TransportError")
        return
    assert lost["error"] == "PeerLost"
    assert lost["attributes"]["ranks"] == [0]
    assert lost["attributes"]["pids"] == [ends[0].pid]
    if name in BREAKS:
        assert "was interrupted" in lost["message"]


def is_interrupted_while_it_starts(rank):
    if rank.number == 1:
        return "does not come"
    return attempt(is_interrupted_soon, rank.init)


def is_interrupted_soon(call):
    interrupt_after(0.15)
    call()


def test_ctrl_c_ends_init(forks):
    ends = forks.run(2, is_interrupted_while_it_starts)
    assert ends[0].value["error"] == "KeyboardInterrupt"


def is_interrupted_as_a_guest(rank):
    if rank.number == 0:
        return "does not come"
    return attempt(is_interrupted_soon, rank.init)


def test_ctrl_c_ends_init_of_other_ranks(forks):
    ends = forks.run(2, is_interrupted_as_a_guest)
    assert ends[1].value["error"] == "KeyboardInterrupt"


def handles_signals(rank):
    """A handler that returns disturbs nothing."""
    seen = []

    def handle(number, frame):
        seen.append(number)
        if len(seen) == 1:
            interrupt_after(0.05, number)
        else:
            rank.tell("handled both")

    signal.signal(signal.SIGUSR2, handle)
    comm = rank.init(timeout_s=100)
    if rank.number == 0:
        interrupt_in_call(comm, signal.SIGUSR2)
    else:
        rank.until("handled both", 0)
    return comm.all_reduce(ones())[0].item(), len(seen)


def test_signal_handler_that_returns_affects_no_call(forks):
    ends = forks.run(2, handles_signals)
    assert [end.value for end in ends] == [[2.0, 2], [2.0, 0]]


def gives_up_its_array(rank):
    """Interrupted in a call that stands behind one in flight; then the other comes."""
    comm = rank.init(timeout_s=100)
    rank.tell("connected")
    rank.until("connected", 0, 1)
    if rank.number == 1:
        rank.until("aborted", 0)
        first = attempt(comm.all_reduce, ones())
        found = first, attempt(comm.all_reduce, np.full(50_000, 7.0, np.float32))
        rank.tell("came")
        return found
    given, works = [np.full(50_000, 7.0, np.float32)], []
    at = given[0].ctypes.data

    def calls():
        interrupt_in_call(comm, calls=2)
        works.append(comm.all_reduce(ones(), async_op=True))
        comm.all_reduce(given[0])

    error = attempt(calls)
    given.clear()
    others = [np.full(50_000, 3.0, np.float32) for _ in range(20)]
    rank.tell("aborted")
    rank.until("came", 1)
    for work in works:
        attempt(work.wait, timeout_s=5)
    spoilt = [float(x.max()) for x in others if (x != 3.0).any()]
    return error["error"], at in [x.ctypes.data for x in others], spoilt


def test_interrupted_call_writes_nothing_afterwards(forks):
    error, reused, spoilt = forks.run(2, gives_up_its_array)[0].value
    assert error == "KeyboardInterrupt"
    assert spoilt == [], f"memory that was given back was written to; reused: {reused}"


def is_terminated(rank):
    comm = rank.init(timeout_s=100)
    comm.barrier()
    if rank.number == 1:
        interrupt_after(0.1, signal.SIGTERM)
    return attempt(comm.recv, ones(), 1 - rank.number)


def test_sigterm_ends_a_rank_and_others_raise(forks):
    ends = forks.run(2, is_terminated)
    assert ends[1].status == -signal.SIGTERM
    assert ends[0].value["error"] == "PeerLost"
    assert ends[0].value["attributes"]["pids"] == [ends[1].pid]
    assert "died" in ends[0].value["message"]


def is_interrupted_among_threads(rank):
    with world(2, timeout_s=100) as w:
        began = time.monotonic()
        error = attempt(
            is_interrupted_soon,
            lambda: w.run(lambda c: c.rank == 0 or c.recv(ones(), 0)),
        )
        left = [t for t in threading.enumerate() if t is not threading.main_thread()]
        for thread in left:
            thread.join(30)
        return error["error"], time.monotonic() - began


def test_ctrl_c_ends_a_world_of_threads(forks):
    error, took = forks.run(1, is_interrupted_among_threads)[0].value
    assert error == "KeyboardInterrupt"
    assert took < 60


def is_interrupted_through_another_thread(rank):
    """The signal is delivered to a thread that is not the one that waits."""
    with world(2, timeout_s=100) as w:

        def work(comm):
            if comm.rank == 0:  # whose end is waited for first
                return comm.recv(ones(), 1)
            time.sleep(0.15)
            return signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        began = time.monotonic()
        error = attempt(w.run, work)
        return error["error"], time.monotonic() - began


def test_ctrl_c_reaches_a_world_whose_caller_waits_already(forks):
    error, took = forks.run(1, is_interrupted_through_another_thread)[0].value
    assert error == "KeyboardInterrupt"
    assert took < 60  # the call's timeout is 100


ENDS_EARLY = """
import threading, time
import numpy as np
from unisono.testing import world

w = world(2)
threading.Thread(target=lambda: w.comms[0].recv(np.ones(3), 1), daemon=True).start()
time.sleep(0.2)
"""


def test_thread_in_a_call_does_not_break_the_exit():
    done = subprocess.run(
        [sys.executable, "-c", ENDS_EARLY], capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


# --- forks


def forks_itself(rank, what):
    comm = rank.init(timeout_s=100)
    comm.all_reduce(ones())
    shared = comm.empty(10_000)
    work = comm.barrier(async_op=True) if what == "work" else None
    hear, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        calls = {
            "call": lambda: comm.all_reduce(ones()),
            "new call": lambda: comm.all_reduce(ones(17), op="max"),
            "send": lambda: comm.send(ones(), 1 - rank.number),
            "split": lambda: comm.split(0),
            "empty": lambda: comm.empty(3),
            "work": lambda: work.wait(timeout_s=2),
            "close": comm.close,
        }
        error = attempt(calls[what])
        os.write(tell, json.dumps(error).encode())
        del shared
        os._exit(0) if what == "split" else exit_as_python_does()
    os.close(tell)
    with os.fdopen(hear) as file:
        error = json.load(file)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if work is not None:
        work.wait()
    shared[:] = 1
    total = comm.all_reduce(shared)[0].item()
    sent = comm.send(ones(), 1 - rank.number, async_op=True)
    comm.recv(ones(), 1 - rank.number)
    sent.wait()
    return error, status, total


def exit_as_python_does():
    import atexit

    atexit._run_exitfuncs()
    os._exit(0)


@pytest.mark.parametrize(
    "what", ["call", "new call", "send", "split", "empty", "work", "close"]
)
def test_fork_is_no_rank_and_affects_none(what, forks):
    for end in forks.run(2, forks_itself, what):
        assert not end.error, end.stderr
        error, status, total = end.value
        assert status == 0
        assert total == 2.0
        if what == "close":
            assert error is None
        else:
            assert error["error"] == "UsageError", error
            assert "fork" in error["message"]


def loses_its_fork(rank):
    """A fork that outlives its parent does not hide the parent's death."""
    comm = rank.init(timeout_s=100)
    comm.barrier()
    if rank.number == 1:
        if os.fork() == 0:
            rank.until("known", 0)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    error = attempt(comm.recv, ones(), 1)
    rank.tell("known")
    return error


def test_living_fork_does_not_hide_a_death(forks):
    error = forks.run(2, loses_its_fork)[0].value
    assert error["error"] == "PeerLost", error


# --- ranks that leave


def closes_early(comm, call):
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.1)
        comm.close()
        return attempt(comm.barrier)
    return attempt(blocked(call), comm)


@pytest.mark.parametrize("call", ["all_reduce", "send", "recv", "recv any", "work"])
def test_close_ends_waiting_calls_of_others(call):
    with world(2, timeout_s=100) as w:
        lost, own = w.run(closes_early, call)
    assert lost["error"] == "PeerLost", lost
    assert "closed its communicator" in lost["message"]
    assert lost["attributes"]["ranks"] == [1]
    assert own["error"] == "UsageError"
    assert "closed" in own["message"]


def closes_early_as_process(rank, call):
    return closes_early(rank.init(timeout_s=100), call)


@pytest.mark.parametrize("call", ["all_reduce", "send", "recv", "recv any", "work"])
def test_close_ends_waiting_calls_of_other_processes(call, forks):
    lost, own = [end.value for end in forks.run(2, closes_early_as_process, call)]
    assert lost["error"] == "PeerLost"
    assert lost["attributes"]["ranks"] == [1]
    assert own["error"] == "UsageError"


@pytest.mark.parametrize("call", ["recv", "all_reduce", "work"])
def test_close_ends_waiting_calls_of_own_threads(call):
    def rank(comm):
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.6)
            return None
        ends = []
        waiting = threading.Thread(
            target=lambda: ends.append(attempt(blocked(call), comm))
        )
        waiting.start()
        time.sleep(0.2)
        comm.close()
        waiting.join(30)
        return ends

    with world(2, timeout_s=100) as w:
        ends = w.run(rank)[0]
    assert ends, "the thread still waits"
    assert ends[0]["error"] in ("PeerLost", "UsageError")


def needs_nobody(rank):
    """Rank 2 leaves early; the others continue without it, as long as they can."""
    comm = rank.init(timeout_s=100)
    pair = comm.split(0 if rank.number < 2 else 1)
    comm.barrier()
    if rank.number == 2:
        comm.send(ones(), 0, tag=5)
        return None
    time.sleep(0.3)
    total = pair.all_reduce(ones())[0].item()
    if rank.number == 0:
        last = comm.recv(np.zeros(10, np.float32), 2, tag=5)[0].item()
        pair.send(ones(), 1)
        return total, last, attempt(comm.barrier)
    pair.recv(ones(), 0)
    return total, 1.0, attempt(comm.barrier)


def test_rank_that_is_not_needed_may_leave(forks):
    ends = forks.run(3, needs_nobody)
    assert [end.status for end in ends] == [0, 0, 0], ends
    for end in ends[:2]:
        total, last, error = end.value
        assert (total, last) == (2.0, 1.0)
        assert error["error"] == "PeerLost"
        assert error["attributes"]["ranks"] == [2]
        assert error["attributes"]["pids"] == [ends[2].pid]


def outlives_the_world(rank, closing, then):
    """A part is used when the communicator it came from has been closed."""
    comm = rank.init(timeout_s=6)
    part = comm.duplicate()
    comm.barrier()
    if rank.number in closing:
        comm.close()
    time.sleep(0.2)
    if rank.number == 1:
        time.sleep(0.3)
        if then == "dies":
            os._exit(0)
    return attempt(part.all_reduce, ones())


@pytest.mark.parametrize("closing", [[0, 1], [0], [1]])
def test_group_survives_or_is_refused_when_its_parent_closes(closing, forks):
    errors = [end.value for end in forks.run(2, outlives_the_world, closing, "lives")]
    if errors != [None, None]:
        found = {errors[r]["error"] for r in closing}
        assert found == {"UsageError"}, errors


def test_death_is_noticed_in_a_group_of_a_closed_parent(forks):
    ends = forks.run(2, outlives_the_world, [0, 1], "dies")
    assert ends[0].value["error"] in ("PeerLost", "UsageError")


def test_error_of_one_rank_ends_a_world_of_threads():
    def rank(comm):
        comm.barrier()
        if comm.rank == 2:
            raise ZeroDivisionError("of rank 2")
        comm.all_reduce(ones())

    with pytest.raises(ZeroDivisionError, match="of rank 2") as caught:
        world(4, timeout_s=100).run(rank)
    assert caught.value.__notes__ == ["raised on rank 2 of 4"]


def test_other_threads_raise_peer_lost():
    seen = []

    def rank(comm):
        if comm.rank == 1:
            raise ZeroDivisionError
        try:
            comm.barrier()
        except PeerLost as error:
            seen.append((comm.rank, error.ranks, error.collective))
            raise

    with pytest.raises(ZeroDivisionError):
        world(3, timeout_s=100).run(rank)
    assert sorted(seen) == [(0, (1,), "barrier"), (2, (1,), "barrier")]


def test_errors_share_one_base_class():
    assert issubclass(CollectiveMismatch, UsageError)
    assert issubclass(CollectiveTimeout, TimeoutError)


# --- the flight recorder


def leaves_a_dump(rank, folder):
    os.environ["UNISONO_FLIGHT_DIR"] = folder
    comm = rank.init(timeout_s=100)
    comm.all_reduce(ones())
    comm.broadcast(ones(5), root=1)
    if rank.number == 1:
        return None
    try:
        comm.all_reduce(ones(7), op="max", algorithm="ring")
    except PeerLost as error:
        return error.__notes__
    return "no error"


def test_flight_recorder_is_dumped_on_an_error(tmp_path, forks):
    folder = tmp_path / "not yet there"
    ends = forks.run(2, leaves_a_dump, str(folder))
    file = folder / f"unisono-rank0-{ends[0].pid}.json"
    assert ends[0].value == [f"the last calls of this rank are in {file}"]
    other = folder / f"unisono-rank1-{ends[1].pid}.json"
    assert sorted(folder.iterdir()) == [file, other]
    assert json.loads(other.read_text())["reason"] == "it left"
    dump = json.loads(file.read_text())
    assert (dump["rank"], dump["pid"]) == (0, ends[0].pid)
    assert "PeerLost" in dump["reason"]
    entries = dump["entries"]
    assert [e["profiling_name"] for e in entries] == [
        *("all_reduce", "broadcast", "all_reduce")
    ]
    assert [e["collective_seq_id"] for e in entries] == [1, 2, 3]
    assert [e["state"] for e in entries] == ["completed", "completed", "failed"]
    assert entries[2]["op"] == "max"
    assert entries[2]["algorithm"] == "ring"
    assert entries[2]["input_sizes"] == [[7]]
    times = [e["time_created_ns"] for e in entries]
    assert times == sorted(times)


def test_dump_that_cannot_be_written_does_not_hide_the_error(tmp_path, monkeypatch):
    file = tmp_path / "a file"
    file.write_text("")
    monkeypatch.setenv("UNISONO_FLIGHT_DIR", str(file))

    def rank(comm):
        if comm.rank == 0:
            with pytest.raises(PeerLost) as caught:
                comm.barrier()
            return caught.value.__notes__
        return None

    def leaves(comm):
        return rank(comm) if comm.rank == 0 else comm.close()

    (note,) = world(2).run(leaves)[0]
    assert "could not be written" in note
    assert Path(file).read_text() == ""


def changes_its_limit(comm, passed):
    """A call that was made before goes the quick way, and is timed there."""
    x = ones()
    comm.all_reduce(x)
    comm.all_reduce(x)
    comm.timeout_s = 0.3
    passed.wait(20)
    error = attempt(comm.all_reduce, x) if comm.rank == 0 else None
    passed.wait(20)  # long before the limit that it had at first
    return comm.timeout_s, error


def test_timeout_setting_holds_for_later_calls():
    passed = threading.Barrier(2)
    found = world(2, timeout_s=300).run(changes_its_limit, passed)
    limit, error = found[0]
    assert limit == 0.3
    assert error["error"] == "CollectiveTimeout"
    assert "within 0.3 s" in error["message"]


@pytest.mark.parametrize("seconds", [0, -1.0, "soon", float("nan")])
def test_invalid_timeout_setting_changes_nothing(seconds):
    with world(1, timeout_s=7.0) as w:
        comm = w.comms[0]
        with pytest.raises(BadArgument, match="timeout_s"):
            comm.timeout_s = seconds
        assert comm.timeout_s == 7.0


def is_refused_after_a_timeout(comm, passed):
    comm.barrier()
    passed.wait(20)
    if comm.rank == 0:
        attempt(comm.all_reduce, ones(), timeout_s=0.3)
    passed.wait(20)
    return attempt(comm.barrier)


def test_refused_call_reports_the_exceeded_timeout():
    """Of the call that failed, not the communicator's; another rank's is not known."""
    passed = threading.Barrier(2)
    first, second = world(2, timeout_s=50).run(is_refused_after_a_timeout, passed)
    assert "within 0.3 s" in first["message"]
    assert "not completed; rank 0" in second["message"]


# --- a rank that fails while a group is made


def breaks_before_joining(rank):
    """Rank 0 cannot join, breaks the communicator, and stays."""
    comm = rank.init(timeout_s=600)
    comm.barrier()
    if rank.number == 0:

        def refuse(*args, **options):
            raise FileNotFoundError

        comm.core.session.communicator = refuse
        with pytest.raises(FileNotFoundError):
            comm.split(0)
        comm.core.native.abort_unreachable(1, True)
        rank.until("heard", 1, 2)
        return None
    error = attempt(comm.split, 0)
    rank.tell("heard")
    return error["error"]


@pytest.mark.sweep
def test_split_ends_when_its_parent_is_broken(forks):
    ends = forks.run(3, breaks_before_joining)
    assert [end.value for end in ends] == [None, *["CollectiveTimeout"] * 2], ends


def dies_before_joining(rank):
    """Ranks of the group are counted the other way round; rank 1 comes to it late."""
    comm = rank.init(timeout_s=600)
    comm.barrier()
    join = Core.joined
    if rank.number == 2:
        Core.joined = lambda *args, **options: os._exit(0)
    elif rank.number == 1:

        def join_late(*args, **options):
            made = join(*args, **options)
            rank.until("heard", 0)
            return made

        Core.joined = join_late
    error = attempt(comm.split, 0, -rank.number)
    rank.tell("heard")
    return error["error"], error["attributes"]["ranks"]


def test_split_errors_use_parent_ranks(forks):
    ends = forks.run(3, dies_before_joining)
    assert [end.value for end in ends[:2]] == [["PeerLost", [2]]] * 2, ends
