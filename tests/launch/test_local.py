"""The local launcher, with real processes: output, first failure, no leftovers."""

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from open_files import open_files
from process_state import is_gone
from unisono.errors import BadArgument
from unisono.launch.local import launch
from unisono.launch.outcome import Outcome, RankEnd
from unisono.launch.output import RankOutput, reports_a_lost_peer, stderr_tail
from unisono.launch.screen import OutputOptions

pytestmark = [pytest.mark.timeout(120), pytest.mark.one_in(3)]

HEAD = """
import os, signal, subprocess, sys, time
rank, n = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_WORLD_SIZE"])
class PeerLost(Exception): pass
def file_of(other):
    return os.path.join(os.environ["MEET"], str(other))
def rendezvous():
    with open(file_of(rank) + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file_of(rank) + ".new", file_of(rank))
    while not all(os.path.exists(file_of(other)) for other in range(n)):
        time.sleep(0.005)
def outlive(*ranks):  # of which this one knows
    for other in ranks:
        with open(file_of(other)) as file:
            pid = file.read()
        while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.005)
"""


def start(code, n=2, *, only=None, log_dir=None, **options):
    """Ranks that run `code`: how they ended, and what they said."""
    out, err = io.BytesIO(), io.BytesIO()
    output = RankOutput(out, err, OutputOptions(only=only, log_dir=log_dir))
    command = [sys.executable, "-S", "-c", HEAD + code]
    environment = options.pop("environment", {})
    with tempfile.TemporaryDirectory() as folder:
        environment = {"MEET": folder, **environment}
        outcome = launch(command, n, output, environment=environment, **options)
    return outcome, out.getvalue(), err.getvalue()


def statuses(outcome):
    return [end.status for end in outcome.ranks]


# --- environment


def test_every_rank_gets_rank_and_world_size():
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB"]
    code = f"print(*(os.environ['UNISONO_' + name] for name in {names}))"
    outcome, out, err = start(code, 3)
    result = sorted(line.split() for line in out.decode().splitlines())
    job = result[0][-1]
    assert re.fullmatch("[0-9a-f]{32}", job)
    assert result == [[f"[{r}]", str(r), "3", str(r), "3", job] for r in range(3)]
    assert (outcome.exit_code, outcome.report(), err) == (0, "", b"")


TORCHRUN = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
]


def test_ranks_get_the_variables_of_torchrun_and_none_of_another_launcher(monkeypatch):
    monkeypatch.setenv("UNISONO_JOB", "of another")
    for name in (*TORCHRUN, "UNISONO_RANK"):
        monkeypatch.setenv(name, "77")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    code = f"""
assert not {{"TORCHELASTIC_USE_AGENT_STORE"}} & set(os.environ)
print(*(os.environ[name] for name in {TORCHRUN}), os.environ["UNISONO_JOB"])
"""
    _, out, _ = start(code, 2)
    lines = sorted(line.split() for line in out.decode().splitlines())
    port, job = lines[0][7], lines[0][-1]
    assert port.isdigit()
    assert port != "77"
    assert job != "another"
    assert lines == [
        [f"[{r}]", str(r), "2", str(r), "2", "0", "127.0.0.1", port, "0", job]
        for r in range(2)
    ]
    given = {"MASTER_ADDR": "here", "MASTER_PORT": "29500", "RANK": "9"}
    _, out, _ = start(code, 1, environment=given)
    assert out.split()[1:8] == b"0 1 0 1 0 here 29500".split()


def test_ranks_share_the_cores_unless_threads_are_given(monkeypatch):
    code = "print(os.environ.get('OMP_NUM_THREADS'))"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert start(code, 1)[1] == b"[0] None\n"
    assert start(code, 3)[1].count(b"] 2\n") == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert start(code, 2)[1].count(b"] 1\n") == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert start(code, 2)[1].count(b"] 5\n") == 2


