"""Trees that share links: as many as were planned, none carrying more than it can.

Trees grow from their roots. Simple rules are tried first, which do not look ahead: near
to the root, over the links with most left, over the widest links. Their trees stay if
all that are still to come fit into what they leave; if not, fewer are tried at once.
Where no simple tree fits, one grows a link at a time, and each link is taken only if
the others still fit then; a flow tells for how many equal trees at once. By Edmonds'
theorem there is always such a link, so this ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from unisono.errors import UnisonoError
from unisono.synthesize.flow import Capacities, Flow, feasible


@dataclass(frozen=True)
class Tree:
    """`times` equal trees: the links from parent to child, parents first."""

    root: int
    times: int
    links: tuple[tuple[int, int], ...]

    def depths(self) -> list[int]:
        """For each link, how many links from the root its child is."""
        depth = {self.root: 0}
        for parent, child in self.links:
            depth[child] = depth[parent] + 1
        return [depth[child] for _, child in self.links]


def pack(graph: Capacities, weights: list[int]) -> list[Tree]:
    """`weights[i]` spanning trees from each root i, together within the capacities."""
    left = [dict(row) for row in graph]
    waiting = list(weights)
    trees: list[Tree] = []
    batch = sum(weights)
    while any(waiting):
        batch = min(batch, sum(waiting))
        some = _simple(left, waiting, graph, batch)
        if some:
            trees += some
            batch *= 2
        elif batch > 1:
            batch //= 4
        else:
            root = next(r for r, much in enumerate(waiting) if much)
            trees.append(_grow(left, waiting, root))
        batch = max(batch, 1)
    return sorted(trees, key=lambda tree: tree.root)


Rule = Callable[[int, float, int], tuple[float, ...]]
"""From depth, share that is left, and class of width of a link to its place."""

_RULES: tuple[Rule, ...] = (
    lambda depth, left, width: (-width, depth, -left),
    lambda depth, left, width: (depth, -left, -width),
    lambda depth, left, width: (-left, depth, -width),
)


def _simple(
    left: Capacities, waiting: list[int], whole: Capacities, batch: int
) -> list[Tree]:
    """Up to `batch` trees found without looking ahead, if the others fit beside."""
    for rule in _RULES:
        now, still = [dict(row) for row in left], list(waiting)
        trees = _greedy(now, still, whole, batch, rule)
        if trees and feasible(now, still):
            left[:], waiting[:] = now, still
            return trees
    return []


def _greedy(
    left: Capacities, waiting: list[int], whole: Capacities, batch: int, rule: Rule
) -> list[Tree]:
    """Trees by one rule, taken from what is left; none if a tree finds no links."""
    trees: list[Tree] = []
    while batch > 0 and any(waiting):
        for root in [r for r, much in enumerate(waiting) if much]:
            times = waiting[root]
            links = _spanning(left, root, times, whole, rule)
            while not links and times > 1:
                times //= 2
                links = _spanning(left, root, times, whole, rule)
            if not links:
                return []
            for a, b in links:
                _take(left, a, b, times)
            waiting[root] -= times
            trees.append(Tree(root, times, tuple(links)))
            batch -= times
            if batch <= 0:
                break
    return trees


def _spanning(
    left: Capacities, root: int, times: int, whole: Capacities, rule: Rule
) -> list[tuple[int, int]]:
    """Links that reach all ranks, the first by `rule` first; none if they do not."""
    depth = {root: 0}
    links: list[tuple[int, int]] = []
    queue: list[tuple[tuple[float, ...], int, int]] = []

    def offer(parent: int) -> None:
        for child, much in left[parent].items():
            if much >= times and child not in depth:
                width = whole[parent][child]
                key = rule(depth[parent], much / width, width.bit_length() // 2)
                heapq.heappush(queue, (key, parent, child))

    offer(root)
    while queue:
        _, parent, child = heapq.heappop(queue)
        if child not in depth:
            depth[child] = depth[parent] + 1
            links.append((parent, child))
            offer(child)
    return links if len(depth) == len(left) else []


def _grow(left: Capacities, waiting: list[int], root: int) -> Tree:
    """One tree, as many times as its links allow; takes them from what is left."""
    times = waiting[root]
    waiting[root] = 0
    inside = [root]
    links: list[tuple[int, int]] = []
    missing = set(range(len(waiting))) - {root}
    refused: set[tuple[int, int]] = set()
    while missing:
        found = _next_link(left, waiting, inside, missing, refused, times)
        if found is None:
            raise UnisonoError(
                f"synthesis: no link for the tree of rank {root}, though all trees "
                "fit; please report this"
            )
        parent, child, much = found
        if much < times:  # fewer of this tree: give back what the others took
            for a, b in links:
                left[a][b] = left[a].get(b, 0) + times - much
            waiting[root] += times - much
            times = much
        _take(left, parent, child, times)
        links.append((parent, child))
        inside.append(child)
        missing.remove(child)
    return Tree(root, times, tuple(links))


def _take(left: Capacities, a: int, b: int, much: int) -> None:
    left[a][b] -= much
    if not left[a][b]:
        del left[a][b]


def _next_link(
    left: Capacities,
    waiting: list[int],
    inside: list[int],
    missing: set[int],
    refused: set[tuple[int, int]],
    times: int,
) -> tuple[int, int, int] | None:
    """A link that the tree may take, near its root; and how many times."""
    for parent in inside:
        row = left[parent]
        children = sorted(missing & row.keys(), key=lambda c: -row[c])
        for child in children:
            if (parent, child) in refused:
                continue
            much = _spare(left, waiting, parent, child, min(times, row[child]))
            if much:
                return parent, child, much
            refused.add((parent, child))
    return None


def _spare(
    left: Capacities, waiting: list[int], parent: int, child: int, most: int
) -> int:
    """How many times the link can be taken so that the waiting trees still fit."""
    needed = sum(waiting)
    if not needed:
        return most
    row = dict(left[parent])
    for rank, much in enumerate(waiting):
        if much and rank != parent:
            row[rank] = row.get(rank, 0) + much
    graph = left.copy()
    graph[parent] = row
    return max(0, Flow(graph, parent, child, needed + most).value - needed)
