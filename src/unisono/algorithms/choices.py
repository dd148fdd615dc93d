"""The one list of candidates, by the placement of the ranks on hosts.

    candidates      all names that can win: tuning races them, the simulator, the
                    studio and synthesis compare with them
    chosen_from     of these, what the runtime chooses from without a table: it
                    predicts their times at a first call, so there are few
    can_be_made     whether a name has a schedule for so many ranks

So whatever the runtime chooses, with a table or without, is simulated under the same
name. Algorithms of installed packages are in the list as the library has them, those
of files are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.algorithms.hierarchical import telling
from unisono.algorithms.library import library, schedule
from unisono.algorithms.registry import Algorithm, Param
from unisono.errors import UsageError
from unisono.schedule.schedule import Schedule

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
"""The candidates where every rank has a host of its own, and where ranks are few."""

_WIDER_TREES = "tree:radix=3", "tree:radix=4"

FLAT_OF_FEW = {
    "broadcast": _WIDER_TREES,
    "reduce": _WIDER_TREES,
    "scatter": _WIDER_TREES,
    "gather": _WIDER_TREES,
    "all_gather": ("ring:both", "butterfly:radix=4"),
    "reduce_scatter": ("ring:both", "torus", "butterfly:radix=4"),
    "all_reduce": ("torus", "ring:both"),
    "all_to_all": ("bruck:radix=3",),
    "barrier": (),
}
"""More of them, where ranks on several hosts are at most `MOST_FLAT`."""

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


TRIED: dict[str, tuple[int, ...]] = {"segments": SEGMENTS, "radix": (2, 3, 4, 8)}
"""Values that are tried of parameters with these names."""
MOST_SPLITS = 2
"""How many ways to cut the ranks of one host into groups are tried."""
MOST_FLAT = 64
"""Up to so many ranks that share hosts flat algorithms are chosen from as well: they
win where the network is about as fast as memory."""
MOST_VARIED = 128
"""Of more ranks, what the runtime does not choose from is listed as it is written, not
with all parameters."""


def candidates(
    collective: str, hosts: tuple[int, ...], files: Sequence[str] = ()
) -> list[str]:
    """All that can win a collective of ranks on these hosts, each name once.

    Of any number of ranks, those that the runtime chooses from by a model come first,
    then those that it chooses from by rules. Whether a schedule can be made is not
    asked: see `can_be_made`. `files` are names of algorithms in files.
    """
    chosen = [spelled(*choice) for choice in chosen_from(collective, hosts)]
    names = dict.fromkeys([*chosen, *FLAT[collective]])
    names |= dict.fromkeys(_of_the_library(collective, hosts))
    if len(hosts) <= MOST_VARIED:
        names |= dict.fromkeys(_hierarchies(collective, hosts))
    return list(names | dict.fromkeys(files))


def can_be_made(collective: str, name: str, n: int) -> Schedule | None:
    """The schedule of a name for n ranks; None if there is none."""
    try:
        return schedule(collective, name, n)
    except UsageError:
        return None


def _of_the_library(collective: str, hosts: tuple[int, ...]) -> Iterator[str]:
    n = len(hosts)
    for (what, name), algorithm in library().items():
        if what != collective:
            continue
        if name == "hierarchical" and 1 < len(set(hosts)) < n:
            yield f"{name}:{telling(hosts)}"
            continue
        for params in _variants(algorithm, n):
            if algorithm.supports(n, **{**algorithm.params, **params}):
                yield algorithm.spelled(**params)


def _variants(algorithm: Algorithm, n: int) -> Iterator[dict[str, Param]]:
    yield from algorithm.variants
    if n > MOST_VARIED or algorithm.name == "hierarchical":
        return
    for key, values in TRIED.items():
        if key in algorithm.params:
            usual = algorithm.params[key]
            for value in values:
                if value != usual:
                    yield {key: value}


def _hierarchies(collective: str, hosts: tuple[int, ...]) -> Iterator[str]:
    """On one host: the ranks cut into groups in a few ways."""
    n = len(hosts)
    if len(set(hosts)) > 1:
        return
    inner = [g for g in range(2, n) if n % g == 0]
    inner.sort(key=lambda g: abs(g * g - n))  # about as many groups as each has ranks
    for g in inner[:MOST_SPLITS]:
        for by in ON_TWO_LEVELS[collective]:
            for cut in _cuts(collective):
                yield spelled(f"hierarchical:levels={g}x{n // g},by={by}", cut)


def _cuts(collective: str) -> tuple[int, ...]:
    return (1,) if collective in ("all_to_all", "barrier") else SEGMENTS


def chosen_from(collective: str, hosts: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Algorithms and their numbers of segments, for ranks on these hosts.

    On one host the runtime reads memory in place, by some of the flat ones.
    """
    n, num_hosts = len(hosts), len(set(hosts))
    if 1 < num_hosts < n:
        yield from on_two_levels(hosts, ON_TWO_LEVELS[collective], _cuts(collective))
    if n <= MOST_FLAT or num_hosts in (1, n):
        yield from ((algorithm, 1) for algorithm in FLAT[collective])
    elif collective in ("all_to_all", "scatter", "gather"):
        yield "direct", 1
    if n <= MOST_FLAT and num_hosts > 1:
        for algorithm in FLAT_OF_FEW[collective]:
            if can_be_made(collective, algorithm, n) is not None:
                yield algorithm, 1


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
