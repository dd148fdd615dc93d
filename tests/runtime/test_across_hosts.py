"""Ranks on several hosts, emulated ones: what works on one host works there, and what
goes wrong is an error with names on every rank.

Between the hosts there are streams over loopback, with handshakes, seals and checksums;
within them there is shared memory.
"""

import os
import signal
import time
from functools import partial

import numpy as np
import pytest
from test_failures import blocked, calls_by_name, check_mismatch, ones, until_broken

from forked import attempt, await_that, interrupt_after, interrupt_in_call
from unisono import _native
from unisono.runtime.observe.failures import FailureCode
from unisono.testing import world, world_across

pytestmark = [pytest.mark.timeout(240), pytest.mark.one_in(3)]

SHAPES = [(1, 1), (4, 1), (1, 2, 1), (2, 3, 1)]
SMALL_SHAPES = [(1, 1), (2, 1), (1, 1, 1)]


# --- what works


def collectives(comm, count):
    """Every collective once; the names of those whose results are wrong."""
    n, me = comm.world_size, comm.rank
    ranks = np.arange(n, dtype=np.float32)
    base = np.arange(count, dtype=np.float32) % 16
    mine = base + me
    every = np.concatenate([base + r for r in ranks])
    total = n * base + ranks.sum()
    root = n - 1
    found = {
        "all_reduce": (comm.all_reduce(mine.copy()), total),
        "max": (comm.all_reduce(mine.copy(), op="max"), base + n - 1),
        "mean": (comm.all_reduce(np.full(3, n * me, "float64"), op="mean"), None),
        "all_gather": (comm.all_gather(mine), every),
        "broadcast": (comm.broadcast(mine.copy(), root=root), base + root),
        "reduce": (comm.reduce(mine.copy(), root=root), total),
        "gather": (comm.gather(mine, root=root), every),
        "scatter": (
            comm.scatter(every if me == root else None, root=root, out=mine.copy()),
            mine,
        ),
        "reduce_scatter": (comm.reduce_scatter(every), n * (base + me)),
        "all_to_all": (
            comm.all_to_all(np.concatenate([base + 9 * me + q for q in ranks])),
            np.concatenate([base + 9 * q + me for q in ranks]),
        ),
    }
    comm.barrier()
    found["mean"] = found["mean"][0], np.full(3, ranks.sum())
    if me != root:
        del found["reduce"], found["gather"]
    return [what for what, (got, wanted) in found.items() if (got != wanted).any()]


def messages(comm):
    """Around the ring with two tags, received in reverse order; and from any rank."""
    n, me = comm.world_size, comm.rank
    right, left = (me + 1) % n, (me - 1) % n
    sizes = 5, 200_000
    sent = [
        comm.send(np.full(size, me + size, "float32"), right, tag=size, async_op=True)
        for size in sizes
    ]
    wrong = []
    for size in reversed(sizes):
        got = comm.recv(np.empty(size, "float32"), left, tag=size)
        wrong += [f"recv {size}"] * bool((got != left + size).any())
    for work in sent:
        work.wait()
    if me:
        comm.send(np.array([me]), 0, tag=7)
    else:
        got = sorted(int(comm.recv(np.empty(1, int), tag=7)[0]) for _ in range(1, n))
        wrong += ["recv from anybody"] * (got != list(range(1, n)))
    return wrong


def objects(comm):
    n, me = comm.world_size, comm.rank
    result = comm.broadcast_object({"from": me, "text": "x" * 5000}, root=n - 1)
    every = comm.all_gather_objects([me] * me)
    right = result["from"] == n - 1 and every == [[r] * r for r in range(n)]
    return [] if right else ["objects"]


def groups(comm):
    """Within each host, one rank of each host, and in two halves that share hosts."""
    wrong = []
    place = list(comm.hosts[: comm.rank]).count(comm.hosts[comm.rank])
    kinds = {"within": comm.hosts[comm.rank], "across": place, "odd": comm.rank % 2}
    for kind, color in kinds.items():
        part = comm.split(color)
        members = part.all_gather(np.array([comm.rank])).tolist()
        got = part.all_reduce(np.full(1000, comm.rank, "float32"))
        wrong += [kind] * bool((got != sum(members)).any() or comm.rank not in members)
        part.close()
    return wrong