def test_python_output_is_unbuffered_by_default(monkeypatch):
    code = "print(os.environ['PYTHONUNBUFFERED'], os.environ.get('MINE'))"
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert start(code, 1, environment={"MINE": "x"})[1] == b"[0] 1 x\n"
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    assert start(code, 1)[1] == b"[0]  None\n"


def test_only_rank_0_has_standard_input(tmp_path):
    (tmp_path / "typed").write_text("one\ntwo\n")
    script = """
import sys
from unisono.launch.local import launch
from unisono.launch.output import RankOutput
code = "import sys; print(sys.stdin.read().split())"
output = RankOutput(sys.stdout.buffer, sys.stderr.buffer)
launch([sys.executable, "-S", "-c", code], 3, output)
"""
    with (tmp_path / "typed").open() as typed:
        output = subprocess.check_output([sys.executable, "-c", script], stdin=typed)
    assert sorted(output.splitlines()) == [
        b"[0] ['one', 'two']",
        b"[1] []",
        b"[2] []",
    ]


# --- output


def test_output_lines_are_never_split():
    code = """
for i in range(200):
    for piece in (f"{i} ", "x" * 50, "y" * 50, "\\n"):
        sys.stdout.write(piece)
        sys.stdout.flush()
"""
    _, out, _ = start(code, 3)
    lines = out.decode().splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {i} {'x' * 50}{'y' * 50}" for i in range(200)]
    assert len(lines) == 600


def test_all_of_100_000_lines_arrive():
    code = """
sys.stdout.writelines(f"{i}\\n" for i in range(100_000))
sys.stderr.writelines(f"{i}\\n" for i in range(1_000))
"""
    _, out, err = start(code, 2, environment={"PYTHONUNBUFFERED": ""})
    for rank in range(2):
        prefix = f"[{rank}] "
        for received, count in ((out, 100_000), (err, 1_000)):
            mine = [x for x in received.decode().splitlines() if x.startswith(prefix)]
            assert mine == [f"{prefix}{i}" for i in range(count)]


def test_last_line_without_newline_is_written():
    _, out, err = start("sys.stdout.write('a\\nb'); sys.stderr.write('c')", 1)
    assert (out, err) == (b"[0] a\n[0] b\n", b"[0] c\n")


def test_binary_output_passes_unchanged():
    code = "os.write(1, bytes(range(256)) * 3); os.write(2, b'\\xff\\xfe'); sys.exit(4)"
    outcome, out, err = start(code, 1)
    assert out.replace(b"[0] ", b"") == bytes(range(256)) * 3 + b"\n"
    assert err == b"[0] \xff\xfe\n"
    assert "exit code 4" in outcome.report()


def test_endless_line_uses_bounded_memory():
    result = io.BytesIO()
    stream, _ = RankOutput(result, io.BytesIO()).streams(0)
    for _ in range(40):
        stream.write(b"x" * (1 << 16))
    assert result.tell() > 1 << 21
    stream.finish()
    lines = result.getvalue().splitlines()
    assert b"".join(line.removeprefix(b"[0] ") for line in lines) == b"x" * (40 << 16)


def test_only_selected_ranks_are_shown_and_all_are_logged(tmp_path):
    code = "print('out', rank); print('err', rank, file=sys.stderr)"
    folder = tmp_path / "new" / "logs"
    _, out, err = start(code, 3, only={0, 2}, log_dir=folder)
    assert sorted(out.splitlines()) == [b"[0] out 0", b"[2] out 2"]
    assert sorted(err.splitlines()) == [b"[0] err 0", b"[2] err 2"]
    assert sorted(file.name for file in folder.iterdir()) == [
        f"rank{r}.log" for r in range(3)
    ]
    for rank in range(3):
        message = (folder / f"rank{rank}.log").read_text().splitlines()
        assert sorted(message) == [f"err {rank}", f"out {rank}"]


