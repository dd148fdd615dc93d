"""The shared memory of a host's ranks: announcements, cost, release."""

import gc
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from forked import attempt, await_that
from process_state import state_of
from unisono import _native

NOBODY = 65534


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def segments():
    """How many mappings of shared memory this process has."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:unisono" in line for line in maps)


def status_kib(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise AssertionError(name)


def stop(rank):
    """Stop this process until another rank continues it (`go_on`)."""
    rank.tell("stops")
    os.kill(os.getpid(), signal.SIGSTOP)


def await_stopped(rank, number):
    (pid,) = rank.until("stops", number)
    await_that(lambda: state_of(pid) == "T", "stop")
    return pid


# --- a rank that is stopped


def makes_and_drops_beside_a_stopped_rank(rank):
    comm = rank.init(timeout_s=40)
    comm.barrier()
    if rank.number == 1:
        stop(rank)
        # The communicator's, and two that are left.
        await_that(lambda: segments() == 3, "the segments of rank 0")
        comm.barrier()  # then rank 0 releases them
        return None
    pid = await_stopped(rank, 1)
    before = descriptors()
    # More than a socket holds. What is dropped before it was told is not kept either.
    held = [comm.empty(1, np.uint8) for _ in range(500)]
    kept = held[250]
    held.clear()
    held.append(comm.empty(1, np.uint8))
    more = descriptors() - before
    os.kill(pid, signal.SIGCONT)
    comm.barrier()
    assert kept.size == held[0].size == 1
    return more


def test_creating_and_dropping_memory_does_not_wait_for_a_stopped_rank(forks):
    making, stopped = forks.run(2, makes_and_drops_beside_a_stopped_rank)
    assert making.value <= 2, "descriptors of memory that is gone are kept"
    assert stopped.status == 0, stopped


def becomes_a_plain_user(limit):
    """Descriptors in flight are limited for those without privileges alone."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if os.getuid() == 0:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def announces_with_few_descriptors(rank, limit, count):
    """While rank 1 is stopped more descriptors are announced than may be in flight."""
    becomes_a_plain_user(limit)
    comm = rank.init(timeout_s=40)
    comm.barrier()
    if rank.number == 1:
        stop(rank)
    else:
        pid = await_stopped(rank, 1)
        held = [comm.empty(1, np.uint8) for _ in range(count)]
        rank.tell("made")
        if rank.number == 0:
            rank.until("made", *(r for r in range(2, rank.n)))
            os.kill(pid, signal.SIGCONT)
        assert len(held) == count
    got = np.zeros(2, np.int32)
    sent = comm.send(np.full(2, rank.number, np.int32), (rank.number + 1) % rank.n)
    assert sent is None
    comm.recv(got, (rank.number - 1) % rank.n)
    comm.barrier()
    # All that was made is known to all.
    await_that(lambda: segments() >= 1 + (rank.n - 2) * count, "the segments of others")
    comm.barrier()
    return got.tolist()


def test_no_announcement_is_lost_when_too_many_descriptors_are_in_flight(forks):
    ends = forks.run(6, announces_with_few_descriptors, 56, 16)
    for end in ends:
        assert end.value == [(end.rank - 1) % 6] * 2, end


def takes_in_late(rank):
    """A segment that cannot be taken in is there once there are descriptors again."""
    comm = rank.init(timeout_s=40)
    comm.barrier()
    if rank.number == 0:
        await_that(lambda: os.path.islink(f"{rank.folder}/none"), "a shortage")
        held = comm.empty(10, np.uint8)
        comm.barrier()
        return held.size
    engine = comm.core.session.engine
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    os.symlink(str(os.getpid()), f"{rank.folder}/none")  # takes no descriptor
    await_that(engine.out_of_resources, "a shortage")
    error = attempt(comm.core.session.await_segment, 0, 2, 20.0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await_that(lambda: engine.has(0, 2), "the segment")
    await_that(lambda: not engine.out_of_resources(), "the end of the shortage")
    comm.barrier()
    return error


def test_segment_without_a_free_descriptor_arrives_later(forks):
    made, late = forks.run(2, takes_in_late)
    assert not late.error, late.stderr
    assert made.value == 10, made
    assert late.value["error"] == "OSError", late
    assert "descriptors" in late.value["message"]


# --- what it costs


def maps_what_it_touches(rank, mebibytes):
    comm = rank.init(timeout_s=40)
    comm.barrier()
    before = status_kib("VmPTE")
    held = comm.empty(mebibytes << 18) if rank.number else None
    comm.barrier()
    await_that(lambda: segments() == rank.n, "the segments of others")
    after = status_kib("VmPTE")
    comm.barrier()
    del held
    return after - before


def test_segments_of_others_use_no_page_tables_before_use(forks):
    ends = forks.run(3, maps_what_it_touches, 64)
    # To map 64 MiB takes 128 KiB of page tables.
    assert ends[0].value < 64, ends[0]


def test_communicator_has_windows_for_the_ranks_of_its_host_alone():
    needed = _native.Comm.memory_needed
    half = 256 << 10
    assert needed(256, 4, half) < needed(4, 4, half) + (512 << 10)
    assert needed(256, 256, half) > 128 << 20


def windows_of_two_hosts(rank):
    comm = rank.init(timeout_s=40)
    window = comm.core.session.window
    maps = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split()[0].split("-") for line in maps if "memfd:unisono" in line]
    sizes = [int(end, 16) - int(start, 16) for start, end in places]
    x = comm.all_reduce(np.full(1 << 20, 1 + rank.number, np.float64))
    assert (x == 10).all()
    return sizes, _native.Comm.memory_needed(4, 2, window)


def test_ranks_of_other_hosts_have_no_window(forks):
    for end in forks.run(4, windows_of_two_hosts, hosts=(2, 2)):
        (size,), needed = end.value
        assert needed <= size < needed + 4096, end


# --- communicators that are not closed


def drops_communicators(rank, count):
    """The descriptors that each rank has after ten, and after many more."""
    comm = rank.init(timeout_s=60)
    x = np.ones(3, np.float32)
    counts = []
    for i in range(count):
        made = comm.split(rank.number % 2) if i % 2 else comm.duplicate()
        made.all_reduce(x.copy())
        right = (made.rank + 1) % made.world_size
        if made.world_size > 1 and i % 4 == 0:
            in_flight = made.send(x, right, async_op=True)
            made.recv(x.copy(), (made.rank - 1) % made.world_size)
            in_flight.wait()
            del in_flight
        if i % 4 == 2:  # without waiting for it
            made.all_reduce(x.copy(), async_op=True)
        del made
        if i in (10, count - 1):
            gc.collect()
            comm.barrier()
            await_that(
                lambda: segments() == 1, "the end of all segments but the world's"
            )
            counts.append(descriptors())
            comm.barrier()
    return counts, len(comm.core.session.users)


@pytest.mark.cases(1)
@pytest.mark.parametrize("hosts", [(), (2, 1)], ids=str)
def test_dropped_communicators_release_everything(hosts, forks):
    ends = forks.run(3, drops_communicators, 40, hosts=hosts)
    for end in ends:
        assert not end.error, end.stderr
        (first, last), users = end.value
        assert users == 1, end
        assert last <= first, end
