"""Which modules are FSDP units: by a rule, or chosen by hand.

A unit has the parameters below its module that no unit further down has. The remaining
parameters belong to the root unit, which is the module itself. A unit should be large
enough to fill a message, and small enough that two fit in memory: the layers of a
transformer are about right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import nn

from unisono.errors import BadArgument
from unisono.parallel.common.agreement import setup_together
from unisono.parallel.common.module_state import sync_module_state, trainable_parameters
from unisono.parallel.sharded.fsdp_unit import UnitParameter, refuse_mixed_types
from unisono.runtime.communicator import Communicator

UnitPolicy = (
    Callable[[str, nn.Module], bool] | Collection[type[nn.Module] | nn.Module] | None
)
UnitSpec = tuple[nn.Module, str, list[UnitParameter]]
"""A module that is a unit, its name, and its parameters."""


def split_into_units(module: nn.Module, policy: UnitPolicy) -> list[UnitSpec]:
    """The units of a module, the root first; those without parameters are left out."""
    trainable_parameters(module, "FSDP")  # refuses what cannot be sharded
    units = _unit_modules(module, policy)
    owner: dict[nn.Parameter, str] = {}
    params: dict[str, list[UnitParameter]] = {name: [] for name in units}
    known: dict[nn.Parameter, UnitParameter] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        unit = _unit_of(path, units)
        for name, param in part._parameters.items():
            if param is None:
                continue
            full = f"{path}.{name}" if path else name
            if param not in known:
                owner[param] = unit
                known[param] = UnitParameter(full, param, [])
                params[unit].append(known[param])
            elif owner[param] != unit:
                raise BadArgument(
                    f"FSDP: {full} in unit {unit or 'root'} is the same parameter as "
                    f"{known[param].name} in unit {owner[param] or 'root'}; units "
                    "cannot share parameters, so make one unit of both"
                )
            if (part, name) not in known[param].places:
                known[param].places.append((part, name))
    for name, members in params.items():
        refuse_mixed_types(name, members)
    return [(units[name], name, members) for name, members in params.items() if members]


def agree_on_units(
    module: nn.Module,
    policy: UnitPolicy,
    comm: Communicator,
    replicas: Communicator | None,
    settings: Sequence[str],
) -> list[UnitSpec]:
    """The same, checked to be the same on all ranks, with rank 0's parameters.

    `settings` are other arguments that must be the same on all ranks.
    """
    others = comm if replicas is None else replicas
    with setup_together(others, "FSDP"), setup_together(comm, "FSDP") as mine:
        units = split_into_units(module, policy)
        mine += [f"unit {name or 'root'}" for _, name, _ in units]
        mine += [*settings, "no replicas" if replicas is None else "replicas"]
    for ranks in (replicas, comm):
        if ranks is not None:
            sync_module_state(ranks, module, "FSDP")
    return units


def _unit_modules(module: nn.Module, policy: UnitPolicy) -> dict[str, nn.Module]:
    """The modules that are units by name, the root first."""
    named = dict(module.named_modules())
    if policy is None:
        lists = [n for n, m in named.items() if isinstance(m, nn.ModuleList)]
        inside = {
            f"{n}.{i}" if n else i for n in lists for i, _ in named[n].named_children()
        }
        chosen = [name for name in named if name in inside]
    elif callable(policy):
        chosen = [name for name, part in named.items() if policy(name, part)]
    else:
        chosen = _listed(named, list(policy))
    return {"": module} | {name: named[name] for name in chosen if name}


def _listed(named: dict[str, nn.Module], listed: list[object]) -> list[str]:
    """Names of the modules that are listed, or whose class is."""
    types = tuple(item for item in listed if isinstance(item, type))
    modules = [item for item in listed if isinstance(item, nn.Module)]
    if len(types) + len(modules) != len(listed):
        raise BadArgument(
            "FSDP: units: expected module classes, modules, or a function of (name, "
            f"module), got {[type(item).__name__ for item in listed]}"
        )
    for module in modules:
        if not any(module is part for part in named.values()):
            raise BadArgument(
                f"FSDP: units: a {type(module).__name__} is not a part of the module"
            )
    return [
        name
        for name, part in named.items()
        if isinstance(part, types) or any(part is m for m in modules)
    ]


def _unit_of(path: str, units: dict[str, nn.Module]) -> str:
    """The innermost unit that a module belongs to."""
    while path not in units:
        path = path.rpartition(".")[0]
    return path
