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

import logging
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from unisono.errors import BadArgument, unknown

Plan = Mapping[str, Any]
Step = tuple[str, str, Any]
"""The name of a module, the pattern that matched it, and what is to be done."""
_LOG = logging.getLogger("unisono")
_WILD = frozenset("*?[")


def resolved(module: nn.Module, plan: Plan) -> Iterator[Step]:
    """Every module that the plan means, with what is to be done."""
    by: dict[tuple[str, type], str] = {}
    for pattern, told in plan.items():
        for style in told if isinstance(told, tuple) else (told,):
            _refuse_style(pattern, style)
            found = _matching(module, pattern)
            _refuse_many(pattern, style, found)
            for name in found:
                other = by.setdefault((name, type(style)), pattern)
                if other != pattern:
                    raise BadArgument(
                        f"parallelize: {name} is matched by {other!r} and by "
                        f"{pattern!r}, both for {type(style).__name__}; name it once"
                    )
                yield name, pattern, style


def _refuse_style(pattern: str, style: object) -> None:
    if not hasattr(style, "apply"):
        raise BadArgument(
            f"parallelize: the plan has {style!r} for {pattern!r}; expected Column(), "
            "Row(), Vocabulary(), Divide(...) or one of `sequence`"
        )


def _refuse_many(pattern: str, style: Any, found: list[str]) -> None:
    if getattr(style, "once", False) and len(found) > 1:
        raise BadArgument(
            f"parallelize: {pattern!r} matches {len(found)} modules, and {style} is "
            f"for one; name it, as {found[0]!r}"
        )


def tell(todo: list[Step], plan: Plan) -> None:
    """Log how many modules each pattern matches."""
    for pattern, style in plan.items():
        count = len({name for name, by, _ in todo if by == pattern})
        _LOG.info("parallelize: %r matches %d modules: %s", pattern, count, style)


def _matching(module: nn.Module, pattern: str) -> list[str]:
    """Names of the modules that the pattern means: at least one."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    found = [name for name in names if _fits(name, pattern)]
    if not found:
        raise unknown("module in the plan", pattern, [n for n in names if n])
    for i, component in enumerate(pattern.split(".")):
        if _WILD & set(component):
            _refuse_some(module, pattern, found, i)
    return found


def _fits(name: str, pattern: str) -> bool:
    if not name:  # the module itself, which only "" means
        return not pattern
    mine, wanted = name.split("."), pattern.split(".")
    return len(mine) == len(wanted) and all(map(fnmatchcase, mine, wanted))


def _refuse_some(module: nn.Module, pattern: str, found: list[str], i: int) -> None:
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
                f"parallelize: {pattern!r} matches {len(mine)} of {len(same)} modules "
                f"in {parent or 'the module'}, and leaves out {inside}{left[0]}, a "
                f"{kind} too; write * to match all, or name each module that is meant"
            )
