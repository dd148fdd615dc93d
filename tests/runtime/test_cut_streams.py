"""Streams that are cut anywhere: what crosses hosts comes whole however it is cut.

Wherever bytes move (frames of collectives, the rings of messages, records of TLS,
lifelines) native code asks `allowed` (native/support/failpoint.hpp) how many may move
at once. Here that is 1, or one less, as many, and one more than a head or a header has,
or a number from a seed; and at every other try it is none, as if the socket were not
ready, so that the reader has to continue in the middle.

These tests find a planted fault: if the receiver of messages does not wait for the
whole header, `test_cut_streams_change_no_message` hangs until its timeout, with cuts of
1 byte, of a header and one more, and of random sizes.
"""

import contextlib
import time

import numpy as np
import pytest
from test_across_hosts import collectives, groups, in_flight, messages, objects

from forked import until_broken
from unisono import _native
from unisono.errors import CollectiveMismatch, CollectiveTimeout
from unisono.testing import world

pytestmark = [pytest.mark.timeout(120), pytest.mark.one_in(3)]

HEAD, HEADER, EVENT = 24, 64, 96
"""Bytes of a message's head, of a frame's header, of an event with its header."""

FEW = ["short=1", f"short={HEAD - 1}", f"short={HEADER + 1}", "cut=1"]
MANY = [f"short={n + d}" for n in (HEAD, HEADER, 2 * HEADER, EVENT) for d in (-1, 0, 1)]
MANY += [f"short={n}" for n in (2, 3, 5, 7, 11, 13, 200, 1000)]
MANY += [f"cut={seed}" for seed in range(2, 32)]
PLACES = [(0, 1), (0, 0, 1), (0, 1, 2)]

needs_tls = pytest.mark.skipif(bool(_native.tls_missing()), reason="no OpenSSL 3")
ENCRYPTED = [None, pytest.param("mutual", marks=needs_tls)]


def spec(how):
    return ",".join(f"{name}:*:{how}" for name in _native.byte_limit_names())


@contextlib.contextmanager
def cut(how):
    """All that this process sends and receives."""
    _native.arm_failpoints(spec(how))
    try:
        yield
    finally:
        _native.arm_failpoints("")


@contextlib.contextmanager
def cut_world(how, hosts, tls=None):
    with cut(how), world(len(hosts), hosts=hosts, tls=tls, timeout_s=60.0) as made:
        yield made


def run(how, hosts, tls, function, *args):
    with cut_world(how, hosts, tls) as made:
        assert made.run(function, *args) == [[]] * len(hosts)


def small_messages(comm):
    """Both ways at once, of sizes about that of a head, the tags in another order."""
    n, me = comm.world_size, comm.rank
    right, left = (me + 1) % n, (me - 1) % n
    sizes = [0, 1, 22, 23, 24, 25, 90, 300]
    sent = [
        comm.send(np.full(k, (me + k) % 251, np.uint8), right, tag=k, async_op=True)
        for k in sizes
    ]
    wrong = []
    for k in reversed(sizes):
        got = comm.recv(np.empty(k, np.uint8), left, tag=k)
        wrong += [f"recv {k}"] * bool((got != (left + k) % 251).any())
    for work in sent:
        work.wait()
    if me:
        comm.send(np.array([me]), 0, tag=-7)
        return wrong
    got = sorted(int(comm.recv(np.empty(1, int), tag=-7)[0]) for _ in range(1, n))
    return wrong + ["recv from anybody"] * (got != list(range(1, n)))


def small_objects(comm):
    result = comm.broadcast_object({"from": comm.rank}, root=comm.world_size - 1)
    every = comm.all_gather_objects([comm.rank] * comm.rank)
    right = every == [[r] * r for r in range(comm.world_size)]
    return [] if right and result == {"from": comm.world_size - 1} else ["objects"]


