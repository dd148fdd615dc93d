"""Ranks that are killed, stopped or slow, at every step of the protocol: `make trials`
runs many more of these."""

import re
import secrets
from pathlib import Path

import msgspec
import pytest

from kill_trials.trials import PLACEMENTS, Trial, TrialServer, draw, draw_jitter
from unisono import _native

pytestmark = pytest.mark.one_in(3)

NATIVE = Path(__file__).parents[2] / "native"

SMALL, PIECES = 10, 200_000
AT = {
    "segment.make": [
        Trial(3, 0, "split", SMALL),
        Trial(2, 1, "send_recv", SMALL),
        Trial(3, 2, "in_flight", SMALL, shared=True),
    ],
    "segment.announce": [
        Trial(4, 1, "split", PIECES),
        Trial(3, 0, "star", SMALL),
        Trial(2, 0, "send_recv", PIECES),
    ],
    "call.begin": [
        Trial(2, 0, "all_reduce", SMALL, hit=7),
        Trial(4, 3, "broadcast", PIECES, hit=2),
        Trial(3, 1, "in_flight", PIECES, hit=3),
        Trial(5, 2, "objects", SMALL, hit=4),
    ],
    "lead.done": [
        Trial(2, 1, "all_reduce", 5_000, hit=3, close_on_error=True),
        Trial(3, 0, "gather", 5_000, hit=2),
        Trial(4, 2, "reduce_scatter", SMALL, hit=5),
    ],
    "arrive.posted": [
        Trial(2, 0, "all_reduce", PIECES, hit=2, shared=True),
        Trial(5, 4, "all_to_all", SMALL, hit=6),
        Trial(3, 1, "scatter", PIECES, hit=3),
    ],
    "arrive.seen": [
        Trial(3, 2, "all_gather", PIECES, hit=2, shared=True),
        Trial(2, 1, "barrier", hit=9),
        Trial(4, 0, "split", SMALL, hit=4),
    ],
    "action.begin": [
        Trial(4, 2, "all_reduce", PIECES, algorithm="ring", hit=5),
        Trial(3, 0, "reduce", PIECES, hit=3),
        Trial(5, 1, "broadcast", PIECES, algorithm="chain", hit=4),
        Trial(2, 0, "mixed", PIECES, hit=20),
    ],
    "action.done": [
        Trial(4, 1, "all_reduce", PIECES, algorithm="recursive_doubling", hit=2),
        Trial(3, 2, "all_gather", 5_000, algorithm="ring", hit=3),
        Trial(2, 1, "in_flight", SMALL, hit=4),
    ],
    "deliver": [
        Trial(2, 1, "all_reduce", PIECES, hit=3),
        Trial(4, 0, "all_reduce", PIECES, hit=5),
        Trial(3, 2, "gather", PIECES, hit=2),
        Trial(2, 0, "broadcast", PIECES, hit=2),
        Trial(3, 1, "all_reduce", PIECES, shared=True, hit=4),
    ],
    "reach.write": [Trial(2, 1, "all_reduce", PIECES, hit=2)],
    "generation.done": [
        Trial(3, 0, "all_reduce", PIECES, hit=3, close_on_error=True),
        Trial(4, 3, "gather", PIECES, hit=2),
        Trial(5, 0, "barrier", hit=3),
    ],
    "exit.wait": [
        Trial(2, 0, "all_reduce", PIECES, shared=True, hit=2),
        Trial(3, 1, "broadcast", PIECES, shared=True),
        Trial(4, 2, "scatter", PIECES, shared=True),
    ],
    "call.end": [
        Trial(2, 1, "all_reduce", SMALL, hit=5),
        Trial(3, 0, "all_gather", PIECES, shared=True, hit=2),
        Trial(4, 1, "in_flight", 5_000, hit=3),
    ],
    "send.header": [
        Trial(2, 0, "send_recv", SMALL, hit=3),
        Trial(3, 1, "star", PIECES, hit=2),
        Trial(4, 2, "send_recv", PIECES),
    ],
    "send.part": [
        Trial(2, 1, "send_recv", PIECES, hit=4),
        Trial(3, 0, "star", PIECES, hit=3),
        Trial(4, 3, "send_recv", PIECES, hit=2),
    ],
    "recv.part": [
        Trial(2, 0, "star", PIECES, hit=2),
        Trial(3, 2, "send_recv", PIECES, hit=5),
        Trial(4, 1, "star", SMALL, hit=3),
    ],
}
ACROSS = {
    "message.offered": [
        Trial(2, 1, "all_reduce", SMALL, hit=3, hosts=(1, 1)),
        Trial(3, 0, "all_reduce", PIECES, hit=5, hosts=(1, 1, 1)),
        Trial(4, 2, "all_gather", PIECES, hit=2, hosts=(2, 2)),
    ],
    "stream.send": [
        Trial(2, 0, "send_recv", PIECES, hit=4, hosts=(1, 1)),
        Trial(3, 2, "all_to_all", PIECES, hit=6, hosts=(2, 1)),
        Trial(3, 1, "in_flight", SMALL, hit=3, hosts=(1, 1, 1)),
    ],
    "stream.receive": [
        Trial(3, 1, "broadcast", PIECES, hit=7, hosts=(1, 2)),
        Trial(2, 0, "star", SMALL, hit=9, hosts=(1, 1)),
        Trial(5, 4, "all_reduce", PIECES, hit=8, hosts=(2, 1, 2), close_on_error=True),
    ],
    "io.step": [
        Trial(2, 1, "all_reduce", PIECES, hit=9, hosts=(1, 1), io_threads=3),
        Trial(3, 0, "all_gather", PIECES, hit=5, hosts=(1, 1, 1), io_threads=1),
        Trial(4, 2, "all_to_all", SMALL, hit=3, hosts=(2, 2), io_threads=2),
    ],
    "call.begin": [Trial(3, 0, "split", SMALL, hit=3, hosts=(2, 1))],
    "lead.done": [Trial(3, 2, "all_reduce", SMALL, hit=2, hosts=(1, 2))],
    "arrive.seen": [Trial(4, 3, "barrier", hit=5, hosts=(2, 2))],
    "action.done": [Trial(3, 1, "reduce_scatter", 5_000, hit=2, hosts=(2, 1))],
    "generation.done": [Trial(2, 0, "all_reduce", PIECES, hit=2, hosts=(1, 1))],
    "call.end": [Trial(3, 2, "objects", SMALL, hit=4, hosts=(1, 1, 1))],
    "send.part": [Trial(3, 1, "star", PIECES, hit=2, hosts=(1, 1, 1))],
}


