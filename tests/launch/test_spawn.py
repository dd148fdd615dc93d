"""`unisono.spawn`: results by rank, failures by name, and nothing left behind.

Most tests concern processes and not collectives; they are forked with a communicator
that can do nothing, which is quick. The last ones run the real thing.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import unisono
from open_files import open_files
from process_state import is_gone
from unisono.errors import BadArgument, PeerLost, UnisonoError, UnsupportedWorld
from unisono.launch import spawn as module
from unisono.launch.spawn import spawn

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # newer Pythons
    pytest.mark.one_in(3),
]


class Silent:
    """A communicator that knows its place, and nothing else."""

    def __init__(self, rank, world_size, job, timeout_s):
        self.rank, self.world_size = rank, world_size
        self.job, self.timeout_s = job, timeout_s

    def close(self):
        pass


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(unisono, "init", Silent, raising=False)

    def call(fn, n, args=(), grace_s=30.0, **options):
        monkeypatch.setattr(module, "_GRACE_S", grace_s)
        return spawn(fn, n, args, method="fork", **options)

    return call


def write(file, text):
    """Whoever sees the file finds all of it."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def test_results_are_ordered_by_rank(forked):
    result = forked(lambda comm, *args: (comm.rank, comm.world_size, args), 3, (7, "x"))
    assert result == [(r, 3, (7, "x")) for r in range(3)]


def test_all_ranks_share_one_new_job(forked):
    jobs = [
        forked(lambda comm: (comm.job, comm.timeout_s), 2, timeout_s=9)
        for _ in range(2)
    ]
    assert [t for job in jobs for _, t in job] == [9] * 4
    assert len({name for job in jobs for name, _ in job}) == 2


def test_results_may_be_large(forked):
    result = forked(lambda comm: np.full(2_000_000, comm.rank), 2)
    assert [array.sum() for array in result] == [0, 2_000_000]


def test_exception_of_a_rank_is_raised_with_its_traceback(forked):
    def fail(comm):
        if comm.rank == 1:
            raise KeyError("missing", 3)

    with pytest.raises(KeyError) as caught:
        forked(fail, 3)
    assert caught.value.args == ("missing", 3)
    (note,) = caught.value.__notes__
    assert note.startswith("On rank 1 (pid ")
    assert 'raise KeyError("missing", 3)' in note


def test_exceptions_with_custom_constructors_are_carried(forked):
    def fail(comm):
        raise UnsupportedWorld("not for so many", n=comm.world_size)

    with pytest.raises(UnsupportedWorld, match="not for so many") as caught:
        forked(fail, 2)
    assert caught.value.n == 2


def test_unpicklable_function_or_result_is_an_error(forked):
    class Local(Exception):
        pass

    def fail(comm):
        raise Local("of this function")

    with pytest.raises(UnisonoError, match=r"rank 0 \(pid \d+\) raised Local: of this"):
        forked(fail, 1)
    with pytest.raises(BadArgument, match="the result of rank 0, a function, cannot"):
        forked(lambda comm: lambda: None, 1)


def test_rank_that_reports_peer_lost_is_not_first_failure(forked):
    def fail(comm):
        if comm.rank == 1:
            time.sleep(0.2)
            raise ValueError("the cause")
        raise PeerLost("rank 1 is gone", ranks=[1])

    with pytest.raises(ValueError, match="the cause"):
        forked(fail, 3)
    with pytest.raises(PeerLost, match="nobody") as caught:
        forked(lambda comm: fail_with(PeerLost("nobody", ranks=[5], seq=3)), 2)
    assert (caught.value.ranks, caught.value.seq) == ((5,), 3)


def fail_with(error):
    raise error


def test_killed_rank_is_named_with_its_signal(forked):
    def fail(comm):
        if comm.rank == 2:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        raise PeerLost("rank 2 is gone", ranks=[2])

    with pytest.raises(PeerLost, match=r"rank 2 \(pid \d+\) was ended by SIGKILL") as e:
        forked(fail, 3)
    assert e.value.ranks == (2,)
    assert str(e.value.pids[0]) in str(e.value)


def test_rank_that_exits_does_not_exit_the_parent(forked):
    with pytest.raises(PeerLost, match="ended by SystemExit: 3, without result"):
        forked(lambda comm: sys.exit(3), 2)
    with pytest.raises(PeerLost, match="exited with 4 before it returned"):
        forked(lambda comm: os._exit(4), 2)


