"""How processes of one host connect: with many descriptors, few, and in namespaces."""

import contextlib
import ctypes
import errno
import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from unisono.errors import ConnectFailed
from unisono.runtime.observe import monitor
from unisono.transports import limits
from unisono.transports import rendezvous_local as rendezvous
from unisono.transports.rendezvous_local import Hello, LocalRendezvous

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from forked import attempt

SOURCES = Path(rendezvous.__file__).parents[1]
NEW_PIDS = 0x20000000


@pytest.fixture(scope="module")
def forks(forks):
    return forks.having(UNISONO_MONITOR="1")


# --- descriptors


def opens_many_files(rank, number):
    with contextlib.ExitStack() as held:
        if rank.number == number:
            limits.raise_descriptor_limit()
            for _ in range(1100):
                held.enter_context(open(os.devnull))
        comm = rank.init(timeout_s=30)
        result = comm.all_reduce(np.ones(4, np.float32)).tolist()
        comm.barrier()
        if rank.number == number:
            result += asked_of_the_monitor()
        comm.barrier()
        return result


def asked_of_the_monitor():
    prefix = f"@{monitor.PREFIX}{os.getuid()}-{os.getpid()}-"
    lines = Path("/proc/net/unix").read_text().splitlines()
    (name,) = [line.split()[-1] for line in lines if prefix in line]
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(20)
        line.connect("\0" + name[1:])
        line.sendall(b"state")
        return [b'"rank"' in line.recv(1 << 16)]


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_connect_with_more_than_1024_files_open(number, forks):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("the system allows fewer descriptors")
    ends = forks.run(2, opens_many_files, number)
    assert ends[number].value == [2.0] * 4 + [True], ends[number]
    assert ends[1 - number].value == [2.0] * 4, ends[1 - number]


def test_nothing_uses_select():
    """It cannot wait for descriptors above 1023."""
    for file in SOURCES.rglob("*.py"):
        assert "select.select(" not in file.read_text(encoding="utf-8"), file


def raises_the_limit(rank):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    rank.init(timeout_s=30).barrier()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], min(hard, limits.MOST)


def test_soft_limit_of_descriptors_becomes_the_hard_one(forks):
    for end in forks.run(2, raises_the_limit):
        found, expected = end.value
        assert found == expected


def has_too_few(rank):
    if rank.number == 1:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, used + 2))
    return attempt(rank.init, rendezvous_timeout_s=20, timeout_s=20)


def test_error_for_too_few_descriptors_has_numbers(forks):
    ends = forks.run(4, has_too_few)
    assert ends[1].value["error"] == "ConnectFailed", ends[1]
    message = ends[1].value["message"]
    assert "needs about 22 beside its own" in message, message
    assert "are in use" in message
    assert "are allowed" in message


# --- sockets that cannot be handed over at once


def hosting(timeout_s):
    hello = Hello("1", 0, 3, "host", "identity")
    return LocalRendezvous(hello, "job", time.monotonic() + timeout_s, timeout_s)


def handed_over(monkeypatch, errors, timeout_s=20.0):
    """What comes of it when the system refuses to send a descriptor, at first."""
    calls = iter(errors)
    send = socket.send_fds

    def refuse(*args):
        number = next(calls, 0)
        if number:
            raise OSError(number, os.strerror(number))
        return send(*args)

    monkeypatch.setattr(socket, "send_fds", refuse)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one, other = socket.socketpair()
    guest = SimpleNamespace(connection=ours, hello=SimpleNamespace(rank=2, pid=7))
    with ours, theirs, other:
        hosting(timeout_s)._pass_socket(guest, 1, one)
        data, fds, _, _ = socket.recv_fds(theirs, 16, 1)
    for fd in fds:
        os.close(fd)
    return int.from_bytes(data, "little"), len(fds)


def test_passing_sockets_waits_while_too_many_are_in_transit(monkeypatch):
    errors = [errno.ETOOMANYREFS, errno.ENOBUFS, errno.ETOOMANYREFS]
    assert handed_over(monkeypatch, errors) == (1, 1)


def test_too_many_sockets_in_transit_is_not_reported_as_death(monkeypatch):
    with pytest.raises(ConnectFailed, match=r"in transit.*ulimit -n") as caught:
        handed_over(monkeypatch, iter(lambda: errno.ETOOMANYREFS, 0), 0.05)
    assert "died" not in str(caught.value)
    assert caught.value.missing == ()


def test_rank_that_closes_during_the_rendezvous_has_died(monkeypatch):
    with pytest.raises(ConnectFailed, match=r"rank 2 \(pid 7\) died") as caught:
        handed_over(monkeypatch, [errno.EPIPE])
    assert caught.value.missing == (2,)


# --- pid namespaces


def in_a_pid_namespace(function, *args):
    """Its value, by a child that is the first process of a new pid namespace."""
    hear, tell = os.pipe()
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_PIDS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if os.fork() == 0:
        text = "nothing"
        try:
            text = json.dumps(function(*args))
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(tell, text.encode())
            os._exit(0)
    os.close(tell)
    with os.fdopen(hear) as file:
        return file.read()


def adds_up(rank, dies):
    """Large enough that ranks would read each other's own memory."""
    comm = rank.init(timeout_s=40)
    for _ in range(3):
        x = comm.all_reduce(np.ones(1 << 16, np.float32))
        assert (x == rank.n).all()
    if rank.number == dies:
        os._exit(9)  # the first process of a namespace cannot kill itself
    if dies >= 0:
        return attempt(comm.barrier)["attributes"][
            "ranks"
        ], comm.core.native.cross_memory_access()
    comm.barrier()
    return (
        [peer.pid for peer in comm.peers],
        os.getpid(),
        comm.core.native.cross_memory_access(),
    )


def in_namespaces(rank, apart, dies):
    if rank.number not in apart:
        return json.dumps(adds_up(rank, dies))
    return in_a_pid_namespace(adds_up, rank, dies)


@pytest.fixture(scope="module")
def namespaces(forks):
    (end,) = forks.run(1, may_make_namespaces)
    if not end.value:
        pytest.skip("the system makes no pid namespace")


def may_make_namespaces(rank):
    return ctypes.CDLL(None).unshare(NEW_PIDS) == 0


@pytest.mark.parametrize("apart", [[1], [0, 1], [1, 2]], ids=str)
def test_ranks_connect_across_pid_namespaces(apart, forks, namespaces):
    ends = forks.run(3, in_namespaces, apart, -1)
    for end in ends:
        pids, own, reach = json.loads(end.value)
        assert pids[end.rank] == own
        assert reach in (0, 2), "what cannot be reached is not tried"
        assert all(pids[r] == 1 for r in apart)


@pytest.mark.parametrize("dies", [0, 1])
def test_death_in_another_pid_namespace_is_detected(dies, forks, namespaces):
    ends = forks.run(2, in_namespaces, [1], dies)
    assert json.loads(ends[1 - dies].value)[0] == [dies], ends