def test_logs_that_cannot_be_written_are_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "rank0.log").mkdir()
    with pytest.raises(BadArgument, match="file"):
        start("", 1, log_dir=tmp_path / "file")
    with pytest.raises(BadArgument, match=r"rank0\.log: cannot be written"):
        start("", 1, log_dir=tmp_path)


# Failures


def test_outcome_has_exit_code_and_traceback():
    code = """
if rank == 1:
    try:
        raise KeyError("earlier")
    except KeyError:
        import traceback; traceback.print_exc()
    raise ValueError("a bad day\\nwith two lines")
"""
    outcome, _, err = start(code, 2)
    assert statuses(outcome) == [0, 1]
    assert outcome.exit_code == 1
    first = outcome.first_failure
    assert (first.rank, first.pid) == (1, outcome.ranks[1].pid)
    head, rest = outcome.report().split("\n", 1)
    assert head.startswith(f"rank 1 (pid {first.pid}) failed first, after ")
    assert head.endswith(": exit code 1")
    assert rest.startswith("Traceback (most recent call last)")
    assert rest.endswith("ValueError: a bad day\nwith two lines")
    assert "earlier" not in rest
    assert b"[1] KeyError: 'earlier'" in err


def test_outcome_without_traceback_has_last_lines():
    code = "sys.stderr.writelines(f'{i}\\n' for i in range(99)); os._exit(3)"
    outcome, _, _ = start(code, 1)
    assert outcome.exit_code == 3
    assert outcome.report().splitlines()[1:] == [str(i) for i in range(89, 99)]


def test_outcome_names_the_signal():
    outcome, _, _ = start("rank == 2 and os.kill(os.getpid(), signal.SIGKILL)", 3)
    assert statuses(outcome) == [0, 0, -9]
    assert (outcome.exit_code, outcome.first_failure.signal) == (137, "SIGKILL")
    assert outcome.report().endswith(": SIGKILL")
    assert outcome.as_dict()["ranks"][2]["exit_code"] is None


def test_rank_that_reports_peer_lost_is_not_first_failure():
    code = """
rendezvous()
if rank == 1:
    outlive(0, 2)
    raise ValueError("the cause")
raise PeerLost("rank 1 is gone")
"""
    outcome, _, _ = start(code, 3, grace_s=30)
    assert statuses(outcome) == [1, 1, 1]
    assert outcome.first_failure.rank == 1
    assert outcome.ranks[0].seconds < outcome.ranks[1].seconds
    assert outcome.report().splitlines()[1] == (
        "after it: ranks 0, 2 exit code 1, for the loss of a peer"
    )
    assert outcome.report().endswith("ValueError: the cause")


def test_rank_that_left_without_an_error_is_named_before_its_reporters():
    code = """
rendezvous()
if rank == 1:
    sys.exit(0)
outlive(1)
raise PeerLost("rank 1 has left")
"""
    outcome, _, _ = start(code, 3)
    assert outcome.exit_code == 1
    assert outcome.first_to_leave.rank == 1
    first, second, *_ = outcome.report().splitlines()
    assert re.fullmatch(
        r"rank 1 \(pid \d+\) left first, after .* s: exit code 0, while others .*",
        first,
    )
    assert " failed then, after " in second
    assert outcome.as_dict()["first_to_leave"]["rank"] == 1
    alone, _, _ = start("rank and sys.exit(3)", 2)  # an error of its own is the cause
    assert (alone.exit_code, alone.first_to_leave) == (3, None)


def test_killed_rank_is_first_failure_before_its_reporters():
    code = """
rendezvous()
if rank == 2:
    outlive(0, 1)
    os.kill(os.getpid(), signal.SIGSEGV)
raise PeerLost("rank 2 is gone")
"""
    outcome, _, _ = start(code, 3, grace_s=30)
    assert (outcome.first_failure.rank, outcome.exit_code) == (2, 128 + 11)


