"""Bytes by UCX: wires, worlds, what is forged, what is left, and how ranks fail."""

import hashlib
import os
import queue
import resource
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from memory_transport import MemoryTransport
from ucx_worlds import TRANSPORTS, needs_ucx, pair, two_workers, use, wires

import unisono
from unisono import _native
from unisono.errors import BadArgument
from unisono.testing import check_transport, check_wire, world_across
from unisono.transports import registry, ucx
from unisono.transports.interface import ConnectOptions
from unisono.transports.streams import pair_of
from unisono.transports.tcp import Tcp

WINDOW = 1 << 20


@needs_ucx
@pytest.mark.parametrize("rendezvous", ["auto", "1k", "inf"])
@pytest.mark.parametrize("by", TRANSPORTS)
def test_wire_passes(by, rendezvous, monkeypatch):
    """By rendezvous from so many bytes on: as UCX likes, almost always, never."""
    use(monkeypatch, by)
    monkeypatch.setenv("UCX_RNDV_THRESH", rendezvous)
    with two_workers() as workers:
        check_wire(lambda: pair(workers))


@needs_ucx
@pytest.mark.parametrize("by", TRANSPORTS)
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.sweep) for n in (3, 5))]
)
def test_transport_passes(ranks, by, monkeypatch):
    use(monkeypatch, by)
    check_transport("ucx", [ranks])


@needs_ucx
@pytest.mark.sweep
@pytest.mark.parametrize("by", TRANSPORTS)
def test_several_threads_and_lanes(by, monkeypatch):
    use(monkeypatch, by)
    monkeypatch.setenv("UNISONO_LANES", "2")
    monkeypatch.setenv("UNISONO_IO_THREADS", "3")
    monkeypatch.setenv("UNISONO_IO_LEAST", "1000")
    check_transport("ucx", [3], checks=["collectives", "in_flight", "killed"])


class BetweenThreads(MemoryTransport):
    """Threads of one process, all of whose wires share two workers."""

    def __init__(self, workers):
        self.workers = workers

    def pair(self):
        return pair_of(*pair(self.workers))


@needs_ucx
@pytest.mark.parametrize(
    ("by", "ranks"),
    [("tcp", 3), pytest.param("posix,cma,self", 5, marks=pytest.mark.sweep)],
)
def test_threads_that_share_workers(by, ranks, monkeypatch):
    use(monkeypatch, by)
    monkeypatch.setenv("UCX_RNDV_THRESH", "8k")
    with two_workers() as workers:
        pair(workers)  # what UCX keeps once it has been used
        checks = ["collectives", "both_directions", "in_flight", "split"]
        check_transport(BetweenThreads(workers), [ranks], checks=checks)


# --- what is forged


