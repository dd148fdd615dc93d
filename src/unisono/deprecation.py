"""Old names: they work for one version more, and warn."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def warn_renamed(old: str, new: str, *, level: int = 3) -> None:
    """Warn that `old` is now `new`; `level` leads to the caller's line."""
    warnings.warn(
        f"{old} is now {new}; the old name goes with the next version",
        DeprecationWarning,
        stacklevel=level,
    )


def old_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for `module`, by which its old names still work, and warn."""

    def getattr_(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{renamed[name]}")
        return getattr(sys.modules[module], renamed[name])

    return getattr_


def renamed_method(old: str, method: Callable[P, T]) -> Callable[P, T]:
    """A method under its old name, which works and warns."""

    @wraps(method)
    def renamed(*args: P.args, **kwargs: P.kwargs) -> T:
        warn_renamed(old, method.__name__)
        return method(*args, **kwargs)

    renamed.__name__ = old
    renamed.__doc__ = f"The old name of `{method.__name__}`."
    return renamed
