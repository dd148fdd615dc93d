"""Which parameters are gathered together: a module cut into units, by rule or by hand.

A unit has the parameters below its module that no unit further down has. What is left
over belongs to the module itself, the root. A unit should be large enough to fill a
message and small enough to hold two of: the layers of a transformer are about right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import nn

from unisono.errors import BadArgument
from unisono.parallel.common.agreement import prepared
from unisono.parallel.common.flat import same_start, trainable
from unisono.parallel.sharded.fsdp_unit import Member, refuse_mixed
from unisono.runtime.communicator import Communicator

Rule = Callable[[str, nn.Module], bool] | Collection[type[nn.Module] | nn.Module] | None
Part = tuple[nn.Module, str, list[Member]]


def partition(module: nn.Module, rule: Rule) -> list[Part]:
    """The modules that are units, with their names and parameters; the root first."""
    trainable(module, "FSDP")  # refuses what cannot be sharded
    chosen = _chosen(module, rule)
    owner: dict[nn.Parameter, str] = {}
    members: dict[str, list[Member]] = {name: [] for name in chosen}
    known: dict[nn.Parameter, Member] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        unit = _unit_of(path, chosen)
        for name, param in part._parameters.items():
            if param is None:
                continue
            full = f"{path}.{name}" if path else name
            if param not in known:
                owner[param] = unit
                known[param] = Member(full, param, [])
                members[unit].append(known[param])
            elif owner[param] != unit:
                raise BadArgument(
                    f"FSDP: {full} in unit {unit or 'root'} is the same parameter as "
                    f"{known[param].name} in unit {owner[param] or 'root'}; units "
                    "cannot share parameters, so make one unit of both"
                )
            if (part, name) not in known[param].places:
                known[param].places.append((part, name))
    for name, found in members.items():
        refuse_mixed(name, found)
    return [(chosen[name], name, found) for name, found in members.items() if found]


def agreed_partition(
    module: nn.Module,
    rule: Rule,
    comm: Communicator,
    replicas: Communicator | None,
    told: Sequence[str],
) -> list[Part]:
    """The same, once all ranks have made it alike, with the first rank's parameters.

    `told` is what else must be the same on all.
    """
    others = comm if replicas is None else replicas
    with prepared(others, "FSDP"), prepared(comm, "FSDP") as mine:
        parts = partition(module, rule)
        mine += [f"unit {name or 'root'}" for _, name, _ in parts]
        mine += [*told, "no replicas" if replicas is None else "replicas"]
    for ranks in (replicas, comm):
        if ranks is not None:
            same_start(ranks, module, "FSDP")
    return parts


def _chosen(module: nn.Module, rule: Rule) -> dict[str, nn.Module]:
    """The units by name, the root among them."""
    found = {"": module}
    named = dict(module.named_modules())
    if rule is None:
        lists = [n for n, m in named.items() if isinstance(m, nn.ModuleList)]
        inside = {
            f"{n}.{i}" if n else i for n in lists for i, _ in named[n].named_children()
        }
        picked = [name for name in named if name in inside]
    elif callable(rule):
        picked = [name for name, part in named.items() if rule(name, part)]
    else:
        types = tuple(t for t in rule if isinstance(t, type))
        parts = [p for p in rule if isinstance(p, nn.Module)]
        _refuse_strangers(parts, named, [*types, *parts], list(rule))
        picked = [
            name
            for name, part in named.items()
            if isinstance(part, types) or any(part is p for p in parts)
        ]
    found.update({name: named[name] for name in picked if name})
    return found


def _refuse_strangers(
    parts: list[nn.Module],
    named: dict[str, nn.Module],
    good: list[object],
    told: list[object],
) -> None:
    if len(good) != len(told):
        raise BadArgument(
            "FSDP: units: expected module classes, modules, or a function of (name, "
            f"module), got {[type(t).__name__ for t in told]}"
        )
    for part in parts:
        if not any(part is mine for mine in named.values()):
            raise BadArgument(
                f"FSDP: units: a {type(part).__name__} is not a part of the module"
            )


def _unit_of(path: str, chosen: dict[str, nn.Module]) -> str:
    """The innermost unit that a module belongs to."""
    while path not in chosen:
        path = path.rpartition(".")[0]
    return path
