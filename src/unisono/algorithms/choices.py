"""Which algorithms are chosen from unasked, by the placement of the ranks on hosts.

The runtime predicts their times and takes the quickest; tuning races them and others;
the simulator and the studio list them among all, so that what would be run is
simulated.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.algorithms.hierarchical import telling

_IN_SEGMENTS = "chain:segments=8", "double_tree:segments=8"

FLAT = {
    "broadcast": ("naive", "tree", "direct+direct", "chain", *_IN_SEGMENTS),
    "reduce": ("naive", "tree", "direct+direct", "chain", *_IN_SEGMENTS),
    "scatter": ("direct", "tree"),
    "gather": ("direct", "tree"),
    "all_gather": ("direct", "recursive_doubling", "ring"),
    "reduce_scatter": ("direct", "halving_doubling", "ring"),
    "all_reduce": (
        *("naive", "recursive_doubling", "direct", "rabenseifner", "ring"),
        "double_tree:segments=8",
    ),
    "all_to_all": ("direct", "direct:rotate", "bruck"),
    "barrier": ("direct", "dissemination"),
}
"""The candidates where every rank has a host of its own."""

ON_TWO_LEVELS = {
    "broadcast": ("naive/naive", "naive/tree", "naive/chain:segments=1"),
    "reduce": ("naive/naive", "naive/tree", "naive/chain:segments=1"),
    "scatter": ("direct/direct", "direct/tree"),
    "gather": ("direct/direct", "direct/tree"),
    "all_gather": ("direct/direct", "direct/recursive_doubling", "direct/ring"),
    "reduce_scatter": ("direct/direct", "direct/halving_doubling", "direct/ring"),
    "all_reduce": (
        "naive/naive",
        "naive/recursive_doubling",
        "direct/direct",
        "direct/rabenseifner",
        "direct/ring",
    ),
    "all_to_all": ("direct/direct", "direct/direct:rotate"),
    "barrier": ("direct/direct", "direct/dissemination"),
}
"""The candidates where hosts have several ranks: inside a host / across hosts."""

SEGMENTS = 1, 2, 4, 8
"""Numbers of segments of a call across hosts; all_to_all and barrier have one."""


def chosen_from(collective: str, hosts: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Algorithms and their numbers of segments, for ranks on these hosts.

    On one host the runtime reads memory in place, by some of the flat ones.
    """
    if len(set(hosts)) in (1, len(hosts)):
        yield from ((algorithm, 1) for algorithm in FLAT[collective])
        return
    cuts = (1,) if collective in ("all_to_all", "barrier") else SEGMENTS
    yield from on_two_levels(hosts, ON_TWO_LEVELS[collective], cuts)
    if collective in ("all_to_all", "scatter", "gather"):
        yield "direct", 1


def on_two_levels(
    hosts: tuple[int, ...], some: tuple[str, ...], cuts: tuple[int, ...] = SEGMENTS
) -> Iterator[tuple[str, int]]:
    """Hierarchies for these hosts, by some algorithms, in so many segments."""
    placement = telling(hosts)
    for by in some:
        yield from ((f"hierarchical:{placement},by={by}", cut) for cut in cuts)


def spelled(algorithm: str, segments: int) -> str:
    """The name with its segments."""
    return algorithm if segments == 1 else f"{algorithm},segments={segments}"
