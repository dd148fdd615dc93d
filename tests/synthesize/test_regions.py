"""The bound of regions: the worst way to part the ranks, found without trying all."""

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path

import pytest

from unisono.simulate.conditions import Conditions, SimulatedWorld
from unisono.synthesize import synthesize
from unisono.synthesize.api import least_sum
from unisono.synthesize.flow import Capacities
from unisono.synthesize.network import Network
from unisono.synthesize.regions import region_rate
from unisono.topology import load, parse

BANDWIDTHS = (1, 2, 3, 5, 10, 40)


def _parted(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to part the items."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in _parted(rest):
        yield [[first], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [first, *part], *parts[i + 1 :]]


def _worst(graph: Capacities, n: int) -> Fraction:
    """By every way to part the ranks, and to put the switches in regions or none."""
    rates = []
    for parts in _parted(list(range(n))):
        if len(parts) == 1:
            continue
        ranks = {rank: i for i, part in enumerate(parts) for rank in part}
        where = [ranks[rank] for rank in range(n)]
        for switches in product(range(-1, len(parts)), repeat=len(graph) - n):
            region = [*where, *switches]
            enters = sum(
                much
                for a, row in enumerate(graph)
                for b, much in row.items()
                if region[b] not in (-1, region[a])
            )
            rates.append(Fraction(enters, len(parts) - 1))
    return min(rates)


def _network(seed: int, same_both_ways: bool) -> Network:
    """Ranks and switches on a tree of links, and some links more."""
    chance = random.Random(seed)
    n, switches = chance.randint(2, 6), chance.randint(0, 2)
    nodes = n + switches
    pairs = {(chance.randrange(b), b) for b in range(1, nodes)}
    pairs |= {p for p in combinations(range(nodes), 2) if chance.random() < 0.4}
    links = []
    for a, b in sorted(pairs):
        there = chance.choice(BANDWIDTHS)
        back = there if same_both_ways else chance.choice(BANDWIDTHS)
        links += [(a, b, there), (b, a, back)]
    src, dst, bandwidth = zip(*links, strict=True)
    apart = tuple(range(n)) + (-1,) * switches
    every = frozenset(range(len(links)))
    return Network("random", n, nodes, src, dst, bandwidth, {}, (apart,), every)


@pytest.mark.parametrize("seed", range(40))
def test_rate_is_that_of_the_worst_regions(seed: int) -> None:
    network = _network(seed, same_both_ways=True)
    assert region_rate(network) == _worst(network.whole_graph(), network.n)


@pytest.mark.parametrize("seed", range(40))
def test_rate_forbids_nothing_where_directions_differ(seed: int) -> None:
    """The regions found are regions, if not always the worst."""
    network = _network(seed, same_both_ways=False)
    found, graph = region_rate(network), network.whole_graph()
    apart = Fraction(
        sum(m for row in graph for b, m in row.items() if b < network.n), network.n - 1
    )
    assert _worst(graph, network.n) <= found <= apart


def test_relay_between_leaves_is_a_region_too() -> None:
    """A sum to the rank in the middle and back takes each link once in each way."""
    k = 5
    links = [(0, i) for i in range(1, k + 1)]
    src, dst = zip(*links, *((b, a) for a, b in links), strict=True)
    network = Network(
        "star", k + 1, k + 1, src, dst, (7,) * 2 * k, {}, ((*range(k + 1),),),
        frozenset(range(2 * k)),
    )  # fmt: skip
    assert region_rate(network) == 2 * 7


def test_islands_are_found_without_being_named(tmp_path: Path) -> None:
    """Four boxes in a ring, two cables between neighbours: the boxes decide."""
    inside = [p for p in combinations(range(16), 2) if p[0] // 4 == p[1] // 4]
    cables = [(i, (i + 2) % 16) for i in range(16) if i % 4 > 1]
    file = tmp_path / "boxes.toml"
    file.write_text(
        'ranks = 16\n[kinds.fast]\nlatency = "1us"\nbandwidth = "100GB/s"\n'
        '[kinds.cable]\nlatency = "1us"\nbandwidth = "20GB/s"\n'
        + "".join(_link(a, b, "fast") for a, b in inside)
        + "".join(_link(a, b, "cable") for a, b in cables)
    )
    made = synthesize("all_reduce", load(file))
    assert made.least == pytest.approx(2 * (4 - 1) / 4 / (2 * 2 * 20e9))
    assert made.optimum == pytest.approx(1.0)


def _link(a: int, b: int, kind: str) -> str:
    return f'[[links]]\nbetween = [[{a}], [{b}]]\nkind = "{kind}"\n'


@pytest.mark.parametrize("name", ["torus:4x4x4", "dgx-h100:8", "switch:64"])
def test_bound_of_64_ranks_is_that_of_ranks_by_themselves(name: str) -> None:
    network = Network.of(SimulatedWorld.of(parse(name), Conditions()))
    entering = network.whole_graph()
    least = min(sum(row[r] for row in entering if r in row) for r in range(64))
    assert least_sum(network) >= 2 * 63 / 64 / least * (1 - 1e-9)
