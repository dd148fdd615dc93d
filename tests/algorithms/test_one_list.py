"""The runtime, tuning, the simulator and predictions choose from one list."""

from textwrap import dedent

import numpy as np
import pytest

from unisono.algorithms import choices
from unisono.errors import UsageError
from unisono.runtime.plan.select import choose
from unisono.schedule.collective import COLLECTIVES
from unisono.simulate.candidates import candidates as simulated
from unisono.simulate.candidates import listed
from unisono.simulate.groups import USUAL, EqualGroups
from unisono.topology import parse
from unisono.tune import candidates as raced

TOPOLOGIES = ["switch:5", "wan:3", "wan:8", "cloud:3x2", "cloud:2x4", "torus:3x3"]

FILE = """
    from unisono.algorithms import algorithm
    from unisono.schedule import copy_step


    @algorithm
    def broadcast(n):
        for r in range(1, n):
            yield copy_step(0, 0, r)
    """


@pytest.mark.cases(3)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_runtime_tuning_simulator_and_predictions_have_one_list(collective, topology):
    where = parse(topology)
    hosts = tuple(where.wiring.host.tolist())
    one = choices.candidates(collective, hosts)
    made = [n for n in one if choices.can_be_made(collective, n, where.n)]
    assert len(set(one)) == len(one)
    assert simulated(collective, where) == made
    tuned = raced(collective, hosts)
    assert [name for name in made if name in tuned] == tuned
    chosen = [choices.spelled(*c) for c in choices.chosen_from(collective, hosts)]
    assert one[: len(chosen)] == chosen
    groups = EqualGroups(where, np.arange(where.n)[None])
    assert set(groups.names(collective)) <= set(one)
    assert set(groups.names(collective)) >= set(chosen) & set(made)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_few_ranks_that_share_hosts_choose_from_flat_ones_as_well(collective):
    few, many = (
        [name for name, _ in choices.chosen_from(collective, (*(0, 1) * half,))]
        for half in (choices.MOST_FLAT // 2, choices.MOST_FLAT // 2 + 1)
    )
    assert set(choices.FLAT[collective]) <= set(few)
    assert set(few) & set(choices.FLAT_OF_FEW[collective]) or collective == "barrier"
    flat = [name for name in many if not name.startswith("hierarchical")]
    assert set(flat) <= {"direct"}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_whatever_is_chosen_is_simulated_under_that_name(collective, topology):
    where = parse(topology)
    known = simulated(collective, where)
    hosts = tuple(where.wiring.host.tolist())
    ask = {"n": where.n, "named": None, "hosts": hosts}
    for nbytes in (8, 4 << 10, 64 << 10, 1 << 20, 64 << 20):
        for reproducible in (True, False):
            found = choose(collective, nbytes, **ask, reproducible=reproducible)
            assert found.algorithm in known
            assert not found.runner_up or found.runner_up in known


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("topology", ["dgx-h100:32", "cloud:64x4", "wan:200"])
def test_large_worlds_begin_with_what_the_runtime_chooses_from(topology, collective):
    hosts = tuple(parse(topology).wiring.host.tolist())
    chosen = [choices.spelled(*c) for c in choices.chosen_from(collective, hosts)]
    names = choices.candidates(collective, hosts)
    assert chosen
    assert names[: len(chosen)] == chosen
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("topology", ["dgx-h100:32", "switch:200"])
def test_large_worlds_list_all_else_as_it_is_written(topology):
    hosts = tuple(parse(topology).wiring.host.tolist())
    chosen = [name for name, _ in choices.chosen_from("all_reduce", hosts)]
    names = choices.candidates("all_reduce", hosts)
    names = [name for name in names if name.partition(",seg")[0] not in chosen]
    names = [name for name in names if name not in choices.FLAT["all_reduce"]]
    assert "swing" in names
    assert not any("segments=" in name for name in names)
    assert sum(name.startswith("hierarchical") for name in names) <= 1


def test_groups_of_every_collective_have_a_time():
    where = parse("cloud:2x2")
    for collective in COLLECTIVES:
        groups = EqualGroups(where, np.arange(4)[None])
        seconds, name = groups.time(collective, 4096)
        assert seconds > 0
        assert name in simulated(collective, where)
    assert set(USUAL) < set(COLLECTIVES)


def test_a_file_is_compared_with_all(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(dedent(FILE))
    where = parse("switch:4")
    names = listed(f"all,{path}", "broadcast", where)
    assert names == [*simulated("broadcast", where), str(path)]
    with pytest.raises(UsageError, match="mine"):
        listed(f"all,{path}", "all_reduce", where)
    with pytest.raises(UsageError, match="nothing"):
        listed("all,nothing", "broadcast", where)