def in_flight(comm):
    n = comm.world_size
    shared = comm.empty(30_000, "float32")
    shared[:] = comm.rank
    arrays = [np.full(size, comm.rank, "float32") for size in (1, 50_000, 7)]
    works = [comm.all_reduce(x, async_op=True) for x in (*arrays, shared)]
    plain = comm.all_reduce(ones(3, "float64"))
    right = all((w.wait(timeout_s=100) == n * (n - 1) / 2).all() for w in works)
    return [] if right and (plain == n).all() else ["in flight"]


def everything(rank, counts):
    with rank.init(timeout_s=100) as comm:
        wrong = [f"{w} of {c}" for c in counts for w in collectives(comm, c)]
        wrong += [*messages(comm), *objects(comm), *groups(comm), *in_flight(comm)]
        return len(set(comm.hosts)), wrong


@pytest.mark.quick(hosts=[(1, 2, 1)])
@pytest.mark.parametrize("hosts", SHAPES, ids=str)
def test_everything_works_across_hosts(hosts, forks):
    ends = forks.run(sum(hosts), everything, [1, 1000, 150_000], hosts=hosts)
    assert [end.value for end in ends] == [[len(hosts), []]] * sum(hosts), ends


@pytest.mark.sweep
def test_thirteen_ranks_on_three_hosts_work(forks):
    ends = forks.run(13, everything, [1, 5000], hosts=(5, 4, 4))
    assert [end.value for end in ends] == [[3, []]] * 13, ends


def in_new_processes(comm):
    return [*collectives(comm, 5000), *messages(comm), *groups(comm)]


@pytest.mark.sweep
def test_processes_connect_by_the_environment_alone():
    assert world_across([2, 1]).run(in_new_processes) == [[]] * 3


# --- mismatched calls


PAIRS = [
    ("sum", "max"),
    ("sum", "float64"),
    ("eleven", "sum"),
    ("sum", "barrier"),
    ("from 0", "from 1"),
    ("rows", "many"),
    ("exchange", "parts"),
    ("in flight", "split"),
    ("barrier", "objects"),
]


def differ(rank, pairs):
    """One that is slow may hear of it in `init`, before it has called anything."""

    def once(call):
        with rank.init(timeout_s=100) as comm:
            calls_by_name(call)(comm)
            comm.barrier()  # two roots may have sent and continued; they fail here

    return [
        attempt(once, odd if rank.number == number % rank.n else usual)
        for number, (usual, odd) in enumerate(pairs)
    ]


@pytest.mark.quick(hosts=[(2, 1)])
@pytest.mark.parametrize("hosts", [*SMALL_SHAPES, (2, 2), (1, 1, 1, 1)], ids=str)
def test_different_calls_raise_mismatch_on_all_ranks(hosts, forks):
    n = sum(hosts)
    ends = forks.run(n, differ, PAIRS, hosts=hosts)
    by_pair = zip(*[end.value for end in ends], strict=True)
    for number, told_by_all in enumerate(by_pair):
        check_mismatch(told_by_all, number % n)


def is_one_ahead(rank):
    with rank.init(timeout_s=100) as comm:
        # who is slow hears of the others' next call while it is still in the first
        calls = [5, 7 if rank.number == 1 else 6]
        parts = [attempt(comm.all_reduce, ones(count)) for count in calls]
        return parts[0] or parts[1] or attempt(comm.barrier)


@pytest.mark.quick(hosts=[(2, 1)])
@pytest.mark.parametrize("hosts", SMALL_SHAPES, ids=str)
def test_rank_one_call_ahead_raises_mismatch(hosts, forks):
    ends = forks.run(sum(hosts), is_one_ahead, hosts=hosts)
    for end in ends:
        error = end.value
        assert error["error"] == "CollectiveMismatch", end
        assert error["attributes"]["seq"] == ends[0].value["attributes"]["seq"]
        assert "× 6" in error["message"]
        assert "× 7" in error["message"]


# --- who is late, leaves, or dies


def is_late(rank, count, late):
    """The last rank to arrive warns early; the others report whom they wait for."""
    with rank.init(timeout_s=100) as comm:
        for _ in range(2):
            comm.all_reduce(ones())
        rank.tell("passed")
        last, wait_policy = int(late == 0), 20.0
        if rank.number == late:
            until_broken(comm)
        elif rank.number == last:
            rank.until("waits", *({*range(rank.n)} - {late, last}))
            rank.until("passed", late)
            wait_policy = 1.0
        else:
            comm.core.native.set_wait_policy(
                *comm.core.session.wait_policy, int(0.2e9), int(20e9)
            )
            work = comm.all_reduce(ones(count), async_op=True)
            await_that(lambda: os.fstat(2).st_size, "a warning")
            rank.tell("waits")
            return attempt(work.wait)
        return attempt(comm.all_reduce, ones(count), timeout_s=wait_policy)


