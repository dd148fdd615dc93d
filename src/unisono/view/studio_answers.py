"""Answers of the studio: choices, stories, costs, loads, trees, as plain data.

Everything is requested by name. Names of files are refused here, since a page of
another site could request them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from unisono.algorithms import schedule as make
from unisono.codecs import NAMES, get
from unisono.errors import BadArgument, BadTopology, NotOffered, unknown
from unisono.schedule.collective import (
    ALL_REDUCE,
    COLLECTIVES,
    REDUCE,
    REDUCE_SCATTER,
    collective,
)
from unisono.simulate import CodecModel, candidates, compare, simulate
from unisono.simulate.candidates import fitted
from unisono.synthesize.api import synthesize
from unisono.topology import Topology, parse
from unisono.units import format_bytes, parse_bytes
from unisono.view.frames import MAX_RANKS
from unisono.view.layout import route
from unisono.view.loads import loads
from unisono.view.story import Story, tell, topology_map

Parameters = Mapping[str, str]

PLAIN = "none"
SIZES = [1 << k for k in range(8, 31, 2)]
_MOST_RANKS = 512
_WORDS = ("collective", "algorithm", "beside", "n", "size", "topology", "codec")


def choices(parameters: Parameters) -> dict[str, object]:
    """What can be chosen, given a collective, a number of ranks and a topology."""
    asked = _asked(parameters, "collective", "n", "topology")
    what = collective(asked.get("collective", "all_reduce")).name
    n = _ranks(asked.get("n", "5"))
    offered = topologies(n)
    chosen = asked.get("topology", "")
    where = _topology(chosen) if chosen in offered else parse(offered[0])
    return {
        "collectives": {c.name: c.meaning for c in COLLECTIVES.values()},
        "algorithms": candidates(what, where),
        "topologies": offered,
        "codecs": [PLAIN, *NAMES],
        "most": MAX_RANKS,
    }


def topologies(n: int) -> list[str]:
    """Names of topologies that have just so many ranks."""
    names = [f"full:{n}", f"switch:{n}", f"ring:{n}"]
    sides = [side for side in range(2, isqrt(n) + 1) if n % side == 0]
    names += [f"torus:{side}x{n // side}" for side in sides]
    names += [f"cloud:{k}x{n // k}" for k in range(2, n) if n % k == 0]
    if n > 1:
        names.append(f"wan:{n}")
    for name, hold in (("dgx-h100", 8), ("dgx-a100", 8)):
        if n % hold == 0:
            names.append(f"{name}:{n // hold}")
    names += [f"fat-tree:{p}" for p in (2, 4) if p**3 // 4 == n]
    return names


def stories(parameters: Parameters) -> list[Story]:
    """One story, or two to be shown under one clock."""
    asked = _asked(parameters, *_WORDS)
    n = _ranks(asked.get("n", "5"))
    where = _topology(asked.get("topology") or f"full:{n}")
    size = parse_bytes(asked.get("size", "1M"))
    codec = _codec(asked.get("codec", PLAIN))
    what = asked.get("collective", "all_reduce")
    names = [asked.get("algorithm", "ring"), asked.get("beside", "")]
    return [
        tell(make(what, _name(fitted(name, where)), n), where, size, codec=codec)
        for name in names
        if name
    ]


def curves(parameters: Parameters) -> dict[str, object]:
    """The time of every algorithm over sizes, and where the fastest one changes."""
    asked = _asked(parameters, "collective", "topology", "codec")
    what = collective(asked.get("collective", "all_reduce")).name
    where = _topology(asked.get("topology", "full:5"))
    codec = _codec(asked.get("codec", PLAIN))
    options: dict[str, Any] = {} if codec.ratio == 1 else {"codec": codec}
    comparison = compare(what, candidates(what, where), where, SIZES, **options)
    winners = [comparison.ranking(at)[0].algorithm for at in range(len(SIZES))]
    return {
        "collective": what,
        "topology": where.name,
        "n": where.n,
        "sizes": SIZES,
        "bound": [r.bound * 1e6 for r in next(iter(comparison.results.values()))],
        "curves": [
            {"name": name, "times": [r.time * 1e6 for r in results]}
            for name, results in comparison.results.items()
        ],
        "winners": winners,
        "crossovers": [
            {"size": c.nbytes, "from": c.loser, "to": c.winner}
            for c in comparison.crossovers()
        ],
    }


def links(parameters: Parameters) -> dict[str, object]:
    """What each link has to do while a collective runs, and the topology."""
    words = ("collective", "algorithm", "n", "size", "topology", "codec")
    asked = _asked(parameters, *words)
    n = _ranks(asked.get("n", "5"))
    where = _topology(asked.get("topology") or f"full:{n}")
    name = _name(fitted(asked.get("algorithm", "ring"), where))
    schedule = make(asked.get("collective", "all_reduce"), name, n)
    size = parse_bytes(asked.get("size", "1M"))
    codec = _codec(asked.get("codec", PLAIN))
    result = simulate(schedule, where, size, codec=codec)
    return {
        "title": f"{schedule.title}, {format_bytes(size)}, on {where.name}",
        "time": result.time * 1e6,
        "links": loads(result),
        "all": len(where.wiring.links),
        "map": topology_map(where, (), schedule.root),
    }


def trees(parameters: Parameters) -> dict[str, object]:
    """The spanning trees that synthesis packs into a topology, or why there are none.

    Not every collective and topology has trees, and those can be chosen as well.
    """
    asked = _asked(parameters, "collective", "n", "topology")
    n = _ranks(asked.get("n", "5"))
    where = _topology(asked.get("topology") or f"full:{n}")
    what = collective(asked.get("collective", "all_reduce"))
    try:
        made = synthesize(what.name, where)
    except (NotOffered, BadTopology) as why:
        return {"trees": [], "why": str(why)}
    if not made.trees:
        paths = f"{what.name} is made of paths, not of trees"
        return {"trees": [], "why": paths if n > 1 else "one rank has nothing to send"}
    count = sum(tree.times for tree in made.trees)
    pairs = {pair for tree in made.trees for pair in tree.links}
    return {
        "title": f"{what.name} on {where.name}: {count} spanning trees, "
        f"{len(made.trees)} of them different",
        "why": "",
        "optimum": made.optimum,
        "up": what in (REDUCE, REDUCE_SCATTER),
        "both": what is ALL_REDUCE,
        "trees": [
            {
                "root": tree.root,
                "times": tree.times,
                "share": tree.times / count,
                "depth": max(tree.depths()),
                "links": tree.links,
            }
            for tree in made.trees
        ],
        "map": replace(
            topology_map(where, (), made.schedule.root),
            routes={f"{a}>{b}": route(where.wiring, a, b) for a, b in sorted(pairs)},
        ),
    }


def _asked(parameters: Parameters, *known: str) -> Parameters:
    for word in parameters:
        if word not in known:
            raise unknown("choice", word, known)
    return parameters


def _ranks(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_RANKS:
        raise BadArgument(f"n = {text}: expected 1 to {MAX_RANKS} ranks")
    return int(text)


def _name(text: str) -> str:
    """The name of an algorithm, and not that of a file."""
    if ".py" in text or "/" in text.partition(":")[0] or "\\" in text:
        raise BadArgument(f"{text}: the studio takes names of algorithms, not files")
    return text


def _topology(text: str) -> Topology:
    if text.endswith(".toml") or text == "this":
        raise BadArgument(f"{text}: the studio takes topologies as switch:8, not files")
    topology = parse(text)
    if topology.n > _MOST_RANKS:
        raise BadArgument(f"{text}: the studio takes up to {_MOST_RANKS} ranks")
    return topology


def _codec(name: str) -> CodecModel:
    """What a codec leaves of the bytes of float32; that it takes time is left out."""
    if name == PLAIN:
        return CodecModel()
    count = 1 << 16
    return CodecModel(ratio=get(name).nbytes(count) / (4 * count))
