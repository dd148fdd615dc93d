"""The choice of algorithm by where the ranks live: a pure function of what all know."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from unisono.algorithms.choices import FLAT, FLAT_OF_FEW, ON_TWO_LEVELS
from unisono.errors import BadArgument
from unisono.runtime.plan import predict
from unisono.runtime.plan.plans import lowered
from unisono.runtime.plan.select import AlgorithmChoice, choose
from unisono.schedule.collective import COLLECTIVES
from unisono.schedule.traffic import traffic
from unisono.testing import world

SEGMENTED = "double_tree:segments=8"
SIZES = [0, 8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 1 << 30]
TWO_BY_FOUR = (0, 0, 0, 0, 1, 1, 1, 1)
IN_TURN = (0, 1, 0, 1, 0, 1, 0, 1)
THIRTEEN = (0,) * 5 + (1,) * 4 + (2,) * 4
placements = st.lists(st.integers(0, 3), min_size=1, max_size=13)


def chosen(
    what: str, nbytes: int, hosts: tuple[int, ...] | range, **more: bool
) -> AlgorithmChoice:
    given_ = {"named": None, "reproducible": False, **more}
    return choose(what, nbytes, len(hosts), hosts=tuple(hosts), **given_)


@pytest.mark.quick(examples=[8])
@pytest.mark.parametrize("examples", [8, 40])
@pytest.mark.parametrize("what", COLLECTIVES)
def test_choice_and_runner_up_are_right(what, examples):
    @settings(max_examples=examples)
    @given(hosts=placements, nbytes=st.sampled_from(SIZES))
    def check(hosts, nbytes):
        check_choice(what, hosts, nbytes)

    check()


def check_choice(what, hosts, nbytes):
    found = chosen(what, nbytes, tuple(hosts))
    for name in (found.algorithm, found.runner_up):
        made = unisono.schedule(what, name, len(hosts))
        made.verify()
        if what == "all_reduce":
            assert made.consistency().same_bits_on_all_ranks
    assert found.algorithm != found.runner_up


@pytest.mark.parametrize("what", COLLECTIVES)
@pytest.mark.parametrize("n", [1, 2, 4, 9])
def test_one_host_choice_ignores_host_numbers(what, n):
    for nbytes in SIZES:
        alone = choose(what, nbytes, n, named=None, reproducible=False)
        assert alone == chosen(what, nbytes, (7,) * n)


@pytest.mark.parametrize("what", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("hosts", [TWO_BY_FOUR, IN_TURN, THIRTEEN, range(5)])
def test_reproducible_choice_ignores_placement(what, hosts):
    for nbytes in SIZES:
        found = chosen(what, nbytes, hosts, reproducible=True)
        assert lowered(what, found.algorithm, len(hosts), 0).canonical
        assert "rank order" in found.why


@pytest.mark.parametrize("what", COLLECTIVES)
def test_choice_depends_on_shared_hosts_not_numbers(what):
    for nbytes in SIZES:
        plain = chosen(what, nbytes, (0, 0, 1, 1))
        assert chosen(what, nbytes, (1 << 40, 1 << 40, 2, 2)) == plain


@pytest.mark.parametrize("what", COLLECTIVES)
def test_one_rank_per_host_is_not_hierarchical(what):
    for n in (2, 5, 8, 16):
        for nbytes in SIZES:
            found = chosen(what, nbytes, range(n)).algorithm
            assert found in FLAT[what] + FLAT_OF_FEW[what]


@pytest.mark.parametrize("hosts", [TWO_BY_FOUR, IN_TURN, THIRTEEN, (0, 0, 0, 0, 1)])
def test_all_reduce_on_shared_hosts_loads_links_least(hosts):
    num_hosts = len(set(hosts))
    for nbytes in (1 << 20, 16 << 20, 256 << 20):
        made = unisono.schedule(
            "all_reduce", chosen("all_reduce", nbytes, hosts).algorithm, len(hosts)
        )
        link = traffic(made, hosts)
        least = 2 * (num_hosts - 1) / num_hosts
        assert link.entering == pytest.approx([least] * num_hosts)
        assert link.leaving == pytest.approx([least] * num_hosts)


@pytest.mark.parametrize("hosts", [TWO_BY_FOUR, IN_TURN])
def test_two_hosts_of_four_are_predicted_to_come_near_their_links_limit(hosts):
    nbytes = 16 << 20
    link = nbytes * predict.MODEL.byte
    found = chosen("all_reduce", nbytes, hosts)
    name, _, segments = found.algorithm.partition(",segments=")
    expected = predict.predicted("all_reduce", name, int(segments), hosts, nbytes)
    assert link < expected < 1.35 * link
    flat = predict.predicted("all_reduce", "ring", 1, IN_TURN, nbytes)
    assert flat > 3 * expected


def test_large_calls_are_cut_so_that_the_levels_overlap():
    small, large = (chosen("all_reduce", size, IN_TURN) for size in (64, 64 << 20))
    assert "segments" not in small.algorithm
    assert "segments" in large.algorithm
    assert large.algorithm.startswith("hierarchical:hosts=0-1x4,by=direct/")


@pytest.mark.parametrize("what", COLLECTIVES)
def test_predicted_time_does_not_decrease_with_size(what):
    for hosts in (IN_TURN, THIRTEEN, tuple(range(6))):
        for name in FLAT[what]:
            times = [predict.predicted(what, name, 1, hosts, b) for b in SIZES]
            assert times == sorted(times)
            assert times[0] > 0
            assert what == "barrier" or times[-1] > times[0]


def test_one_rank_per_host_trades_bytes_for_steps():
    """Few steps while it is small, few bytes once it is large."""
    assert chosen("all_reduce", 8, range(3)).algorithm == "naive"
    assert chosen("all_reduce", 8, range(4)).algorithm == "naive"
    assert chosen("all_reduce", 8, range(8)).algorithm == "recursive_doubling"
    assert chosen("all_reduce", 256 << 10, range(4)).algorithm == "direct"
    assert chosen("all_reduce", 64 << 20, range(8)).algorithm == "ring"
    assert chosen("all_reduce", 64 << 20, range(13)).algorithm == "ring"
    assert chosen("broadcast", 8, range(8)).algorithm == "tree:radix=3"
    assert chosen("broadcast", 64 << 20, range(8)).algorithm == SEGMENTED


def test_choice_has_a_reason():
    assert chosen("all_reduce", 16 << 20, TWO_BY_FOUR).why.startswith(
        "2 hosts of 4 ranks, 16 MiB: share out inside, direct across, collect inside"
    )
    assert "add up inside" in chosen("all_reduce", 8, TWO_BY_FOUR).why
    assert "3 hosts of 5, 4 and 4 ranks" in chosen("broadcast", 8, THIRTEEN).why
    assert "6 hosts of 1 to 2 ranks" in chosen("gather", 8, (0, 0, *range(1, 6))).why
    assert "4 hosts of 1 rank," in chosen("all_gather", 8, range(4)).why
    assert "across, then naive inside" in chosen("broadcast", 8, IN_TURN).why
    assert "inside, then naive across" in chosen("reduce", 8, IN_TURN).why


def test_named_algorithm_is_chosen(monkeypatch):
    found = choose("all_reduce", 8, 8, named="ring", reproducible=False, hosts=IN_TURN)
    assert found.algorithm == "ring"
    monkeypatch.setenv("UNISONO_ALGORITHM", "swing")
    assert chosen("all_reduce", 8, IN_TURN).algorithm == "swing"
    assert chosen("all_reduce", 8, IN_TURN, reproducible=True).algorithm == "naive"
    monkeypatch.setenv("UNISONO_ALGORITHM", "hierarchical:levels=2x4")
    assert chosen("all_reduce", 8, IN_TURN).algorithm == "hierarchical:levels=2x4"


def test_wrong_number_of_hosts_is_refused():
    with pytest.raises(BadArgument, match="each of 3 ranks"):
        choose("all_reduce", 8, 3, named=None, reproducible=False, hosts=(0, 1))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hosts", [(0, 1, 0, 1, 1), (0, 0, 0, 0, 1), (0, 1, 2, 0, 1)])
def test_chosen_algorithm_runs(hosts):
    """On one host too, where it is only slower: the engine does not ask."""
    n, count = len(hosts), 40_000
    names = {
        (what, nbytes): chosen(what, nbytes, hosts).algorithm
        for what in ("all_reduce", "broadcast", "all_gather")
        for nbytes in (8, 16 << 20)
    }
    lists = ON_TWO_LEVELS, FLAT, FLAT_OF_FEW
    assert all(set(one) == set(COLLECTIVES) for one in lists)

    def run(comm):
        for (what, _), name in names.items():
            mine = np.full(count, comm.rank + 1.0)
            if what == "all_reduce":
                assert (comm.all_reduce(mine, algorithm=name) == n * (n + 1) / 2).all()
            elif what == "broadcast":
                for root in range(n):
                    got = comm.broadcast(mine.copy(), root=root, algorithm=name)
                    assert (got == root + 1).all()
            else:
                got = comm.all_gather(mine, algorithm=name)
                assert np.array_equal(
                    got.ravel(), np.repeat(np.arange(1.0, n + 1), count)
                )

    with world(n, timeout_s=100) as w:
        w.run(run)
