"""Every way of asking for an algorithm that the tests of this folder go through.

A variant is a (collective, name) as people type it: all that the library holds as it
stands, and below that the parameters and pairs worth a test of their own.

Several collectives have the same parameters. `as_cases` makes a sweep of all but one of
each, for tests of what comes after an algorithm has made its steps.
"""

import pytest

from unisono.algorithms import library

PARAMETERS = {
    "parameter_server": ["sharded"],
    "tree": ["radix=3", "radix=4"],
    "butterfly": ["radix=3", "radix=4", "radix=64"],
    "bruck": ["radix=3", "radix=4", "radix=64"],
    "chain": ["segments=1", "segments=2", "segments=7"],
    "double_tree": ["segments=2", "segments=5"],
    "ring": ["both"],
    "direct": ["rotate"],
    "halving_doubling": ["blocks"],
    "dissemination": ["carry"],
    "rabenseifner": ["early=1", "early=2", "early=9"],
    "pat": ["aggregate=1", "aggregate=3"],
    "torus": ["shape=2x2x2", "shape=3x4x5", "shape=4x16", "shape=1x7", "shape=13"],
    "hierarchical": [
        "levels=4",
        "levels=4x3",
        "levels=2x4x3",
        "levels=5+4+4",
        "levels=1+6+2",
        "levels=2x5+4+4",
        "levels=2x2x2x2x2x2",
        "hosts=0-2x4",
        "hosts=0x4.1",
        "hosts=0.1x2.0x2.2",
        "segments=3",
        "segments=2,levels=4+1",
    ],
}

INSIDE_AND_ACROSS = {
    "broadcast": ["naive/chain", "double_tree"],
    "scatter": ["naive/tree", "tree:radix=3/direct"],
    "gather": ["direct/tree"],
    "reduce": ["chain/rabenseifner"],
    "all_gather": ["direct/ring", "circulant/pat"],
    "reduce_scatter": ["direct/circulant", "halving_doubling"],
    "all_reduce": ["direct/ring", "tree", "torus/recursive_doubling", "tree/circulant"],
    "all_to_all": ["bruck/direct", "ring"],
    "barrier": ["hierarchical/dissemination"],
}

PAIRS = {
    "all_reduce": [
        "ring+recursive_doubling",
        "direct:rotate+circulant",
        "pat+torus",
        "swing+butterfly:radix=4",
    ],
    "broadcast": ["tree+ring", "tree+circulant", "tree:radix=3+recursive_doubling"],
    "reduce": ["circulant+tree", "halving_doubling:blocks+naive"],
}


def _variants() -> list[tuple[str, str]]:
    found = list(library())
    for (what, name), algorithm in library().items():
        result = PARAMETERS.get(name, [])
        fitting = [
            text for text in result if text.partition("=")[0] in algorithm.params
        ]
        found += [(what, f"{name}:{text}") for text in fitting]
    for what, names in INSIDE_AND_ACROSS.items():
        found += [(what, f"hierarchical:by={by}") for by in names]
    for what, names in PAIRS.items():
        found += [(what, pair) for pair in names]
    return found


VARIANTS = _variants()


def _one_of_each() -> set[tuple[str, str]]:
    """All of the library, and for each name with parameters one collective in turn."""
    having: dict[str, list[str]] = {}
    for what, name in VARIANTS:
        having.setdefault(name, []).append(what)
    names = [name for name in having if ":" in name or "+" in name]
    turns = {
        (having[name][i % len(having[name])], name) for i, name in enumerate(names)
    }
    return turns | set(library())


QUICK = _one_of_each()


def as_cases(variants: list[tuple[str, str]]) -> list:
    """Parameters for pytest: those that are not among the quick ones are sweeps."""
    return [
        v if v in QUICK else pytest.param(*v, marks=pytest.mark.sweep) for v in variants
    ]
