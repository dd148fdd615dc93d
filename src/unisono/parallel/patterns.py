"""Which modules a plan means: patterns of names, matched one path component at a time.

    blocks.*          every direct child of blocks: 0, 1, ... 11
    blocks.*.mlp.0    the first layer of each one's mlp
    head              head

A component may have *, ? and [...] as file names do; none of them matches a dot. A
pattern that matches some members of a list and leaves out others of the same class
(`blocks.?` where there are twelve) is refused, since these would stay whole without a
word. Who means only some of them names each.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from unisono.errors import BadArgument, unknown

_WILD = frozenset("*?[")


def matching(module: nn.Module, pattern: str, where: str) -> list[str]:
    """Names of the modules that the pattern means: at least one."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    found = [name for name in names if _fits(name, pattern)]
    if not found:
        raise unknown("module in the plan", pattern, [n for n in names if n])
    for i, component in enumerate(pattern.split(".")):
        if _WILD & set(component):
            _refuse_some(module, pattern, found, i, where)
    return found


def _fits(name: str, pattern: str) -> bool:
    if not name:  # the module itself, which only "" means
        return not pattern
    mine, wanted = name.split("."), pattern.split(".")
    return len(mine) == len(wanted) and all(map(fnmatchcase, mine, wanted))


def _refuse_some(
    module: nn.Module, pattern: str, found: list[str], i: int, where: str
) -> None:
    """Raise if component i matches only some of numbered siblings of a class."""
    met: dict[str, set[str]] = {}
    for name in found:
        path = name.split(".")
        met.setdefault(".".join(path[:i]), set()).add(path[i])
    for parent, mine in met.items():
        every = module.get_submodule(parent)._modules
        alike = {type(every[name]) for name in mine}
        same = [name for name, child in every.items() if type(child) in alike]
        left = [name for name in same if name not in mine]
        if left and all(name.isdigit() for name in every):
            kind, inside = type(every[left[0]]).__name__, f"{parent}." if parent else ""
            raise BadArgument(
                f"{where}: {pattern!r} matches {len(mine)} of {len(same)} modules in "
                f"{parent or 'the module'}, and leaves out {inside}{left[0]}, a {kind} "
                "too; write * to match all, or name each module that is meant"
            )
