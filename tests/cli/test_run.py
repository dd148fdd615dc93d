"""`unisono run` as people use it: real commands, signals and terminals."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from process_state import has_ended, state_of, wait_for
from unisono.cli import main

pytestmark = [pytest.mark.timeout(120), pytest.mark.one_in(3)]

UNISONO = [sys.executable, "-m", "unisono", "run"]
HEAD = """
import os, signal, subprocess, sys, time
rank, n = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_WORLD_SIZE"])
"""


@pytest.fixture
def script(tmp_path):
    def write(code, name="script.py"):
        file = tmp_path / name
        file.write_text(HEAD + code)
        return str(file)

    return write


@pytest.fixture
def run(capfdbinary):
    """The command inside this process: its code, and what it and the ranks said."""

    def call(*arguments):
        code = main(["run", *arguments])
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return call


@contextlib.contextmanager
def started(*arguments, **options):
    """The command as a process of its own, when the ranks have said that they run."""
    with subprocess.Popen(
        [*UNISONO, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def wait_for_end(*pids):
    """Until they are gone; a zombie is."""
    wait_for(lambda: all(map(has_ended, pids)))


def is_watched(launcher, pid):
    """Whether a launcher still has the kernel tell it of a rank's end."""
    for file in Path(f"/proc/{launcher}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if f"Pid:\t{pid}\n" in file.read_text():
                return True
    return False


# What is run


def test_run_starts_three_ranks(run, script):
    code, out, err = run("-n", "3", script("print('hello from', rank, 'of', n)"))
    assert sorted(out.splitlines()) == [f"[{r}] hello from {r} of 3" for r in range(3)]
    assert (code, err) == (0, "")


def test_arguments_after_the_script_belong_to_the_script(run, script):
    file = script("print(sys.argv[1:], n)")
    own = ["--json", "-n", "7", "--help", "-h", "", "--", "-m", "--only=0", "a b", "-"]
    for ours in (["-n", "2"], ["-n2"], ["--ranks=2"], ["--ranks", "2", "--"]):
        code, out, _ = run(*ours, file, *own)
        assert code == 0
        assert sorted(out.splitlines()) == [f"[{r}] {own} 2" for r in range(2)]


def test_module_is_run_as_python_m_does(run, script, monkeypatch):
    file = Path(script("print(sys.argv[1:], __name__, __package__)", "tool.py"))
    (file.parent / "pack").mkdir()
    file.rename(file.parent / "pack" / "tool.py")
    monkeypatch.chdir(file.parent)
    own = ["-n", "9", "--json", ""]
    for module in (["-m", "pack.tool"], ["-mpack.tool"]):
        code, out, _ = run("-n", "1", *module, *own)
        assert (code, out) == (0, f"[0] {own} __main__ pack\n")
    code, _, err = run("-n", "1", "-m", "no_such_module")
    assert code == 1
    assert err.endswith("No module named no_such_module\n")


def test_programs_and_folders_can_be_run_too(run, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").write_text("#!/bin/sh\necho $UNISONO_RANK $0 $1\n")
    (tmp_path / "tool").chmod(0o755)
    code, out, _ = run("-n", "1", "tool", "--json")
    assert (code, out) == (0, f"[0] 0 {tmp_path}/tool --json\n")
    code, out, _ = run("-n", "1", "python3", "-c", "print(1)")
    assert (code, out) == (0, "[0] 1\n")
    (tmp_path / "folder").mkdir()
    script("print('in a folder')", "folder/__main__.py")
    code, out, _ = run("-n", "1", "folder")
    assert (code, out) == (0, "[0] in a folder\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("-n 2 nowhere.py", "nowhere.py: no such file"),
        ("-n 2 no/where", "no/where: no such file"),
        ("-n 2 notes.txt", "notes.txt: neither a Python file nor executable"),
        ("-n 2 folder", "folder: a folder without"),
        ("-n 2", "nothing to run"),
        ("-n 2 -m", "-m"),
        ("-n 0 ok.py", "at least one rank"),
        ("-n 1000000 ok.py", "this host can start at most"),
        ("-n 1.5 ok.py", "expected one number"),
        ("-n 2 --only 2 ok.py", "ranks are 0..1"),
        ("-n 2 --only x ok.py", "expected ranks"),
        ("-n 2 --only 0, ok.py", "expected ranks"),
        ("-n 2 --grace -1 ok.py", "--grace -1: expected seconds"),
        ("-n 2 --grace nan ok.py", "expected seconds"),
        ("-n 2 --timeout-s soon ok.py", "--timeout-s soon: expected seconds"),
        ("-n 2 --timeout-s 0 ok.py", "--timeout-s 0: expected seconds"),
        ("-n 2 --log-dir ok.py/logs ok.py", "cannot be created"),
        ("-n 2 --frobnicate ok.py", "--frobnicate"),
        ("-n 2 broken", "rank 0 of 2 cannot be started"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run, tmp_path, monkeypatch, command, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.py").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").write_text("no program")
    (tmp_path / "broken").chmod(0o755)
    code, out, err = run(*command.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_help_after_the_script_belongs_to_the_script(run):
    code, out, _ = run("--help")
    assert (code, "Usage: unisono run" in out) == (0, True)


# What is shown


def test_only_and_logs_select_what_is_printed_and_kept(run, script, tmp_path):
    file = script("print('out', rank); print('err', rank, file=sys.stderr)")
    logs = str(tmp_path / "logs")
    code, out, err = run("-n", "3", "--only", "0,2", "--log-dir", logs, file)
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] out 0", "[2] out 2"]
    assert sorted(err.splitlines()) == ["[0] err 0", "[2] err 2"]
    output = (tmp_path / "logs" / "rank1.log").read_text().splitlines()
    assert sorted(output) == ["err 1", "out 1"]


def test_first_failure_is_printed_last_with_its_exit_code(run, script):
    code, _, err = run(
        *("-n", "3", "--only", "0", "--grace", "0.2"),
        script("""
if rank == 1:
    raise ValueError("the cause")
time.sleep(60)
"""),
    )
    assert code == 1
    lines = err.splitlines()
    assert lines[0].startswith("unisono: rank 1 (pid ")
    assert lines[0].endswith(": exit code 1")
    assert lines[1] == "after it: ranks 0, 2 ended by the launcher (SIGTERM)"
    assert lines[2] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: the cause"
    assert run("-n", "2", script("rank and sys.exit(42)"))[0] == 42
    assert run("-n", "2", script("rank and os.kill(os.getpid(), 9)"))[0] == 137


def test_json_has_the_outcome_of_every_rank(run, script):
    file = script("print('hello'); rank == 1 and sys.exit(3)")
    code, out, err = run("-n", "2", "--json", file)
    result = json.loads(out)
    assert code == result["exit_code"] == 3
    assert err.count("] hello") == 2
    assert [end["exit_code"] for end in result["ranks"]] == [0, 3]
    assert [end["rank"] for end in result["ranks"]] == [0, 1]
    assert all(0 < end["seconds"] <= result["seconds"] for end in result["ranks"])
    assert result["first_failure"]["rank"] == 1
    assert result["first_failure"]["pid"] == result["ranks"][1]["pid"]
    assert result["interrupted"] is None


def test_timeout_is_passed_to_the_ranks(run, script):
    file = script("print(os.environ.get('UNISONO_TIMEOUT_S'))")
    assert run("-n", "1", "--timeout-s", "7.5", file)[1] == "[0] 7.5\n"
    assert run("-n", "1", file)[1] == "[0] None\n"


def test_closed_standard_output_ends_the_run(script):
    file = script("""
print(os.getpid())
while True:
    print("more")
    time.sleep(0.01)
""")
    with started("-n", "1", file) as running:
        pid = int(running.stdout.readline().split()[1])
        running.stdout.close()
        assert running.wait(timeout=40) == 0
        wait_for_end(pid)


# Familiar spellings


@pytest.mark.parametrize(
    "options",
    [
        "-np 2",
        "--np 2",
        "--nproc-per-node 2",
        "--nproc_per_node=2",
        "--num_processes 2 --num_machines 1",
        "--standalone --nnodes=1 --nproc-per-node=2 --node-rank 0",
        "--allow-run-as-root -np 2 --bind-to none",
    ],
)
def test_spellings_of_other_launchers_are_accepted(run, script, options):
    file = script("print(n, sys.argv[1:])")
    code, out, err = run(*options.split(), file, "-np", "9", "--nproc_per_node")
    assert (code, err) == (0, "")
    assert out.count("] 2 ['-np', '9', '--nproc_per_node']\n") == 2


def test_options_of_other_launchers_that_do_not_apply_are_explained(run, script):
    file = script("")
    for option, message in {
        "--rdzv_backend": "--rdzv-backend: not an option of unisono run; ranks find",
        "--tee": "--log-dir",
        "--map-by": "--hosts a:2,b:2",
    }.items():
        code, _, err = run(option, "x", file)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


def test_nodes_without_ssh_have_consecutive_ranks_and_one_rendezvous(run, script):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR"]
    names += ["MASTER_PORT", "UNISONO_JOB"]
    file = script(f"print(*(os.environ[name] for name in {names}))")
    nodes = [
        "--nnodes",
        "3",
        "--node-rank",
        "1",
        "--master-addr",
        "a",
        "--master-port",
        "77",
        "-n",
        "2",
    ]
    code, out, _ = run(*nodes, file)
    assert code == 0
    assert sorted(out.splitlines()) == [
        "[2] 2 6 0 1 a 77 run-a:77",
        "[3] 3 6 1 1 a 77 run-a:77",
    ]
    for wrong, message in {
        "--nnodes 2": "give --master-addr",
        "--nnodes 2 --node-rank 2 --master-addr a": "numbered from 0",
        "--nnodes 2 --master-addr a --hosts b": "--nnodes and --hosts",
        "--nnodes 2 --master-addr a --max-restarts 1": "--max-restarts and --nnodes",
        "-n 2 -np 2": "-n and -np",
        "-n gpu": "expected a number of ranks",
    }.items():
        code, _, err = run(*wrong.split(), file)
        assert code == 2
        assert message in err


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_torch_distributed_works_with_the_variables_of_torchrun(run, script, backend):
    pytest.importorskip("torch")
    file = script("""
import torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
x = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(x)
print(x.tolist())
dist.barrier()
dist.destroy_process_group()
""")
    code, out, err = run("-n", "2", file, backend)
    assert code == 0, err
    assert out.count("] [3.0, 3.0, 3.0]\n") == 2


def test_ranks_are_bound_to_their_cores(run, script):
    file = script("print(sorted(os.sched_getaffinity(0)))")
    cores = sorted(os.sched_getaffinity(0))
    code, out, _ = run("-n", "1", "--bind-to", "core", file)
    assert (code, out) == (0, f"[0] {cores}\n")
    if len(cores) > 1:
        code, out, _ = run("-n", str(len(cores)), "--bind-to", "core", file)
        assert sorted(line.split(" ", 1)[1] for line in out.splitlines()) == sorted(
            f"[{core}]" for core in cores
        )
    code, _, err = run("-n", "1", "--bind-to", "socket", file)
    assert code == 2
    assert "unknown binding 'socket'" in err


def test_failed_job_is_restarted_at_most_so_often(run, script, tmp_path):
    file = script("""
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", again, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
sys.exit(rank == 0 and again < 2 and 7)
""")
    logs = str(tmp_path / "logs")
    code, out, err = run("-n", "2", "--max-restarts", "3", "--log-dir", logs, file)
    assert code == 0
    # The other rank may be ended before it says so.
    made = [out.count(f"[0] attempt {again} of 3\n") for again in range(4)]
    assert made == [1, 1, 1, 0]
    assert "unisono: restart 1 of at most 3\n" in err
    assert err.count(": exit code 7\n") == 2
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert log == "".join(f"attempt {again} of 3\n" for again in range(3))
    code, out, err = run("-n", "1", "--max-restarts", "1", "--json", file)
    assert (code, json.loads(out)["restarts"]) == (7, 1)
    assert run("-n", "1", "--max-restarts", "-1", file)[0] == 2


# Signals


def test_sigterm_is_passed_on_and_its_code_kept(script):
    polite = script("""
signal.signal(signal.SIGTERM, lambda *_: (print("leaving"), sys.exit(rank and 5)))
print("ready")
time.sleep(60)
""")
    with started("-n", "2", polite) as running:
        assert {running.stdout.readline() for _ in range(2)} == {
            "[0] ready\n",
            "[1] ready\n",
        }
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=40)
    assert sorted(out.splitlines()) == ["[0] leaving", "[1] leaving"]
    assert (running.returncode, err) == (5, "unisono: ended by SIGTERM\n")


def test_sigterm_that_ranks_ignore_ends_with_143(script):
    with started("-n", "2", script("print('ready'); time.sleep(60)")) as running:
        for _ in range(2):
            running.stdout.readline()
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=40) == 143


def test_ctrl_c_is_passed_on_once_and_ends_with_130(script):
    file = script("""
try:
    print("ready")
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
""")
    with started("-n", "2", file) as running:
        for _ in range(2):
            running.stdout.readline()
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=40)
    assert sorted(out.splitlines()) == ["[0] interrupted", "[1] interrupted"]
    assert (running.returncode, err) == (130, "unisono: ended by SIGINT\n")


