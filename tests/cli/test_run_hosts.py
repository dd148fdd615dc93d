"""`unisono run --hosts` as people use it, with a stand-in for ssh."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fake_ssh import stand_in
from process_state import has_ended, state_of, wait_for
from unisono.cli import main
from unisono.runtime.world.address import free_port

pytestmark = [pytest.mark.timeout(120), pytest.mark.one_in(3)]

HEAD = """
import os, signal, sys, time
rank, n = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_WORLD_SIZE"])
host = os.environ.get("UNISONO_HOST_ID", "here")
"""


@pytest.fixture
def script(tmp_path):
    def write(code, name="script.py"):
        file = tmp_path / name
        file.write_text(HEAD + code)
        return str(file)

    return write


@pytest.fixture
def ssh(tmp_path):
    return stand_in(tmp_path)


@pytest.fixture
def run(ssh, capfdbinary):
    """The command inside this process: its code, and what it and the ranks said."""

    def call(*arguments):
        by = [] if "--ssh" in arguments else ["--ssh", ssh[0]]
        code = main(["run", *by, *arguments])
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return call


@pytest.fixture
def started(ssh):
    """The command as a process of its own, ended whatever happens."""
    running = []

    def start(*arguments, ssh=ssh[0], **options):
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono", "run", "--ssh", ssh, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **{"stdin": subprocess.DEVNULL, **options},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def lines(process, count):
    """So many lines of its output, without the ranks in front; sorted."""
    return sorted(process.stdout.readline().split(" ", 1)[1] for _ in range(count))


# Where ranks run and their environment


def test_ranks_are_consecutive_on_each_host_in_host_order(run, script):
    file = script(
        "e = os.environ\n"
        "print(host, n, e['UNISONO_LOCAL_RANK'], e['UNISONO_LOCAL_WORLD_SIZE'])"
    )
    code, out, err = run("--hosts", "b:3,a", "-n", "2", file)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[0] b 5 0 3",
        "[1] b 5 1 3",
        "[2] b 5 2 3",
        "[3] a 5 0 2",
        "[4] a 5 1 2",
    ]


def test_hostfile_without_numbers_starts_one_rank_per_core(run, script, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a slots=1\nb\n")
    code, out, _ = run("--hostfile", str(file), script("print(host)"))
    assert code == 0
    cores = len(os.sched_getaffinity(0))
    assert sorted(out.splitlines()) == sorted(
        f"[{r}] {'b' if r else 'a'}" for r in range(1 + cores)
    )


def test_all_ranks_get_one_job_one_address_and_one_secret(run, script, ssh):
    names = "UNISONO_JOB", "UNISONO_ADDRESS", "UNISONO_SECRET"
    file = script(f"print(*[os.environ[name] for name in {names}])")
    _, out, _ = run("--hosts", "a,b", "-n", "2", file)
    result = {line.partition(" ")[2] for line in out.splitlines()}
    assert len(result) == 1
    job, address, secret = result.pop().split()
    assert re.fullmatch(r"a:[0-9]{5}", address)
    assert re.fullmatch(r"[0-9a-f]{64}", secret)
    _, again, _ = run("--hosts", "a,b", "-n", "1", "--address", "node:7777", file)
    other_job, other_address, other_secret = again.splitlines()[0].split()[1:]
    assert other_address == "node:7777"
    assert (job, secret) != (other_job, other_secret)
    asked = ssh[1].read_text()
    assert secret not in asked
    assert other_secret not in asked
    assert "a exec" in asked


def test_secret_is_on_no_command_line(started, script):
    file = script(
        "print(os.environ['UNISONO_SECRET'], flush=True); time.sleep(60)",
    )
    process = started("--hosts", "a,b", "-n", "1", file)
    secret = lines(process, 2)[0].strip()
    assert len(secret) == 64
    shown = b""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            shown += Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
    assert b"unisono.launch.agent" in shown
    assert secret.encode() not in shown


def test_one_host_has_no_address_and_no_secret(run, script):
    file = script("print([v for v in os.environ if 'ADDRESS' in v or 'SECRET' in v])")
    code, out, _ = run("--hosts", "a:2", file)
    assert (code, sorted(out.splitlines())) == (0, ["[0] []", "[1] []"])


def test_unisono_variables_are_forwarded_and_others_by_name(run, script, monkeypatch):
    monkeypatch.setenv("UNISONO_ALGORITHM", "ring")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("UCX_TLS", "rc")
    monkeypatch.setenv("UNISONO_RANK", "7")
    monkeypatch.setenv("MINE", "a b")
    names = [
        "UNISONO_ALGORITHM",
        "OMP_NUM_THREADS",
        "UCX_TLS",
        "MINE",
        "OTHER",
        "UNISONO_TIMEOUT_S",
    ]
    file = script(f"print(rank, [os.environ.get(name) for name in {names}])")
    given = ["-x", "MINE", "--env", "OTHER=x=y", "--timeout-s", "7"]
    code, out, _ = run("--hosts", "a:1", *given, file)
    assert code == 0
    assert out == "[0] 0 ['ring', '3', 'rc', 'a b', 'x=y', '7.0']\n"


def test_ranks_start_in_the_same_folder_or_the_given_one(
    run, script, tmp_path, monkeypatch
):
    script("print(os.getcwd())")
    monkeypatch.chdir(tmp_path)
    assert run("--hosts", "a:1", "script.py")[1] == f"[0] {tmp_path}\n"
    there = tmp_path / "there"
    there.mkdir()
    assert run("--hosts", "a:1", "--chdir", str(there), "../script.py")[1] == (
        f"[0] {there}\n"
    )


def test_modules_and_programs_get_their_own_options(run, script, tmp_path, monkeypatch):
    script("print(sys.argv[1:])", "tool.py")
    monkeypatch.chdir(tmp_path)
    own = ["--hosts", "x", "-n", "9", ""]
    assert run("--hosts", "a:1", "-m", "tool", *own)[1] == f"[0] {own}\n"
    assert run("--hosts", "a:1", "tool.py", *own)[1] == f"[0] {own}\n"
    assert run("--hosts", "a:1", "echo", "hello")[1] == "[0] hello\n"


def test_localhost_needs_no_ssh(run, script, ssh):
    for name in ("localhost", socket.gethostname()):
        code, out, _ = run("--hosts", f"{name}:2", script("print(host)"))
        assert (code, sorted(out.splitlines())) == (0, ["[0] here", "[1] here"])
    assert not ssh[1].exists()


def test_output_of_the_login_shell_is_ignored(run, script):
    code, out, err = run("--hosts", "noisy:1,a:1", script("print(host)"))
    assert (code, sorted(out.splitlines()), err) == (0, ["[0] noisy", "[1] a"], "")


def test_rank_0_reads_our_standard_input(started, script):
    code = "print(len(sys.stdin.buffer.read()) if rank in (0, 2) else None)"
    process = started("--hosts", "a,b", "-n", "2", script(code), stdin=subprocess.PIPE)
    out, _ = process.communicate("x" * 1_000_000, timeout=40)
    assert sorted(out.splitlines()) == ["[0] 1000000", "[1] None", "[2] 0", "[3] None"]


def test_unread_input_does_not_delay_signals(started, script):
    file = script("print('up', flush=True); time.sleep(60)")
    with open("/dev/zero") as endless:
        process = started("--hosts", "a:2", file, stdin=endless)
        lines(process, 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 130


def test_hosts_output_is_shown_and_logged(run, script, tmp_path):
    logs = tmp_path / "logs"
    file = script("print('out', rank); print('err', rank, file=sys.stderr)")
    shown = ["--only", "1", "--log-dir", str(logs)]
    code, out, err = run("--hosts", "a:1,b:1", *shown, file)
    assert (code, out, err) == (0, "[1] out 1\n", "[1] err 1\n")
    for rank in (0, 1):
        result = (logs / f"rank{rank}.log").read_text()
        assert sorted(result.splitlines()) == [f"err {rank}", f"out {rank}"]


def test_output_lines_that_arrive_in_pieces_are_whole(run, script):
    code = "for i in range(300):\n  sys.stdout.write(f'{host}-'); sys.stdout.flush()\n"
    code += "  sys.stdout.write(f'{i}\\n')"
    _, out, _ = run("--hosts", "a:1,b:1", script(code))
    assert sorted(out.splitlines()) == sorted(
        f"[{r}] {'ab'[r]}-{i}" for r in (0, 1) for i in range(300)
    )


# How it ends


def test_first_failure_is_named_with_its_host(run, script, tmp_path):
    file = script(f"""
