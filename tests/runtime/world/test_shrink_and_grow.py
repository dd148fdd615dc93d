"""Worlds that shrink and grow: real processes, on one host and on emulated ones."""

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

pytestmark = [pytest.mark.timeout(180), pytest.mark.one_in(4)]


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
def test_survivors_keep_their_order(hosts, victim):
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
def test_world_shrinks_down_to_one_rank(hosts, victims):
    """Across hosts most are left each time, or half with rank 0, or it is sure."""
    with ranks_on(hosts).start(elastic_programs.loses, victims) as running:
        living = survivors_of(running)
    check(living, 1, epoch=3, may_live=range(4))


@pytest.mark.parametrize("knows", [False, True])
def test_one_of_two_hosts_continues_without_rank_0_only_with_dead(knows):
    """A refused connection is no proof of death, but the caller's word is taken."""
    with ranks_on([1, 1]).start(elastic_programs.loses_rank_0, knows) as running:
        (end,) = survivors_of(running)
    if knows:
        check([end], 1, epoch=1)
    else:
        assert end.result[0] == (0,)
        assert "dead=[their ranks]" in end.result[1]


@pytest.mark.parametrize("dead", [[5], [-1], [1.5], "caller"], ids=str)
def test_invalid_dead_ranks_are_refused(dead):
    comm = unisono.init(0, 1)
    with comm, pytest.raises(unisono.BadArgument, match="dead"):
        comm.shrink(dead=[0] if dead == "caller" else dead)


POINTS = ["request", "proposal", "connected", "first barrier", "second barrier"]


@pytest.mark.sweep
@pytest.mark.quick(hosts=[[2, 3]])
@pytest.mark.parametrize(
    ("hosts", "point"),
    [*((4, point) for point in POINTS), *(([2, 3], point) for point in POINTS[1::2])],
)
def test_second_death_during_shrink_leaves_the_survivors(hosts, point):
    args = (1, 0, point) if POINTS.index(point) % 2 else (0, 1, point)
    with ranks_on(hosts).start(
        elastic_programs.loses_another_meanwhile, *args
    ) as running:
        living = survivors_of(running)
    check(living, 2 if hosts == 4 else 3, may_live=() if hosts == 4 else (0, 1))


@pytest.mark.sweep
@pytest.mark.quick(hosts=[[1, 1, 1]])
@pytest.mark.parametrize("hosts", [3, [1, 1, 1]], ids=str)
def test_late_rank_is_left_out_with_an_error(hosts, tmp_path):
    run = elastic_programs.one_comes_late
    with ranks_on(hosts).start(run, 0, str(tmp_path)) as running:
        late, *others = [end.result for end in survivors_of(running)]
    assert [r[0] for r in others] == [0, 1]
    assert all(r[4] == (0,) for r in others)
    kind, message = late
    assert kind is unisono.PeerLost
    assert "rank 0 was left out" in message
    assert "join" in message


@pytest.mark.quick(hosts=[[1, 2]])
@pytest.mark.parametrize("hosts", [3, [1, 2]], ids=str)
def test_failure_before_joining_a_group_blocks_no_rank(hosts):
    with ranks_on(hosts).start(elastic_programs.fails_in_split) as running:
        ends = survivors_of(running)
    assert [end.result[0] for end in ends] == ["OSError", "PeerLost", "PeerLost"]
    assert [end.result[1][:2] for end in ends] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.sweep
def test_minority_does_not_continue_across_hosts(tmp_path):
    run = elastic_programs.only_one_calls
    with ranks_on([1, 1, 1]).start(run, 2, str(tmp_path)) as running:
        missing, message = survivors_of(running)[2].result
    assert missing == (0, 1)
    assert "too few" in message
    assert "rank 0 (pid" in message


@pytest.mark.quick(hosts=[[2, 1]])
@pytest.mark.parametrize("hosts", [3, [2, 1]], ids=str)
def test_shrink_works_without_a_death_and_twice(hosts, tmp_path):
    with ranks_on(hosts).start(elastic_programs.nobody_died, str(tmp_path)) as running:
        check(survivors_of(running), 3, epoch=2)


@pytest.mark.quick(hosts=[[1, 1]])
@pytest.mark.parametrize("hosts", [2, [1, 1]], ids=str)
def test_shrink_and_grow_refuse_misuse(hosts, tmp_path):
    with ranks_on(hosts).start(elastic_programs.misuses, str(tmp_path)) as running:
        living = survivors_of(running)
    for end in living:
        message, world = end.result
        assert "split" in message["split"]
        assert "grow the world" in message["split grows"]
        assert message["timeout"].startswith("BadArgument: timeout_s = 0")
        assert "2 ranks are here" in message["smaller"]
        assert "whole number" in message["no number"]
        assert message["fork"] == 17
        assert "another thread" in message["second thread"]
        assert message["in flight"].startswith("PeerLost: recv")
        assert "is closed" in message["closed"]
        assert "is closed" in message["part of the old world"]
        assert "is closed" in message["closed grows"]
        assert world[:3] == (end.rank, 2, 1)


