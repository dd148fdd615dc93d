"""What a forked child does with the native objects of its parent: nothing."""

import gc
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from forked import await_that
from unisono import _native, testing

LIMIT_S = 30.0


def in_child(function, *args):
    """How a forked child ends that calls this: its exit status, or "hangs"."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function(*args)
            status = 0
        finally:
            os._exit(status)
    handle = os.pidfd_open(pid)
    until = time.monotonic() + LIMIT_S
    while os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hangs"
        time.sleep(0.005)
    os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def adds_up(comm):
    return float(comm.all_reduce(np.full(4, comm.rank + 1, np.float32))[0])


def ends_everything(held):
    """Close and drop what the parent left, in the midst of a world of its own."""
    with testing.world(2) as own:  # its threads have the places of the parent's
        assert own.run(adds_up) == [3.0, 3.0]
        while held:
            held.pop().close()
        gc.collect()
        assert own.run(adds_up) == [3.0, 3.0]


def forks_with(rank, closed):
    """A rank with a thread that watches, one that advances work, and a waiting one."""
    comm = rank.init(timeout_s=40)
    comm.all_reduce(np.ones(4, np.float32), async_op=True).wait()
    group = comm.duplicate()
    buffers = [comm.empty(10) for _ in range(3)]
    waits = threading.Thread(target=group.barrier)
    waits.start()  # in a call, perhaps under a lock, while others fork
    statuses = [in_child(ends_everything, [group, comm] if closed else [])]
    statuses.append(in_child(buffers.clear))
    rank.tell("forked")
    rank.until("forked", *range(rank.n))
    waits.join()
    return statuses, adds_up(comm)


@pytest.mark.parametrize("hosts", [(), (1, 1)], ids=str)
@pytest.mark.parametrize("closed", [True, False])
def test_forked_children_exit_without_effect(closed, hosts, forks):
    for end in forks.run(2, forks_with, closed, hosts=hosts):
        assert end.value == [[0, 0], 3.0], end


def leaves_garbage(rank):
    """Engines with progress threads that are garbage when the process forks."""
    gc.disable()
    for _ in range(6):
        world = testing.world(1)
        x = np.ones(4, np.float32)
        world.run(lambda c, x=x: c.all_reduce(x, async_op=True).wait())
        world.close()
        cycle = [world]
        cycle.append(cycle)
        del world, cycle
    return in_child(ends_everything, [testing.world(1)])


def test_garbage_of_the_parent_is_collected_in_the_child(forks):
    (end,) = forks.run(1, leaves_garbage)
    assert end.value == 0, end


def test_exit_of_a_parent_is_noticed_while_its_child_lives():
    """By the sockets alone, as where process ids are not known."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hear, tell = os.pipe()
    parent = os.fork()
    if parent == 0:
        here.close()
        engine = _native.Engine.between_processes(1, [there.detach(), -1], [0, 0])
        if os.fork() == 0:
            os.close(tell)
            os.read(hear, 1)
            os._exit(0)
        assert engine.forked() is False
        os._exit(0)
    there.close()
    engine = _native.Engine.between_processes(0, [-1, here.detach()], [0, 0])
    os.waitpid(parent, 0)
    await_that(lambda: engine.dead(1), "the end of the parent")
    os.close(tell)  # only now does the child end
    os.close(hear)
    engine.close()
