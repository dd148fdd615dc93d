"""Worlds that shrink and grow: real processes, on one host and on pretended ones."""

import os
import re
import sys
from pathlib import Path

import pytest

import elastic_programs
import unisono
from rank_churn import Churn
from unisono.testing import world, world_across

NEAR = {"UNISONO_ADDRESS": ""}
ROOT = Path(__file__).parents[3]
KILLED = -9

pytestmark = pytest.mark.timeout(180)


def ranks_on(hosts, **options):
    """As many ranks; on one host without any address."""
    near = hosts if isinstance(hosts, int) else 0
    env = NEAR if near else {}
    return world_across([near] if near else hosts, env=env, grace_s=40, **options)


def survivors_of(running):
    """What those say who were not killed: they all say the same but for the rank."""
    ends = running.wait()
    living = [end for end in ends if end.status != KILLED]
    for end in living:
        assert end.error is None, (end.error, end.stderr)
        assert not end.ended_by_launcher, end.stderr
    return living


def check(living, size, epoch=None, order=None, may_live=()):
    """All are in one world of that size, in the order of their old ranks.

    `may_live` are those of other hosts who were killed: nobody left can be sure of it.
    """
    pids = [end.pid for end in living]
    results = [end.result for end in living]
    assert [r[0] for r in results] == list(range(size))
    assert {r[1] for r in results} == {size}
    assert len({r[2] for r in results}) == 1
    assert epoch is None or results[0][2] == epoch
    assert all(r[3] == (order or pids) for r in results)
    assert all(set(r[4]) <= set(may_live) for r in results)


@pytest.mark.quick(hosts=[[1, 1, 1]])
@pytest.mark.parametrize(("hosts", "victim"), [(4, 1), ([2, 2], 0), ([1, 1, 1], 2)])
def test_survivors_go_on_in_order(hosts, victim):
    with ranks_on(hosts).start(elastic_programs.loses, [victim]) as running:
        living = survivors_of(running)
    size = (hosts if isinstance(hosts, int) else sum(hosts)) - 1
    # A rank of the victim's own host is sure, and the others believe it.
    check(living, size, epoch=1, may_live=[2] if hosts == [1, 1, 1] else [])


@pytest.mark.quick(hosts=[[1, 2, 1]])
@pytest.mark.parametrize(
    ("hosts", "victims"),
    [(4, [0, 1, 0]), ([1, 2, 1], [0, 1, 1]), ([2, 2], [2, 2, 0])],
    ids=str,
)
def test_down_to_the_last(hosts, victims):
    """Across hosts most are left each time, or half with rank 0, or it is sure."""
    with ranks_on(hosts).start(elastic_programs.loses, victims) as running:
        living = survivors_of(running)
    check(living, 1, epoch=3, may_live=range(4))


@pytest.mark.parametrize("knows", [False, True])
def test_one_of_two_hosts_goes_on_without_rank_0_only_if_told(knows):
    """A refused connection is no proof of death, but the caller's word is taken."""
    with ranks_on([1, 1]).start(elastic_programs.loses_rank_0, knows) as running:
        (end,) = survivors_of(running)
    if knows:
        check([end], 1, epoch=1)
    else:
        assert end.result[0] == (0,)
        assert "dead=[their ranks]" in end.result[1]


@pytest.mark.parametrize("dead", [[5], [-1], [1.5], "caller"], ids=str)
def test_whom_the_caller_cannot_know_to_be_dead(dead):
    comm = unisono.init(0, 1)
    with comm, pytest.raises(unisono.BadArgument, match="dead"):
        comm.shrink(dead=[0] if dead == "caller" else dead)


POINTS = ["first word", "proposal", "met", "first barrier", "second barrier"]


@pytest.mark.quick(hosts=[[2, 3]])
@pytest.mark.parametrize(
    ("hosts", "point"),
    [*((4, point) for point in POINTS), *(([2, 3], point) for point in POINTS[1::2])],
)
def test_another_may_die_meanwhile_even_who_presides(hosts, point):
    args = (1, 0, point) if POINTS.index(point) % 2 else (0, 1, point)
    with ranks_on(hosts).start(
        elastic_programs.loses_another_meanwhile, *args
    ) as running:
        living = survivors_of(running)
    check(living, 2 if hosts == 4 else 3, may_live=() if hosts == 4 else (0, 1))