@pytest.fixture(scope="session")
def server():
    with TrialServer() as made:
        yield made


def check(report):
    problems = "\n".join(report.problems)
    assert not problems, f"{report.trial}\n{problems}\n{report.stderr}"


def test_every_failpoint_of_the_sources_is_listed_and_tried():
    text = "".join(file.read_text() for file in sorted(NATIVE.rglob("*.[ch]pp")))
    placed = set(re.findall(r'\bfailpoint\("([^"]*)"\)', text))
    # in emulated kernels: devices/test_plane_closing.py; in waits: test_failures.py; in
    # registered pages: test_registered_arrays.py; over UCX: test_ucx_failures.py
    placed -= {"device.move", "device.exchange"}
    placed -= {"wait.yield", "pages.copied", "ucx.send", "ucx.receive"}
    assert placed == set(_native.failpoint_names())
    assert placed == {*AT, *ACROSS}


first_or_all = pytest.mark.parametrize("only", [1, None], ids=["first", "all"])


@pytest.mark.cases(3)
@pytest.mark.quick(only=[1])
@first_or_all
@pytest.mark.parametrize("name", AT)
def test_survivors_name_a_rank_killed_at(name, only, server):
    for trial in AT[name][:only]:
        for hold in (False, True):
            check_killed_at(name, trial, hold, server)


@pytest.mark.cases(2)
@pytest.mark.quick(only=[1])
@first_or_all
@pytest.mark.parametrize("name", ACROSS)
def test_survivors_on_other_hosts_name_a_rank_killed_at(name, only, server):
    for number, trial in enumerate(ACROSS[name][:only]):
        check_killed_at(name, trial, number % 2 == 1, server)


def check_killed_at(name, trial, hold, server):
    how = {"failpoint": name, "hold": hold, "failpoint_timeout_s": 25.0}
    report = server.run(msgspec.structs.replace(trial, **how))
    check(report)
    assert report.passed_failpoint, f"{name} was not passed in {report.trial}"


@pytest.mark.quick(part=[0])
@pytest.mark.parametrize("part", range(4))
def test_survivors_name_a_rank_killed_at_any_time(part, server):
    seed = secrets.randbits(32)
    for trial in draw(seed, 12):
        report = server.run(trial)
        assert not report.problems, (seed, report.trial, report.problems, report.stderr)


def test_survivors_on_other_hosts_name_a_rank_killed_at_any_time(server):
    seed = secrets.randbits(32)
    for trial in draw(seed, 10, placements=PLACEMENTS):
        report = server.run(trial)
        assert not report.problems, (seed, report.trial, report.problems, report.stderr)


STOPPED = [
    Trial(3, 2, "all_reduce", PIECES, hosts=(1, 2)),
    Trial(3, 2, "barrier", failpoint="arrive.posted", hit=5),
    Trial(2, 1, "all_reduce", PIECES, hosts=(1, 1), io_threads=3),
    Trial(3, 1, "all_reduce", PIECES, failpoint="deliver"),
    Trial(2, 1, "all_reduce", SMALL),
    Trial(4, 0, "all_reduce", SMALL, hosts=(2, 1, 1)),
    Trial(4, 0, "all_reduce", PIECES),
    Trial(3, 1, "in_flight", SMALL),
    Trial(3, 2, "star", PIECES),
    Trial(4, 2, "all_reduce", PIECES, algorithm="ring", failpoint="action.begin"),
    Trial(4, 1, "broadcast", PIECES, algorithm="chain", failpoint="action.begin"),
]


@pytest.mark.sweep
@pytest.mark.quick(trial=STOPPED[:3])
@pytest.mark.parametrize(
    "trial",
    STOPPED,
    ids=lambda trial: f"{trial.program}-{trial.algorithm}-{trial.count}",
)
def test_stopped_rank_is_warned_about_and_named(trial, server):
    stopped = msgspec.structs.replace(trial, action="stop", late_s=0.2, timeout_s=3.0)
    report = server.run(stopped)
    check(report)
    warned = re.findall(
        r"unisono: rank (\d) has waited .* for rank (.*)", report.stderr
    )
    late = {named for rank, named in warned if int(rank) != trial.victim}
    assert str(trial.victim) in late, report.stderr


@pytest.mark.quick(part=[0])
@pytest.mark.parametrize("part", range(4))
def test_results_are_right_when_ranks_are_delayed(part, server):
    seed = secrets.randbits(32)
    for trial in draw_jitter(seed, 2, rounds=25):
        report = server.run(trial)
        assert not report.problems, (seed, report.trial, report.problems, report.stderr)


def test_results_are_right_when_ranks_of_several_hosts_are_delayed(server):
    seed = secrets.randbits(32)
    for trial in draw_jitter(seed, 2, rounds=25, placements=PLACEMENTS):
        report = server.run(trial)
        assert not report.problems, (seed, report.trial, report.problems, report.stderr)