@pytest.mark.sweep
def test_others_and_their_children_are_ended_after_the_grace_period(forked, tmp_path):
    def hang(comm):
        child = subprocess.Popen(["sleep", "60"])
        if comm.rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write(tmp_path / f"{comm.rank}", f"{os.getpid()} {child.pid}")
        if comm.rank == 1:
            while not (tmp_path / "0").exists():
                time.sleep(0.01)
            raise ValueError("one")
        time.sleep(60)

    with pytest.raises(ValueError, match="one"):
        forked(hang, 2, grace_s=0.5)
    pids = [int(p) for r in range(2) for p in (tmp_path / f"{r}").read_text().split()]
    assert len(pids) == 4
    assert all(is_gone(pid) for pid in pids)


def test_interrupt_ends_the_ranks(forked, tmp_path):
    def hang(comm):
        write(tmp_path / f"{comm.rank}", str(os.getpid()))
        time.sleep(60)

    def interrupt():
        while not all((tmp_path / f"{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        forked(hang, 2)
    thread.join()
    assert all(is_gone(int(file.read_text())) for file in tmp_path.iterdir())


AFTER_FORK = []  # what this process does after a fork
os.register_at_fork(after_in_parent=lambda: [call() for call in AFTER_FORK])


def test_interrupt_while_ranks_are_forked_is_not_lost(forked, tmp_path):
    def hang(comm):
        write(tmp_path / "pid", str(os.getpid()))
        time.sleep(60)

    def interrupt():
        AFTER_FORK.clear()
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    AFTER_FORK.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forked(hang, 1)
    assert is_gone(int((tmp_path / "pid").read_text()))
    assert signal.getsignal(signal.SIGINT) is before


def test_ranks_handle_signals_as_their_parent_did(forked):
    def handlers(comm):
        return [signal.getsignal(s) is h for s, h in before.items()]

    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    assert forked(handlers, 2) == [[True, True]] * 2


def test_no_file_is_left_open(forked):
    forked(lambda comm: None, 1)
    before = open_files()
    forked(lambda comm: None, 3)
    with pytest.raises(ValueError, match="x"):
        forked(lambda comm: fail_with(ValueError("x")), 3)
    assert not open_files() - before


def test_bad_arguments_are_refused():
    for n, message in ((0, "at least one rank"), (1.5, "whole number")):
        with pytest.raises(BadArgument, match=message):
            spawn(print, n)
    with pytest.raises(BadArgument, match="nearest: fork"):
        spawn(print, 1, method="forks")
    with pytest.raises(BadArgument, match="top of a module"):
        spawn(lambda comm: None, 1)


# The real thing


def add_up(comm, base):
    x = np.full(5, base + comm.rank, dtype=np.float64)
    comm.all_reduce(x)
    return comm.rank, comm.world_size, x.tolist()


@pytest.mark.quick(method=["fork", "forkserver"])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_spawned_ranks_all_reduce(method):
    result = spawn(add_up, 3, (10,), method=method)
    assert result == [(r, 3, [33.0] * 5) for r in range(3)]


def test_spawn_of_one_rank_works():
    assert spawn(add_up, 1, (2,)) == [(0, 1, [2.0] * 5)]


def die_in_between(comm):
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(np.ones(1000))


def raise_in_between(comm):
    comm.barrier()
    if comm.rank == 2:
        raise LookupError("in rank 2")
    comm.all_reduce(np.ones(1000))


def test_first_failure_is_raised_not_its_consequences():
    with pytest.raises(PeerLost, match=r"rank 1 \(pid \d+\) was ended by SIGKILL"):
        spawn(die_in_between, 3, method="fork")
    with pytest.raises(LookupError, match="in rank 2"):
        spawn(raise_in_between, 3, method="fork")


PARENT = """
import os, time
from unisono.launch.spawn import spawn

def hang(comm):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    spawn(hang, 2, method={method!r})
"""


@pytest.mark.quick(method=["forkserver"])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_kill_9_of_the_parent_leaves_no_rank(tmp_path, method):
    file = tmp_path / "parent.py"
    file.write_text(PARENT.format(method=method))
    with subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            pids = [int(parent.stdout.readline()) for _ in range(2)]
        finally:
            parent.kill()
    assert all(is_gone(pid) for pid in pids)


def test_script_without_main_guard_gets_advice(tmp_path):
    file = tmp_path / "unguarded.py"
    file.write_text(
        "from unisono.launch.spawn import spawn\ndef f(comm): pass\nspawn(f, 2)\n"
    )
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "is the call to spawn guarded by if __name__ == '__main__'?" in done.stderr