def test_world_of_one_shrinks_to_itself():
    comm = unisono.init(0, 1)
    new = comm.shrink()
    assert (new.rank, new.world_size, new.left_out) == (0, 1, ())
    assert "closed" in repr(comm)
    elastic_programs.works(new)
    new.close()
    with pytest.raises(unisono.UsageError, match="closed"):
        new.shrink()


def test_threads_cannot_shrink():
    def attempt(comm):
        with pytest.raises(unisono.UsageError, match="threads"):
            comm.shrink()
        with pytest.raises(unisono.UsageError, match="threads"):
            comm.grow(3)

    world(2).run(attempt)


def first_then_joining(first, hosts):
    """The environment of ranks: the last ones join."""

    def env_of(rank):
        return {"UNISONO_JOIN": "1"} if rank >= first else {}

    return ranks_on(hosts, env_of=env_of, init=False)


@pytest.mark.quick(hosts=[[1, 1, 2]])
@pytest.mark.parametrize("hosts", [4, [1, 1, 2]], ids=str)
def test_new_ranks_come_after_old_ones(hosts):
    plan = first_then_joining(2, hosts)
    with plan.start(elastic_programs.grows_or_joins, 2, 4) as running:
        living = survivors_of(running)
    assert [end.result[0] for end in living[:2]] == [0, 1]
    assert sorted(end.result[0] for end in living) == [0, 1, 2, 3]
    by_rank = sorted(living, key=lambda end: end.result[0])
    check(by_rank, 4, epoch=1)


@pytest.mark.quick(hosts=[[1, 2, 1]])
@pytest.mark.parametrize("hosts", [4, [1, 2, 1]], ids=str)
def test_world_without_its_first_rank_grows_again(hosts):
    plan = first_then_joining(3, hosts)
    with plan.start(elastic_programs.grows_or_joins, 3, 3, [0]) as running:
        living = survivors_of(running)
    check(living, 3, epoch=2)  # no rank was left out of the grown world


@pytest.mark.sweep
@pytest.mark.quick(hosts=[[2, 1]])
@pytest.mark.parametrize("hosts", [3, [2, 1]], ids=str)
def test_joining_process_that_dies_breaks_nothing(hosts):
    plan = first_then_joining(2, hosts)
    with plan.start(elastic_programs.a_newcomer_dies, 2, 3) as running:
        living = survivors_of(running)
    check(living, 2)


@pytest.mark.sweep
@pytest.mark.quick(hosts=[[1, 1]])
@pytest.mark.parametrize(
    ("hosts", "address", "why"),
    [
        (2, None, "0 of 1 processes joined within 0.5 s"),
        ([1, 1], None, "0 of 1 processes joined within 0.5 s to 127.0.0.1"),
        ([1, 1], "192.0.2.1:29400", "grow(address=host:port)"),
    ],
)
def test_grow_without_joining_processes_changes_nothing(hosts, address, why):
    with ranks_on(hosts).start(elastic_programs.nobody_joins, address) as running:
        living = survivors_of(running)
    for end in living:
        message, world = end.result
        assert why in message
        assert world[:3] == (end.rank, 2, 0)


@pytest.mark.quick(hosts=[[2, 1]])
@pytest.mark.parametrize(("hosts", "victim"), [(3, 0), ([2, 1], 2)])
def test_death_ends_the_wait_for_joining_processes(hosts, victim):
    run = elastic_programs.dies_while_others_wait_to_grow
    with ranks_on(hosts).start(run, victim) as running:
        living = survivors_of(running)
    for place, end in enumerate(living):
        assert end.result[0] == (victim,)
        assert end.result[1][:3] == (place, 2, 1)


def test_join_needs_a_job_and_no_rank(monkeypatch):
    monkeypatch.delenv("UNISONO_JOB", raising=False)
    with pytest.raises(unisono.BadArgument, match="which job"):
        unisono.init(join=True)
    with pytest.raises(unisono.BadArgument, match="leave them out"):
        unisono.init(0, 2, join=True)
    with pytest.raises(unisono.ConnectFailed, match=r"'nowhere' on this host.*grow"):
        unisono.init(join=True, job="nowhere", rendezvous_timeout_s=0.2)
    monkeypatch.setenv("UNISONO_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("UNISONO_JOIN", "1")
    with pytest.raises(unisono.ConnectFailed, match=r"at 127.0.0.1:1.*refused"):
        unisono.init(job="nowhere", rendezvous_timeout_s=0.2)


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