@pytest.mark.quick(hosts=[(2, 1)])
@pytest.mark.parametrize("hosts", [(1, 1), (2, 1), (2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("count", [10, 300_000])
def test_late_rank_is_named(hosts, count, forks):
    n = sum(hosts)
    late = (n - 1) * (count == 10)
    for end in forks.run(n, is_late, count, late, hosts=hosts):
        error = end.value
        assert error["error"] == "CollectiveTimeout", end
        assert error["attributes"]["ranks"] == [late], end
        assert error["attributes"]["collective"] == "all_reduce"


def closes(rank, call, who):
    comm = rank.init(timeout_s=100)
    comm.barrier()
    if rank.number == who:
        comm.close()
        rank.until("told", *({*range(rank.n)} - {who}))  # it lives on
        return None
    began = time.monotonic()
    error = attempt(calls_by_name(call), comm)
    rank.tell("told")
    return error, time.monotonic() - began


@pytest.mark.quick(hosts=[(2, 1)])
@pytest.mark.parametrize("hosts", SMALL_SHAPES, ids=str)
@pytest.mark.parametrize("call", ["sum", "rows", "from 1"])
def test_rank_that_closes_is_named(hosts, call, forks):
    n = sum(hosts)
    who = n - 1 if call != "from 1" else 1
    ends = forks.run(n, closes, call, who, hosts=hosts)
    for end in ends:
        if end.rank == who or (call == "from 1" and end.value[0] is None):
            continue
        error, took = end.value
        assert error["error"] == "PeerLost", end
        assert error["attributes"]["ranks"] == [who]
        assert error["attributes"]["pids"] == [ends[who].pid]
        assert took < 60


def leaves_a_group(rank, who):
    """It leaves before any rank has sent it anything there."""
    with rank.init(timeout_s=100) as comm:
        part = comm.split(0)
        if rank.number == who:
            part.close()
        error = attempt(part.all_gather, ones(1000)) if rank.number != who else None
        comm.barrier()
        return error


@pytest.mark.quick(who=[1])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_rank_that_leaves_a_group_breaks_only_that_group(who, forks):
    for end in forks.run(3, leaves_a_group, who, hosts=(2, 1)):
        assert end.status == 0, end
        if end.rank != who:
            assert end.value["error"] == "PeerLost"
            assert end.value["attributes"]["ranks"] == [who]


def last_words(rank):
    """What a rank has sent before it closes is still received."""
    comm = rank.init(timeout_s=100)
    x = np.full(200_000, rank.number, np.float32)
    if rank.number == 1:
        comm.send(x, 0)
        comm.broadcast(x, root=1)
        comm.close()
        return True
    time.sleep(1.5)
    right = rank.number != 0 or (comm.recv(np.empty_like(x), 1) == 1).all()
    return bool(right and (comm.broadcast(x, root=1) == 1).all())


@pytest.mark.quick(hosts=[(2, 1)])
@pytest.mark.parametrize("hosts", SMALL_SHAPES, ids=str)
def test_messages_sent_before_a_rank_closed_arrive(hosts, forks):
    ends = forks.run(sum(hosts), last_words, hosts=hosts)
    assert [end.value for end in ends] == [True] * sum(hosts), ends


def has_done_its_part(rank, slow):
    """Others close, and end, while one is still in the call."""
    comm = rank.init(timeout_s=100)
    comm.barrier()
    x = np.full(50_000, 1.0, np.float32)
    if rank.number == slow:
        _native.arm_failpoints("arrive.seen:1:sleep=300,action.done:1:sleep=300")
    right = bool((comm.all_reduce(x) == rank.n).all())
    comm.close()
    return right


@pytest.mark.quick(slow=[1])
@pytest.mark.parametrize("slow", range(3))
def test_rank_that_is_done_may_leave(slow, forks):
    ends = forks.run(3, has_done_its_part, slow, hosts=(1, 2))
    assert [end.value for end in ends] == [True] * 3, ends


def is_killed(rank, who):
    """Before there is any stream to it."""
    comm = rank.init(timeout_s=100)
    part = comm.split(0)
    comm.barrier()  # all have it
    rank.tell("all have it")  # a rank that is still in the barrier would raise there
    if rank.number == who:
        rank.until("all have it", *range(rank.n))
        os.kill(os.getpid(), signal.SIGKILL)
    await_that(lambda: comm.core.native.states()[who][5], "the news of its death")
    began = time.monotonic()
    error = attempt(part.all_to_all, ones(12 * rank.n))
    return error, time.monotonic() - began


@pytest.mark.parametrize("who", [0, 2])
def test_rank_that_died_before_it_was_needed_is_named(who, forks):
    ends = forks.run(3, is_killed, who, hosts=(1, 1, 1))
    for end in ends:
        if end.rank != who:
            error, took = end.value
            assert error["error"] == "PeerLost", end
            assert error["attributes"]["ranks"] == [who]
            assert error["attributes"]["collective"] == "all_to_all"
            assert error["attributes"]["pids"] == [ends[who].pid]
            assert took < 60


def announce_wait(made, parts, rank, awaited):
    """Have rank 0 learn that a rank of another host waits for a third."""
    made.comms[rank].core.native.announce_connecting(awaited, True)
    parts[rank].core.native.close()  # rank 0 learns of this afterwards
    await_that(lambda: parts[0].core.native.states()[rank][4])


@pytest.mark.parametrize("stopped", [1, 2])
def test_rank_that_was_stopped_in_a_wait_is_named(stopped):
    """It has what it waited for, and cannot announce that: the other waits for it."""
    other = 3 - stopped
    with world(3, hosts=(0, 1, 2)) as made:
        parts = made.run(lambda comm: comm.split(0))
        announce_wait(made, parts, stopped, other)
        announce_wait(made, parts, other, stopped)
        error = attempt(made.comms[0].barrier, timeout_s=0.3)
    assert error["error"] == "CollectiveTimeout", error
    assert error["attributes"]["ranks"] == [stopped], error


def strike(rank):
    comm = rank.init()
    comm.barrier()
    if rank.number == 2:
        interrupt_after(0.05, signal.SIGKILL)
    while True:
        comm.all_reduce(ones(5000))


def test_processes_name_the_killed_rank(forks):
    ends = forks.run(3, strike, hosts=[1, 2])
    assert ends[2].status == -signal.SIGKILL
    for end in ends[:2]:
        assert end.error == "PeerLost", end
        assert end.ranks == [2]
        assert end.pids == [ends[2].pid]


# --- signals and forks


def is_interrupted(rank, name):
    comm = rank.init(timeout_s=100)
    comm.barrier()
    rank.tell("passed")
    if rank.number == 0:
        rank.until("passed", 1)
        call = partial(blocked(name), comm)
        if name == "send":  # more than the sockets hold
            call = partial(comm.send, ones(20_000_000), 1)

        def interrupted():
            interrupt_in_call(comm)
            call()

        began = time.monotonic()
        error = attempt(interrupted)
        return error, time.monotonic() - began
    await_that(
        lambda: (
            comm.core.native.failure()[0] != FailureCode.NONE
            or any(comm.core.native.states()[0][4:6])
        ),
        "that it gives up, leaves or dies",
    )
    return attempt(
        comm.barrier if name in BREAKS else lambda: comm.recv(ones(), 0, tag=9)
    )


BREAKS = ("all_reduce", "many", "queued")


@pytest.mark.parametrize("name", [*BREAKS, "send", "recv", "work"])
def test_ctrl_c_ends_a_call(name, forks):
    ends = forks.run(2, is_interrupted, name, hosts=(1, 1))
    error, took = ends[0].value
    assert error["error"] == "KeyboardInterrupt", error
    assert took < 60
    result = ends[1].value
    assert result is not None, ends[1]
    if result["error"] == "CollectiveMismatch":  # what was sent before is another call
        assert set(result["attributes"]["calls"]) == {"0", "1"}
    elif name == "send" and result["error"] == "TransportError":  # it was cut half sent
        assert "rank 0" in result["message"], result
    else:
        assert result["error"] == "PeerLost", ends[1]
        assert result["attributes"]["ranks"] == [0]


def forks_a_child(rank):
    comm = rank.init(timeout_s=100)
    comm.all_reduce(ones())
    hear, tell = os.pipe()
    if os.fork() == 0:
        error = attempt(comm.all_reduce, ones())
        os.write(tell, error["error"].encode())
        os._exit(0)
    found = os.read(hear, 100).decode()
    os.wait()
    return found, comm.all_reduce(ones())[0].item()


def test_forked_child_is_no_rank_and_affects_none(forks):
    for end in forks.run(3, forks_a_child, hosts=(2, 1)):
        assert end.value == ["UsageError", 3.0], end
