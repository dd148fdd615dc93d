"""`unisono trace`: runs are recorded, summed up, compared, opened, and explained."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from unisono.cli import main
from unisono.errors import BadArgument
from unisono.trace import ask, faults, flights
from unisono.trace.document import read
from unisono.trace.summary import summarise
from unisono.trace.why import why

pytestmark = pytest.mark.timeout(120)

TRAIN = """
import sys
import numpy as np
import unisono

def main():
    comm = unisono.init()
    for step in range(3):
        comm.all_reduce(np.ones(1000, np.float32))
        comm.all_gather(np.ones(10))
    print("trained", *sys.argv[1:])
    return 3 if "--fail" in sys.argv and comm.rank == 1 else 0

sys.exit(main())
"""
STUCK = """
import time
import numpy as np
import unisono

def load():
    while True:  # the line where it stands
        time.sleep(0.01)

comm = unisono.init()
comm.all_reduce(np.ones(10))
if comm.rank == 2:
    load()
comm.all_reduce(np.ones(20))  # in vain
"""


@pytest.fixture
def run(capfd):
    def call(*arguments):
        code = main(["trace", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    return file


def test_run_is_recorded_and_summarised(run, script, tmp_path):
    file, parts = tmp_path / "run.json", tmp_path / "parts"
    words = (
        "-o",
        file,
        "--keep",
        parts,
        "--json",
        "-n",
        4,
        script,
        "--help",
        "-o",
        "x",
    )
    code, out, err = run("run", *words)
    assert code == 0, err
    assert err.count("trained --help -o x") == 4
    json.loads(out)  # alone
    doc = read(file)
    assert faults(doc) == []
    calls = [e for e in doc["traceEvents"] if e.get("cat") == "collective"]
    assert len(calls) == 4 * 6
    result = json.loads(out.splitlines()[-1])
    assert (result["ranks"], result["calls"]) == (4, 6)
    assert {row["collective"] for row in result["rows"]} == {"all_reduce", "all_gather"}
    assert all(row["calls"] == 3 for row in result["rows"])
    assert result["exposed"] == pytest.approx(
        result["busy"]
    )  # nothing was asynchronous
    assert read(parts)["traceEvents"] == doc["traceEvents"]
    code, out, _ = run("summary", file)
    assert code == 0
    assert "4 ranks" in out
    assert "all_reduce by" in out
    code, out, _ = run("diff", file, parts)
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines()[1:]] == ["1.00"] * 2
    code, out, _ = run("diff", file, parts, "--json")
    assert {change["ratio"] for change in json.loads(out)} == {1.0}
    code, out, _ = run("open", file, "--json", "--per-rank", tmp_path / "each")
    each = [read(tmp_path / "each" / f"rank{r}.pt.trace.json.gz") for r in range(4)]
    assert [one["distributedInfo"]["rank"] for one in each] == [0, 1, 2, 3]
    assert [faults(one) for one in each] == [[]] * 4
    mine = [e for e in each[2]["traceEvents"] if e.get("cat") == "collective"]
    assert len(mine) == 6
    assert json.loads(out)["events"] == len(doc["traceEvents"])


@pytest.mark.sweep
def test_run_that_fails_is_recorded_and_keeps_its_code(run, script, tmp_path):
    file = tmp_path / "run.pt.trace.json.gz"
    code, _, err = run("run", "-n", 2, "-o", file, script, "--fail")
    assert code == 3
    assert "rank 1" in err
    assert summarise(read(file)).calls == 6
    nothing = tmp_path / "nothing.json"
    bad = tmp_path / "bad.py"
    bad.write_text("raise SystemExit(4)")
    code, _, _ = run("run", "-o", nothing, "-n", 2, bad)
    assert code == 4
    assert not nothing.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "-o"), "expected a path"),
        (("run", "--keep", "FULL", "-n", "2", "x.py"), "nothing in it"),
        (("summary", "nowhere.json"), "cannot be read"),
        (("diff", "nowhere.json", "x"), "cannot be read"),
        (("open", "nowhere.json"), "cannot be read"),
        (("why", "nowhere"), "expected a folder"),
        ((), "expected run, open, summary, diff, why or what-if"),
    ],
)
def test_invalid_trace_commands_are_one_line(run, tmp_path, words, message):
    (tmp_path / "x").write_text("")
    words = [str(tmp_path) if word == "FULL" else word for word in words]
    code, _, err = run(*words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_verbs_have_examples_and_their_options_are_frozen(run):
    result = {}
    for verb in ("run", "open", "summary", "diff", "why"):
        code, out, _ = run(verb, "--help")
        assert code == 0
        assert f"Example: unisono trace {verb}" in out
        words = {w.strip("│ ,():.") for w in out.split()}
        result[verb] = sorted(w for w in words if w.startswith("--") and len(w) > 2)
    assert result == {
        "run": ["--json", "--keep"],
        "open": ["--browser", "--json", "--once", "--per-rank", "--port"],
        "summary": ["--json"],
        "diff": ["--json"],
        "why": ["--json", "--pickle", "--records"],
    }


@contextlib.contextmanager
def running(*words):
    """A job in the background."""
    command = [sys.executable, "-m", "unisono", "run", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as job:
        try:
            yield job
        finally:
            job.send_signal(signal.SIGTERM)


def until(condition):
    """What a condition says once it says something."""
    ends = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < ends, "it did not come about"
        time.sleep(0.02)
    return found


def all_wait(pid):
    """The records of a job, once all but one of its ranks wait for that one."""
    try:
        sockets = ask.one_job(pid)  # others may run jobs here, too
    except BadArgument:
        return None
    states = [state for state in ask.states(sockets).values() if state]
    groups = [group for state in states for group in state["communicators"]]
    where = sorted((c["arrived"][c["rank"]], c["inside"]) for c in groups)
    if where != [(1, False), (2, True), (2, True)]:
        return None
    result = ask.records(pid)
    stands = [f["name"] for s in result[2]["stacks"] if s["main"] for f in s["frames"]]
    return result if "load" in stands else None


def looked_at(capfd, pid):
    """What `unisono top` says of a job, as JSON and for people."""
    assert main(["top", str(pid), "--json"]) == 0
    seen = json.loads(capfd.readouterr().out)
    assert main(["top", str(pid), "--once"]) == 0
    return seen, capfd.readouterr().out


def test_stuck_job_shows_where_each_rank_is(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    file, folder = tmp_path / "stuck.py", tmp_path / "records"
    file.write_text(STUCK)
    with running("-n", 3, "--records", folder, file) as job:
        flights.write(until(lambda: all_wait(job.pid)), tmp_path / "asked")
        seen, table = looked_at(capfd, job.pid)
        assert main(["trace", "why", str(job.pid)]) == 0
        assert "rank 2" in capfd.readouterr().out
        (pid,) = {d.pid for d in ask.one_job(job.pid) if d.rank == 2}
        os.kill(pid, signal.SIGUSR2)
        written = folder / f"unisono-rank2-{pid}.json"
        until(written.exists)
        assert ask.ask(ask.MonitorSocket(pid, 2), "nonsense") == {
            "error": "expected state, record or links"
        }
    assert seen["late"] == [2]
    assert [row["seq"] for row in seen["rows"]] == [2, 2, 1]
    assert [row["behind"] for row in seen["rows"]] == [0, 0, 1]
    assert seen["rows"][0]["doing"].startswith("in all_reduce(float64 × 20, sum)")
    assert seen["rows"][2]["doing"].startswith("after all_reduce(float64 × 10, sum)")
    assert all(row["rate"] == 0 for row in seen["rows"])
    for row in seen["rows"]:
        links = [link for link in seen["links"] if link["src"] == row["rank"]]
        assert sum(link["sent"] for link in links) == row["sent"] > 0
        assert all(link["near"] and link["rate"] == 0 for link in links)
    (within,) = seen["hosts"]
    assert within["links"] == len(seen["links"])
    assert within["sent"] == sum(row["sent"] for row in seen["rows"])
    assert (seen["guessed"], seen["missing"]) == (0, [])
    assert "links, the busiest first" in table
    assert "3 of 3 ranks; others wait for rank 2" in table
    assert "1 late" in table
    diagnosis = why(flights.read(tmp_path / "asked"))
    assert diagnosis.kind == "missing"
    assert diagnosis.ranks == (2,)
    lines = STUCK.splitlines()
    stands = next(n for n, line in enumerate(lines, 1) if "while True" in line)
    odd, *others = diagnosis.sides
    assert odd.rank == 2
    assert Path(odd.file) == file
    assert odd.number in (stands, stands + 1)
    assert {side.rank for side in others} == {0, 1}
    assert [lines[side.number - 1][-9:] for side in others] == ["# in vain"] * 2
    assert flights.read(folder)[2].stands.filename == str(file)


def test_trace_is_served_to_perfetto_alone(script, tmp_path):
    file = tmp_path / "t.json"
    file.write_text('{"traceEvents": []}')
    command = [sys.executable, "-m", "unisono", "trace", "open", str(file)]
    command += ["--browser", "--port", "0"]
    plain = {**os.environ, "BROWSER": "true", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=plain) as job:
        try:
            result = [next(job.stdout), next(job.stdout)]
            here = result[1].split()[1]
            with urllib.request.urlopen(here, timeout=30) as answer:
                assert answer.read() == file.read_bytes()
                allowed = answer.headers["Access-Control-Allow-Origin"]
            assert allowed == "https://ui.perfetto.dev"
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                urllib.request.urlopen(here.replace("t.json", "train.py"), timeout=30)
            refused.value.close()  # it is an answer, too
            assert here.startswith("http://127.0.0.1:")
        finally:
            job.kill()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("x",), "expected the number of a process"),
        (("--every", "0"), "expected seconds"),
        (("--every", "soon"), "expected seconds"),
        (("1", "--once"), "no job of this user"),
    ],
)
def test_invalid_top_commands_are_refused(capfd, words, message):
    assert main(["top", *words]) == 2
    assert message in capfd.readouterr().err


def test_options_of_top_are_frozen(capfd):
    assert main(["top", "--help"]) == 0
    out = capfd.readouterr().out
    assert "Example: unisono top" in out
    words = {w.strip("│ ,():.;") for w in out.split()}
    options = {w for w in words if w.startswith("--")}
    assert options == {
        *("--every", "--json", "--listen", "--once", "--open", "--port", "--web")
    }


@pytest.fixture
def step(tmp_path):
    """One all_reduce of 4 MiB on 8 ranks that took a second."""
    path = tmp_path / "t.json"
    args = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "dtype": "Float"}
    event = {"ph": "X", "cat": "kernel", "name": "nccl", "ts": 0, "dur": 1e6}
    path.write_text(json.dumps([event | {"args": args | {"Group size": 8}}]))
    return str(path)


def test_what_if_tells_a_step_with_other_collectives(run, step):
    code, out, _ = run("what-if", step, "-t", "dgx-h100:1", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["before"] == 1.0
    assert 0 < answer["after"] < 0.01
    _, out, _ = run("what-if", step, "-t", "dgx-h100:1")
    assert "1 s as recorded" in out


def test_what_if_with_an_engine_says_what_simulate_says(run, step, capfd):
    words = "simulate all_reduce -t dgx-h100:1 -b 4M --engine nccl --json"
    assert main(words.split()) == 0
    (told,) = json.loads(capfd.readouterr().out)["results"]
    where = ("what-if", step, "-t", "dgx-h100:1")
    _, out, _ = run(*where, "--engine", "nccl", "--json")
    answer = json.loads(out)
    assert answer["after"] == pytest.approx(told["time"])
    _, out, _ = run(*where, "--json")
    assert answer["after"] != pytest.approx(json.loads(out)["after"])
    _, out, _ = run(*where, "--engine", "nccl")
    assert "on dgx-h100:1 by nccl (" in out
    assert f"nccl's {told['algorithm']}, {told['protocol']}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--engine ncl", "nearest: nccl"),
        ("--engine nccl --algorithm ring", "--algorithm: is for schedules"),
        ("--engine nccl --codec fp8", "--codec: is for schedules"),
    ],
)
def test_engine_of_what_if_that_cannot_be_is_one_line(run, step, words, message):
    code, _, err = run("what-if", step, "-t", "dgx-h100:1", *words.split())
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