open(f"{tmp_path}/up{{rank}}", "w").close()
while rank == 2 and not all(os.path.exists(f"{tmp_path}/up{{r}}") for r in range(n)):
    time.sleep(0.01)
if rank == 2:
    sys.exit("out of cheese")
time.sleep(60)
""")
    code, _, err = run("--hosts", "a,b", "-n", "2", "--grace", "0.2", file)
    assert code == 1
    assert "rank 2 on host b (pid " in err
    assert "failed first" in err
    assert "after it: ranks 0, 1, 3 ended by the launcher (SIGTERM)" in err
    assert err.rstrip().endswith("out of cheese")


def test_killed_rank_is_reported_with_its_signal(run, script):
    file = script("if rank == 0: os.kill(os.getpid(), 9)\ntime.sleep(60)")
    code, out, _ = run("--json", "--hosts", "a:1,b:1", "--grace", "0", file)
    result = json.loads(out)
    assert code == result["exit_code"] == 137
    assert result["first_failure"]["host"] == "a"
    assert result["first_failure"]["signal"] == "SIGKILL"
    assert [rank["host"] for rank in result["ranks"]] == ["a", "b"]
    assert result["ranks"][1]["ended_by_launcher"]


def test_ranks_that_ignore_sigterm_are_killed(run, script, tmp_path):
    mark = tmp_path / "ignores"
    file = script(f"""