@needs_ucx
@pytest.mark.parametrize(
    "count", [2000, pytest.param(1_000_000, marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize("has_key", [False, True])
def test_forged_messages_are_dropped(count, has_key):
    with two_workers() as workers:
        (one, other), keys = wires(workers)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _native.forge_ucx(workers[1], count, 1, keys[3] if has_key else b"")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert workers[1].refused() == count
        assert grown < 64 << 10  # KiB: what UCX itself holds, whatever the count
        with pytest.raises(BlockingIOError):
            other.receive(1)
        assert one.send(b"genuine") == 7
        assert read(other, 7) == b"genuine"
        one.close()
        other.close()


def read(wire, size):
    """So many bytes, or less if the wire ends before."""
    found = b""
    while len(found) < size:
        try:
            more = wire.receive(size - len(found))
        except BlockingIOError:
            continue
        if not more:
            break
        found += more
    return found


# --- what is left


@needs_ucx
def test_wires_that_close_are_forgotten():
    with two_workers() as workers:
        for _ in range(3):
            one, other = pair(workers)
            assert one.send(b"x" * 1000) == 1000
            one.close()
            assert read(other, 1000) == b"x" * 1000
            assert read(other, 1) == b""
            other.close()
        while any(worker.num_links() for worker in workers):
            pass


@needs_ucx
@pytest.mark.sweep
def test_500_workers_leave_nothing():
    def cycle():
        with two_workers() as workers:
            one, other = pair(workers)
            one.send(b"x" * 100_000)
            assert read(other, 100_000) == b"x" * 100_000
            one.close()
            other.close()

    for _ in range(20):
        cycle()
    descriptors, kib = len(os.listdir("/proc/self/fd")), resident()
    for _ in range(500):
        cycle()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert resident() - kib < 32 << 10


def resident():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


@needs_ucx
def test_worker_that_closes_waits_until_its_bytes_have_arrived():
    with two_workers() as workers:
        one, other = pair(workers)
        sent = one.send(os.urandom(WINDOW))
        workers[0].close(20.0)
        assert len(read(other, sent)) == sent
        assert read(other, 1) == b""
        with pytest.raises(OSError, match="pipe"):
            one.send(b"more")


@needs_ucx
def test_bytes_that_were_sent_arrive_though_nobody_asks():
    with two_workers() as workers:
        one, other = pair(workers)
        sent = one.send(b"x" * 200_000)
        while other.has_pending() is False:  # it makes no progress itself
            pass
        assert len(read(other, sent)) == sent


# --- what is refused


def options(**more):
    return ConnectOptions(0, 2, "job", unisono.__version__, **more)


@needs_ucx
def test_tls_is_refused():
    with pytest.raises(BadArgument, match="never uses UCX"):
        registry.get("ucx").connect(options(tls=True))


class Renamed(Tcp):
    """Has TCP's wires under another name."""

    name = "renamed"


def test_ranks_with_different_transports_are_refused():
    job = os.urandom(8).hex()
    place = queue.SimpleQueue()
    errors = {}

    def rank(number, transport):
        address = "127.0.0.1:0" if number == 0 else place.get()
        try:
            transport.connect(
                ConnectOptions(
                    number,
                    2,
                    job,
                    unisono.__version__,
                    20.0,
                    address=address,
                    announce=place.put,
                )
            )
        except BadArgument as error:
            errors[number] = str(error)

    threads = [
        threading.Thread(target=rank, args=each)
        for each in enumerate((Tcp(), Renamed()))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "rank 0 uses the transport 'tcp', rank 1 'renamed'" in errors[0]
    assert "rank 1 uses the transport 'renamed', rank 0 'tcp'" in errors[1]


def run(program, **variables):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


GET = "from unisono.transports import registry; registry.get('ucx')"


def test_missing_library_is_named():
    end = run(GET, UNISONO_UCX="/nowhere/libucp.so.0")
    assert "MissingLibrary: the transport 'ucx' cannot be used here" in end.stderr
    assert "/nowhere/" in end.stderr
    assert "UCX 1.13 or newer" in end.stderr


def test_old_library_is_refused(tmp_path):
    source = tmp_path / "old.c"
    source.write_text(
        "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c)"
        "{ *a = 1; *b = 9; *c = 0; }"
    )
    for name in ("libucs.so.0", "libucp.so.0"):
        command = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / name), str(source)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("there is no C compiler")
    end = run(GET, UNISONO_UCX=str(tmp_path / "libucp.so.0"))
    assert "it is UCX 1.9; 1.13 or a later 1.x is needed" in end.stderr


@needs_ucx
def test_wrong_variables_of_ucx_are_reported():
    program = "from unisono.transports import registry;registry.get('ucx').wires()"
    end = run(program, UCX_TLS="no_such_thing", UNISONO_UCX=_native.ucx_version()[3])
    assert "MissingLibrary: UCX does not start here" in end.stderr


@needs_ucx
def test_handlers_of_signals_stay(tmp_path):
    program = (
        "import signal, sys; from unisono.transports import ucx;"
        "signal.signal(signal.SIGSEGV, signal.SIG_IGN); ucx.load();"
        "print(open('/proc/self/status').read().split('SigCgt:')[1].split()[0])"
    )
    found = run(program, UNISONO_UCX=_native.ucx_version()[3]).stdout
    assert not int(found, 16) & 1 << 10  # the bit of signal 11


@needs_ucx
def test_words_name_the_library():
    assert ucx.describe().startswith("UCX 1.")


# --- forks, and bits


@needs_ucx
def test_child_of_a_fork_leaves_the_parents_wires_alone():
    with two_workers() as workers:
        one, other = pair(workers)
        with warnings.catch_warnings():  # that there are threads
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                one.send(b"from the child")
                os._exit(1)
            except OSError:
                one.close()
                workers[0].close(1.0)
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert one.send(b"from the parent") == 15
        assert read(other, 15) == b"from the parent"


def bits():
    """What calls of several sizes return on this rank."""
    comm = unisono.init(timeout_s=60.0)
    found = []
    for count in (1, 1000, 200_003):
        chance = np.random.default_rng(comm.rank + count)
        x = chance.standard_normal(comm.size * count).astype(np.float32)
        made = (
            comm.all_reduce(x.copy()),
            comm.reduce_scatter(x.copy()),
            comm.all_gather(x[:count].copy()),
            comm.all_to_all(x.copy()),
            comm.broadcast(x.copy(), root=1),
        )
        found += [hashlib.sha256(np.ascontiguousarray(y)).hexdigest() for y in made]
    comm.close()
    return found


@needs_ucx
@pytest.mark.parametrize(
    "hosts", [[1, 1], pytest.param([2, 1, 2], marks=pytest.mark.sweep)]
)
def test_bits_are_those_of_tcp(hosts, monkeypatch):
    found = []
    for fabric in ("tcp", "ucx"):
        monkeypatch.setenv("UNISONO_FABRIC", fabric)
        found.append(world_across(hosts, init=False, timeout_s=90.0).run(bits))
    assert found[0] == found[1]