@pytest.mark.quick(hosts=[[1, 1, 1]])
@pytest.mark.parametrize("hosts", [3, [1, 1, 1]], ids=str)
def test_who_does_not_come_is_left_out_and_told_so(hosts, tmp_path):
    run = elastic_programs.one_comes_late
    with ranks_on(hosts).start(run, 0, str(tmp_path)) as running:
        late, *others = [end.result for end in survivors_of(running)]
    assert [r[0] for r in others] == [0, 1]
    assert all(r[4] == (0,) for r in others)
    kind, said = late
    assert kind is unisono.PeerLost
    assert "rank 0 was left out" in said
    assert "join" in said


@pytest.mark.quick(hosts=[[1, 2]])
@pytest.mark.parametrize("hosts", [3, [1, 2]], ids=str)
def test_who_fails_before_it_has_joined_a_group_keeps_nobody_waiting(hosts):
    with ranks_on(hosts).start(elastic_programs.fails_in_split) as running:
        ends = survivors_of(running)
    assert [end.result[0] for end in ends] == ["OSError", "PeerLost", "PeerLost"]
    assert [end.result[1][:2] for end in ends] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.sweep
def test_too_few_do_not_go_on_across_hosts(tmp_path):
    run = elastic_programs.only_one_calls
    with ranks_on([1, 1, 1]).start(run, 2, str(tmp_path)) as running:
        missing, said = survivors_of(running)[2].result
    assert missing == (0, 1)
    assert "too few" in said
    assert "rank 0 (pid" in said


@pytest.mark.quick(hosts=[[2, 1]])
@pytest.mark.parametrize("hosts", [3, [2, 1]], ids=str)
def test_it_needs_no_death_and_can_be_done_again(hosts, tmp_path):
    with ranks_on(hosts).start(elastic_programs.nobody_died, str(tmp_path)) as running:
        check(survivors_of(running), 3, epoch=2)


@pytest.mark.quick(hosts=[[1, 1]])
@pytest.mark.parametrize("hosts", [2, [1, 1]], ids=str)
def test_how_not_to_call_it(hosts, tmp_path):
    with ranks_on(hosts).start(elastic_programs.misuses, str(tmp_path)) as running:
        living = survivors_of(running)
    for end in living:
        said, environ = end.result
        assert "split" in said["split"]
        assert "grow the world" in said["split grows"]
        assert said["timeout"].startswith("BadArgument: timeout_s = 0")
        assert "2 ranks are here" in said["smaller"]
        assert "whole number" in said["no number"]
        assert said["fork"] == 17
        assert "another thread" in said["second thread"]
        assert said["in flight"].startswith("PeerLost: recv")
        assert "is closed" in said["closed"]
        assert "is closed" in said["part of the old world"]
        assert "is closed" in said["closed grows"]
        assert environ[:3] == (end.rank, 2, 1)


def test_a_world_of_one_shrinks_to_itself():
    comm = unisono.init(0, 1)
    new = comm.shrink()
    assert (new.rank, new.world_size, new.left_out) == (0, 1, ())
    assert "closed" in repr(comm)
    elastic_programs.works(new)
    new.close()
    with pytest.raises(unisono.UsageError, match="closed"):
        new.shrink()


def test_ranks_that_are_threads_cannot():
    def attempt(comm):
        with pytest.raises(unisono.UsageError, match="threads"):
            comm.shrink()
        with pytest.raises(unisono.UsageError, match="threads"):
            comm.grow(3)

    world(2).run(attempt)


def first_then_joining(first, hosts):
    """The environment of ranks: the last ones are told to join."""

    def env_of(rank):
        return {"UNISONO_JOIN": "1"} if rank >= first else {}

    return ranks_on(hosts, env_of=env_of, meets=False)