signal.signal(15, signal.SIG_IGN)
if rank == 1:
    open({str(mark)!r}, "w").close()
    time.sleep(60)
while not os.path.exists({str(mark)!r}):
    time.sleep(0.01)
sys.exit(5)
""")
    code, out, _ = run("--json", "--hosts", "a:1,b:1", "--grace", "0", file)
    result = json.loads(out)
    assert code == 5
    assert result["ranks"][1]["signal"] == "SIGKILL"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_signals_reach_all_ranks(started, script, number, code):
    file = script("print(os.getpid(), flush=True); time.sleep(60)")
    process = started("--hosts", "a,b", "-n", "2", file)
    pids = [int(line) for line in lines(process, 4)]
    process.send_signal(number)
    assert process.wait(40) == code
    assert all(map(has_ended, pids))
    assert f"ended by {number.name}" in process.stderr.read()


def test_second_ctrl_c_kills_ranks_on_hosts(started, script):
    file = script("""
signal.signal(2, lambda *_: print("no", flush=True))
print("up", flush=True)
while True:
    time.sleep(1)
""")
    process = started("--hosts", "a,b", "-n", "1", "--grace", "50", file)
    assert lines(process, 2) == ["up\n"] * 2
    process.send_signal(signal.SIGINT)
    assert lines(process, 2) == ["no\n"] * 2  # two at once would be one to the kernel
    process.send_signal(signal.SIGINT)
    assert process.wait(40) == 130


def test_ctrl_z_pauses_ranks_on_other_hosts(started, script):
    file = script("print(os.getpid(), flush=True); time.sleep(60)")
    process = started("--hosts", "a:1,b:1", file)
    pids = [int(line) for line in lines(process, 2)]

    def states():  # of the launcher, too: what would it be woken from else?
        return {state_of(pid) for pid in [process.pid, *pids]}

    process.send_signal(signal.SIGTSTP)
    wait_for(lambda: states() == {"T"})
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: "T" not in states())
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 143


def test_ctrl_c_during_connection_to_hosts_ends_the_run(started, script, tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\necho waiting >> $0.log\nexec sleep 60\n")
    slow.chmod(0o755)
    process = started("--hosts", "a,b", script(""), ssh=str(slow))
    wait_for(Path(f"{slow}.log").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(40) == 130


def test_no_process_is_left_when_the_launcher_is_killed(started, script):
    code = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
    code += "print(os.getpid(), child.pid, flush=True); time.sleep(60)"
    process = started("--hosts", "a,b", "-n", "2", script(code))
    pids = [int(pid) for line in lines(process, 4) for pid in line.split()]
    process.kill()
    wait_for(lambda: all(map(has_ended, pids)))


def parent(pid):
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def test_lost_ssh_connection_is_a_failure_of_its_ranks(started, script):
    """The agent is killed, as its host might be: the others are ended."""
    file = script("print(host, os.getpid(), flush=True); time.sleep(60)")
    process = started("--hosts", "a,b", "-n", "2", "--grace", "0.2", "--json", file)
    result = [process.stderr.readline().split() for _ in range(4)]
    of = {host: int(pid) for _, host, pid in result}
    os.kill(parent(of["b"]), signal.SIGKILL)
    out, err = process.communicate(timeout=40)
    assert "rank 2 on host b" in err
    assert "the connection to host b closed" in err
    found = json.loads(out)
    assert (process.returncode, found["first_failure"]["host"]) == (255, "b")
    wait_for(lambda: all(has_ended(int(pid)) for _, _, pid in result))


# What cannot be


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("a,down", r"host down: cannot be reached \(ssh: connect to host down port 22"),
        ("a,down", "must work without a password: .*ssh down true"),
        ("bare", "host bare: there is no .*python.* there; .*--python"),
        ("empty", "host empty: .* has no unisono there; .* -m pip install unisono=="),
        ("old", "host old: unisono 0.0.1 there, [0-9.]+ here"),
        ("broken", r"host broken: no agent was started there .*Segmentation fault"),
        ("localhost,b", "rank 0's host is called localhost, which on b means"),
        ("a,a", "--hosts: a is named twice"),
        ("-a", "--hosts -a: '-a' is not a host"),
    ],
)
def test_unusable_hosts_are_refused(run, script, hosts, message):
    code, out, err = run(f"--hosts={hosts}", "-n", "1", script("print('ran')"))
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--chdir", "/no/such"],
            "host a: cannot change to the folder /no/such",
        ),
        (["--python", "/no/python"], "host a: there is no /no/python there"),
        (["--address", "here"], "--address here: expected host:port"),
        (["--ssh", "'"], "--ssh ': No closing quotation"),
        (["--ssh", "/no/ssh"], "host a: /no/ssh cannot be run here"),
        (["--env", "=x"], "--env =x: expected NAME"),
        (["--env", "NOT_SET_HERE"], "--env NOT_SET_HERE: is not set here"),
        (["--only", "5"], "--only 5: ranks are 0..0"),
        (["-n", "0"], "-n 0: a world has at least one rank"),
        (["--hostfile", "/no/file"], "give one of them"),
    ],
)
def test_invalid_options_are_refused(run, script, options, message):
    code, out, err = run("--hosts", "a:1", *options, script("print('ran')"))
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    "option", [["--python", "x"], ["--chdir", "/"], ["--address", "a:1"]]
)
def test_host_options_without_hosts_are_refused(capfdbinary, script, option):
    assert main(["run", *option, script("")]) == 2
    assert b"this is for other hosts; name them with --hosts" in (
        capfdbinary.readouterr().err
    )


def test_host_whose_name_is_loopback_is_reported(run, script, monkeypatch):
    """As many systems are installed; the other hosts would knock in vain."""
    name = socket.gethostname()
    if not socket.gethostbyname(name).startswith("127."):
        pytest.skip(f"{name} is known here by its real address")
    code, out, err = run("--hosts", f"{name}:1,b:1", script("print('ran')"))
    assert (code, out) == (2, "")
    assert f"host {name}: its own name resolves to 127." in err
    assert (
        run("--hosts", f"{name}:1,b:1", "--address", "c:9", script("print(1)"))[0] == 0
    )


def test_missing_program_is_reported(run):
    code, _, err = run("--hosts", "a:1", "no-such-program")
    assert code == 2
    assert "host a: rank 0 of 1 cannot be started" in err


# Worlds


COLLECTIVE = """
import numpy as np, unisono
comm = unisono.init()
x = np.full(1000, comm.rank + 1.0)
comm.all_reduce(x)
print(x[0], comm.world_size)
"""


@pytest.mark.sweep
def test_ranks_of_one_host_connect(run, script):
    code, out, err = run("--hosts", "a:3", script(COLLECTIVE))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{r}] 6.0 3" for r in range(3)]


def test_ranks_of_several_hosts_connect(run, script):
    address = ["--address", f"127.0.0.1:{free_port()}"]
    code, out, err = run("--hosts", "a:2,b:1", *address, script(COLLECTIVE))
    # On a busy machine ranks say that they wait.
    assert code == 0, err
    assert all("waits for rank 0" in line for line in err.splitlines()), err
    assert sorted(out.splitlines()) == [f"[{r}] 6.0 3" for r in range(3)]