def test_earliest_of_equal_failures_is_first():
    code = "rendezvous(); outlive(*range(rank + 1, n)); sys.exit(5 + rank)"
    outcome, _, _ = start(code, 3, grace_s=30)
    assert (outcome.first_failure.rank, outcome.exit_code) == (2, 7)
    code = "rendezvous(); outlive(*range(rank)); raise PeerLost('x')"
    outcome, _, _ = start(code, 2, grace_s=30)
    assert outcome.first_failure.rank == 0


def test_other_ranks_have_a_grace_period():
    code = """
if rank == 0:
    sys.exit(3)
time.sleep(0.3)
print("reported")
raise PeerLost("rank 0")
"""
    outcome, out, _ = start(code, 2, grace_s=30)
    assert statuses(outcome) == [3, 1]
    assert out == b"[1] reported\n"
    assert outcome.seconds < 29


def test_other_ranks_are_ended_after_the_grace_period():
    code = """
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
rendezvous()
if rank == 0:
    sys.exit(3)
time.sleep(60)
"""
    outcome, _, _ = start(code, 3, grace_s=0.1)
    assert statuses(outcome) == [3, -signal.SIGKILL, -signal.SIGTERM]
    assert [end.ended_by_launcher for end in outcome.ranks] == [False, True, True]
    assert outcome.exit_code == 3
    assert outcome.first_failure.rank == 0
    assert "rank 1 ended by the launcher (SIGKILL)" in outcome.report()


def test_rank_ended_by_launcher_is_not_first_failure():
    code = "rank == 0 and sys.exit('x'); time.sleep(60)"
    lost = "if rank == 0: raise PeerLost('no fault of mine')\ntime.sleep(60)"
    for case in (code, lost):
        outcome, _, _ = start(case, 2, grace_s=0.1)
        assert outcome.first_failure.rank == 0


def test_outcome_report_groups_ranks():
    stderr = "Traceback (most recent call last):\n  x\nunisono.errors.PeerLost: 5"
    ends = [RankEnd(r, 100 + r, 1, 2.0, stderr_tail=stderr) for r in range(9)]
    ends[5] = RankEnd(5, 105, -signal.SIGKILL, 1.0)
    ends[8] = RankEnd(8, 108, -signal.SIGTERM, 8.0, ended_by_launcher=True)
    outcome = Outcome(ends, 9.0)
    assert outcome.report() == (
        "rank 5 (pid 105) failed first, after 1.0 s: SIGKILL\nafter it: "
        "ranks 0..4, 6, 7 exit code 1, for the loss of a peer; "
        "rank 8 ended by the launcher (SIGTERM)"
    )
    killed = RankEnd(1, 7, -signal.SIGKILL, 1.0, why="out of memory: the limit")
    assert Outcome([killed], 2.0).report() == (
        "rank 1 (pid 7) failed first, after 1.0 s: SIGKILL, out of memory: the limit"
    )
    assert Outcome([], 1.0, (0.5, signal.SIGTERM)).exit_code == 143
    assert Outcome([], 1.0, (0.5, signal.SIGINT)).exit_code == 130


# What is left


def test_children_of_ranks_are_ended():
    code = """
for ignores in (False, True):
    trap = "trap '' TERM; echo ready; " if ignores else "echo ready; "
    child = subprocess.Popen(["sh", "-c", trap + "sleep 60 & wait; sleep 60"],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    child.stdout.readline()
    print(child.pid)
os._exit(0)
"""
    outcome, out, _ = start(code, 2)
    pids = [int(line.split()[1]) for line in out.splitlines()]
    assert len(pids) == 4
    assert all(is_gone(pid) for pid in pids)
    assert outcome.exit_code == 0
    assert outcome.seconds < 50


@pytest.mark.sweep
def test_child_that_holds_a_pipe_does_not_delay_the_job():
    code = """
hear, tell = os.pipe()
command = f"echo late; echo >&{tell}; exec sleep 60"
subprocess.Popen(["sh", "-c", command], pass_fds=[tell])
os.read(hear, 1)
os._exit(0)
"""
    outcome, out, _ = start(code, 1)
    assert out == b"[0] late\n"
    assert outcome.seconds < 50