def test_second_ctrl_c_kills_the_ranks(script):
    file = script("""
def stubborn(*_):
    print("no")
signal.signal(signal.SIGINT, stubborn)
signal.signal(signal.SIGTERM, stubborn)
print(os.getpid())
while True:
    time.sleep(1)
""")
    with started("-n", "2", "--grace", "50", file) as running:
        pids = [int(running.stdout.readline().split()[1]) for _ in range(2)]
        running.send_signal(signal.SIGINT)
        assert {running.stdout.readline()[4:] for _ in range(2)} == {"no\n"}
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=40)
    assert running.returncode == 130
    wait_for_end(*pids)


def test_failure_before_ctrl_c_keeps_its_code(script):
    file = script("""
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
print(os.getpid())
if rank == 1:
    sys.exit(3)
time.sleep(60)
""")
    with started("-n", "2", "--grace", "50", file) as running:
        output = [running.stdout.readline().split() for _ in range(2)]
        (failed,) = [int(pid) for rank, pid in output if rank == "[1]"]
        wait_for(lambda: not is_watched(running.pid, failed))
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=40)
    assert running.returncode == 3
    assert "rank 1 (pid " in err


def test_kill_9_of_the_launcher_leaves_no_process(script):
    file = script("""
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
print(os.getpid(), child.pid)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
""")
    with started("-n", "3", file) as running:
        pids = [
            int(word)
            for _ in range(3)
            for word in running.stdout.readline().split()[1:]
        ]
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        pids += [int(word) for word in children.read_text().split()]  # the reaper, too
        assert len(set(pids)) == 7
        running.kill()
    wait_for_end(*pids)


