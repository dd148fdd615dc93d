"""Which modules a plan matches: patterns of names, component by component.

    blocks.*          every direct child of blocks: 0, 1, ... 11
    blocks.*.mlp.0    the first layer of each one's mlp
    head              head

A component may have *, ? and [...] as file names do; none of them matches a dot. A
pattern that matches some members of a list and leaves out others of the same class
(`blocks.?` where there are twelve) is refused, since these would stay replicated
without notice. To match only some of them, name each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from unisono.errors import BadArgument, unknown

ParallelPlan = Mapping[str, Any]
PlanEntry = tuple[str, str, Any]
"""The name of a module, the pattern that matched it, and the style to apply."""
_LOG = logging.getLogger("unisono")
_WILD = frozenset("*?[")


def resolve_plan(module: nn.Module, plan: ParallelPlan) -> Iterator[PlanEntry]:
    """Every module that the plan matches, with the style to apply."""
    pattern_of: dict[tuple[str, type], str] = {}
    for pattern, styles in plan.items():
        for style in styles if isinstance(styles, tuple) else (styles,):
            _check_style(pattern, style)
            names = _matching(module, pattern)
            _check_single(pattern, style, names)
            for name in names:
                other = pattern_of.setdefault((name, type(style)), pattern)
                if other != pattern:
                    raise BadArgument(
                        f"parallelize: {name} is matched by {other!r} and by "
                        f"{pattern!r}, both for {type(style).__name__}; name it once"
                    )
                yield name, pattern, style


def _check_style(pattern: str, style: object) -> None:
    if not hasattr(style, "apply"):
        raise BadArgument(
            f"parallelize: the plan has {style!r} for {pattern!r}; expected Column(), "
            "Row(), Vocabulary(), Divide(...) or one of `sequence`"
        )


def _check_single(pattern: str, style: Any, names: list[str]) -> None:
    if getattr(style, "once", False) and len(names) > 1:
        raise BadArgument(
            f"parallelize: {pattern!r} matches {len(names)} modules, and {style} is "
            f"for one; name it, as {names[0]!r}"
        )


def log_matches(entries: list[PlanEntry], plan: ParallelPlan) -> None:
    """Log how many modules each pattern matches."""
    for pattern, style in plan.items():
        count = len({name for name, matched, _ in entries if matched == pattern})
        _LOG.info("parallelize: %r matches %d modules: %s", pattern, count, style)


def _matching(module: nn.Module, pattern: str) -> list[str]:
    """Names of the modules that the pattern matches: at least one."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    matching = [name for name in names if _fits(name, pattern)]
    if not matching:
        raise unknown("module in the plan", pattern, [n for n in names if n])
    for i, component in enumerate(pattern.split(".")):
        if _WILD & set(component):
            _check_siblings(module, pattern, matching, i)
    return matching


def _fits(name: str, pattern: str) -> bool:
    if not name:  # the module itself, which only "" matches
        return not pattern
    mine, wanted = name.split("."), pattern.split(".")
    return len(mine) == len(wanted) and all(map(fnmatchcase, mine, wanted))


def _check_siblings(
    module: nn.Module, pattern: str, matching: list[str], i: int
) -> None:
    """Raise if component i matches only some of numbered siblings of a class."""
    matched: dict[str, set[str]] = {}
    for name in matching:
        path = name.split(".")
        matched.setdefault(".".join(path[:i]), set()).add(path[i])
    for parent, chosen in matched.items():
        children = module.get_submodule(parent)._modules
        classes = {type(children[name]) for name in chosen}
        same = [name for name, child in children.items() if type(child) in classes]
        left = [name for name in same if name not in chosen]
        if left and all(name.isdigit() for name in children):
            kind, inside = (
                type(children[left[0]]).__name__,
                f"{parent}." if parent else "",
            )
            raise BadArgument(
                f"parallelize: {pattern!r} matches {len(chosen)} of {len(same)} "
                f"modules in {parent or 'the module'}, and leaves out "
                f"{inside}{left[0]}, a {kind} too; write * to match all, or name "
                "each module to be matched"
            )