@pytest.mark.quick(hosts=[[1, 1, 2]])
@pytest.mark.parametrize("hosts", [4, [1, 1, 2]], ids=str)
def test_newcomers_follow_those_who_were_there(hosts):
    plan = first_then_joining(2, hosts)
    with plan.start(elastic_programs.grows_or_joins, 2, 4) as running:
        living = survivors_of(running)
    assert [end.result[0] for end in living[:2]] == [0, 1]
    assert sorted(end.result[0] for end in living) == [0, 1, 2, 3]
    by_rank = sorted(living, key=lambda end: end.result[0])
    check(by_rank, 4, epoch=1)


@pytest.mark.quick(hosts=[[1, 2, 1]])
@pytest.mark.parametrize("hosts", [4, [1, 2, 1]], ids=str)
def test_a_world_that_has_lost_its_first_rank_grows_again(hosts):
    plan = first_then_joining(3, hosts)
    with plan.start(elastic_programs.grows_or_joins, 3, 3, [0]) as running:
        living = survivors_of(running)
    check(living, 3, epoch=2)  # nobody was left out of the grown one


@pytest.mark.quick(hosts=[[2, 1]])
@pytest.mark.parametrize("hosts", [3, [2, 1]], ids=str)
def test_a_newcomer_that_dies_on_the_way_hurts_nobody(hosts):
    plan = first_then_joining(2, hosts)
    with plan.start(elastic_programs.a_newcomer_dies, 2, 3) as running:
        living = survivors_of(running)
    check(living, 2)


@pytest.mark.quick(hosts=[[1, 1]])
@pytest.mark.parametrize(
    ("hosts", "address", "why"),
    [
        (2, None, "0 of 1 processes joined within 0.5 s"),
        ([1, 1], None, "0 of 1 processes joined within 0.5 s to 127.0.0.1"),
        ([1, 1], "192.0.2.1:29400", "grow(address=host:port)"),
    ],
)
def test_if_nobody_joins_all_is_as_before(hosts, address, why):
    with ranks_on(hosts).start(elastic_programs.nobody_joins, address) as running:
        living = survivors_of(running)
    for end in living:
        said, environ = end.result
        assert why in said
        assert environ[:3] == (end.rank, 2, 0)


@pytest.mark.quick(hosts=[[2, 1]])
@pytest.mark.parametrize(("hosts", "victim"), [(3, 0), ([2, 1], 2)])
def test_a_death_ends_the_wait_for_newcomers(hosts, victim):
    run = elastic_programs.dies_while_others_wait_to_grow
    with ranks_on(hosts).start(run, victim) as running:
        living = survivors_of(running)
    for place, end in enumerate(living):
        assert end.result[0] == (victim,)
        assert end.result[1][:3] == (place, 2, 1)


def test_who_joins_must_know_the_job_and_not_its_rank(monkeypatch):
    monkeypatch.delenv("UNISONO_JOB", raising=False)
    with pytest.raises(unisono.BadArgument, match="which job"):
        unisono.init(join=True)
    with pytest.raises(unisono.BadArgument, match="leave them out"):
        unisono.init(0, 2, join=True)
    with pytest.raises(unisono.ConnectFailed, match=r"'nowhere' on this host.*grow"):
        unisono.init(join=True, job="nowhere", meeting_s=0.2)
    monkeypatch.setenv("UNISONO_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("UNISONO_JOIN", "1")
    with pytest.raises(unisono.ConnectFailed, match=r"at 127.0.0.1:1.*refused"):
        unisono.init(job="nowhere", meeting_s=0.2)


@pytest.mark.sweep
@pytest.mark.timeout(240)
@pytest.mark.parametrize("hosts", [0, 2], ids=["one host", "two hosts"])
def test_training_survives_kills_and_loses_nothing(hosts):
    command = [sys.executable, str(ROOT / "examples" / "elastic.py"), "60"]
    seed = int.from_bytes(os.urandom(4))
    churn = Churn(command, ranks=3, hosts=hosts, pause_s=0.01)
    report = churn.run(kills=2, seed=seed, every=15, timeout_s=150)
    alone = world_across([1]).run_command(command)[0].stdout.splitlines()[-1]
    right = re.sub(r"\d+ ranks", "3 ranks", alone)
    assert right.startswith("end: 60 steps, 3 ranks, ")
    assert report.ends == [right] * 3, f"seed {seed}\n{report.output}"
    assert report.kills >= 2