# Terminals


TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def on_a_terminal(*arguments, **environment):
    """The command in the foreground of a terminal of its own."""
    terminal, its_side = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", TAKE_TERMINAL, *UNISONO, *arguments],
        stdin=its_side,
        stdout=its_side,
        stderr=its_side,
        start_new_session=True,
        env=os.environ | environment,
    ) as running:
        os.close(its_side)
        try:
            yield running, terminal
        finally:
            running.kill()
    os.close(terminal)


def read_until(terminal, wanted, within=40.0):
    result = b""
    until = time.monotonic() + within
    while wanted not in result:
        waiting = select.poll()  # for descriptors of any number
        waiting.register(terminal, select.POLLIN)
        left_ms = max(0.0, until - time.monotonic()) * 1000
        assert waiting.poll(left_ms), result
        result += os.read(terminal, 4096)
    return result


def test_run_in_a_terminal_has_colours_input_and_ctrl_c(script, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = script("""
if rank == 0:
    print("ready")
    print("typed", input())
    time.sleep(60)
""")
    with on_a_terminal("-n", "2", file) as (running, terminal):
        assert b"\x1b[36m[0]\x1b[0m ready" in read_until(terminal, b"ready")
        os.write(terminal, b"something\n")
        read_until(terminal, b"typed something")
        os.write(terminal, b"\x03")
        read_until(terminal, b"ended by SIGINT")
        assert running.wait(timeout=40) == 130


def test_no_color_is_obeyed_and_ctrl_z_pauses_the_ranks(script):
    file = script("print(os.getpid())\nprint('ready')\ntime.sleep(60)")
    with on_a_terminal("-n", "1", file, NO_COLOR="1") as (running, terminal):
        result = read_until(terminal, b"ready")
        assert b"\x1b" not in result
        rank = int(result.split()[1])
        os.write(terminal, b"\x1a")
        assert os.WIFSTOPPED(os.waitpid(running.pid, os.WUNTRACED)[1])
        wait_for(lambda: state_of(rank) == "T")
        running.send_signal(signal.SIGCONT)
        wait_for(lambda: state_of(rank) != "T")
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=40) == 143