def control(comm):
    """What the lifelines carry: a failure with both calls, whichever rank finds it.

    One whose barrier is still on its way to it may hear of it there.
    """
    try:
        comm.barrier()
        if comm.rank == comm.world_size - 1:
            comm.all_gather(np.ones(3, np.int32))
        else:
            comm.all_reduce(np.ones(5))
    except CollectiveMismatch as error:
        return [] if "another collective" not in str(error) else [str(error)]
    return ["no error"]


def everything_small(comm):
    return collectives(comm, 7) + small_messages(comm) + small_objects(comm)


@pytest.mark.parametrize("tls", ENCRYPTED)
@pytest.mark.parametrize("how", FEW)
def test_cut_streams_change_no_collective(how, tls):
    run(how, (0, 0, 1), tls, collectives, 7)


@pytest.mark.parametrize("tls", ENCRYPTED)
@pytest.mark.parametrize("how", FEW)
def test_cut_streams_change_no_message(how, tls):
    run(how, (0, 1), tls, small_messages)


@pytest.mark.parametrize("how", FEW)
def test_cut_streams_change_no_object(how):
    run(how, (0, 1), None, small_objects)


@pytest.mark.parametrize("tls", ENCRYPTED)
@pytest.mark.parametrize("how", FEW)
def test_cut_streams_change_no_control_message(how, tls):
    run(how, (0, 0, 1), tls, control)


@pytest.mark.parametrize("tls", ENCRYPTED)
def test_cut_streams_change_no_large_call(tls):
    """Frames and messages of many kilobytes, cut into some hundred bytes."""
    run("cut=5", (0, 1), tls, collectives, 9000)
    run("cut=6", (0, 1), tls, messages)


def test_cut_streams_change_no_call_in_flight():
    run("cut=7", (0, 0, 1), None, in_flight)
    run("cut=8", (0, 0, 1), None, groups)


@pytest.mark.sweep
@pytest.mark.parametrize("tls", ENCRYPTED)
@pytest.mark.parametrize("hosts", PLACES, ids=str)
@pytest.mark.parametrize("how", [*FEW, *MANY])
def test_every_kind_of_cut_changes_nothing(how, hosts, tls):
    run(how, hosts, tls, everything_small)
    run(how, hosts, tls, control)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(9, 21))
def test_random_cuts_change_no_large_call(seed):
    for function in (messages, objects, groups, in_flight):
        run(f"cut={seed}", (0, 1, 1), None, function)


# --- a world that is put to sleep here and there


def slowed(seed):
    """Short random sleeps everywhere."""
    points = [f"{name}:*:jitter=2000" for name in _native.failpoint_names()]
    return ",".join([*points, f"stream.receive:*:cut={seed}"])


def one_gives_up(comm, who):
    """One times out while another is late; no rank waits for its own timeout."""
    begun = time.monotonic()
    try:
        comm.barrier()
        if comm.rank == who:
            comm.broadcast(np.ones(4), root=0, timeout_s=0.2)
        if comm.rank == 0:
            until_broken(comm)
        comm.broadcast(np.ones(4), root=0)
    except CollectiveTimeout as error:
        late = time.monotonic() - begun > 30.0
        return ["waited on"] * late + ["another"] * (error.ranks != (0,))
    return ["no error"]


def test_failure_reaches_a_host_without_a_stream_to_its_reporter():
    """Rank 2 waits for rank 0, which finds the communicator broken by rank 1 and so
    never opens a stream: threads on emulated hosts once had no other way to hear it.
    """
    with world(3, hosts=(0, 0, 1), timeout_s=60.0) as made:
        assert made.run(one_gives_up, 1) == [[]] * 3


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3))
def test_random_sleeps_change_nothing(seed):
    sleepy_world(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3, 60))
def test_more_random_sleeps_change_nothing(seed):
    sleepy_world(seed)


def sleepy_world(seed):
    _native.arm_failpoints(slowed(1 + seed))
    try:
        with world(3, hosts=(0, 0, 1), timeout_s=60.0) as made:
            assert made.run(everything_small) == [[]] * 3
            assert made.run(in_flight) == [[]] * 3
            assert made.run(one_gives_up, 1 + seed % 2) == [[]] * 3
    finally:
        _native.arm_failpoints("")