def test_no_file_is_left_open(tmp_path):
    start("", 2)
    before = open_files()
    start("", 3, log_dir=tmp_path)
    start("sys.exit(1)", 3)
    for command in (["/no/such/program"], [str(tmp_path)]):
        with pytest.raises(BadArgument, match=f"rank 0 of 2 .*{command[0]}"):
            launch(command, 2, RankOutput(io.BytesIO(), io.BytesIO()))
    assert not open_files() - before


def test_error_in_the_loop_ends_the_ranks():
    class Full(io.BytesIO):
        def write(self, data):
            raise BrokenPipeError

    command = [sys.executable, "-c", "import time; print(1); time.sleep(60)"]
    handler = signal.getsignal(signal.SIGINT)
    began = time.monotonic()
    with pytest.raises(BrokenPipeError):
        launch(command, 2, RankOutput(Full(), io.BytesIO()))
    assert time.monotonic() - began < 20
    assert signal.getsignal(signal.SIGINT) is handler


def test_launch_works_in_a_thread_and_without_pidfd(monkeypatch):
    def lacking(pid):
        raise OSError

    monkeypatch.setattr(os, "pidfd_open", lacking)
    parts = []
    thread = threading.Thread(
        target=lambda: parts.append(start("print(rank); sys.exit(rank)", 2))
    )
    thread.start()
    thread.join()
    outcome, out, _ = parts[0]
    assert statuses(outcome) == [0, 1]
    assert sorted(out.splitlines()) == [b"[0] 0", b"[1] 1"]


LAUNCHER = """
import sys
from unisono.launch.local import launch
from unisono.launch.output import RankOutput
child = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
print(flush=True)
output = RankOutput(sys.stdout.buffer, sys.stderr.buffer)
launch([sys.executable, "-S", "-c", child], 4, output)
"""


def bearing(mark):
    """The processes whose environment contains `mark`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(int(pid))
        except OSError:
            continue
    return found


@pytest.mark.quick(moments=[[0.0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("moments", [[0.0, 1, 2, 3, 4, 5], [6, 8, 11, 15, 20, 30, 300]])
def test_kill_9_of_the_launcher_leaves_no_process(moments):
    for moment in moments:
        mark = f"mark-{os.getpid()}-{moment}".encode()
        with subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            env={**os.environ, "MARK": mark.decode()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as launcher:
            launcher.stdout.readline()
            time.sleep(moment / 1000)
            launcher.kill()
        until = time.monotonic() + 30
        while left := bearing(mark):
            assert time.monotonic() < until, left
            time.sleep(0.02)
        time.sleep(0.05)  # no process may appear after all have ended
        assert not bearing(mark)


# Last words


def test_stderr_tail_is_the_last_traceback():
    head = b"Traceback (most recent call last):"
    lines = [b"a", head, b"  one", b"E1", b"", head, b"  two", b"E2: x", b"bye"]
    assert stderr_tail(lines).splitlines() == [head.decode(), "  two", "E2: x", "bye"]
    deep = [head, *[b"  frame"] * 300, b"E3"]
    output = stderr_tail(deep).splitlines()
    assert (output[0], output[-1]) == (head.decode(), "E3")
    assert "left out" in output[1]
    assert len(output) == 81
    assert stderr_tail([]) == ""


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("unisono.errors.PeerLost: rank 3 is gone", True),
        ("PeerLost", True),
        ("\x1b[1;35munisono.errors.PeerLost\x1b[0m: rank 3", True),
        ("ValueError: PeerLost", False),
        ("my.PeerLostTwice: x", False),
        ("  unisono.errors.PeerLost: in a frame", False),
    ],
)
def test_peer_lost_is_recognised_in_the_traceback(last, expected):
    words = f'Traceback (most recent call last):\n  File "x"\n    line\n{last}\nmore'
    assert reports_a_lost_peer(words) is expected
    assert not reports_a_lost_peer(last)
