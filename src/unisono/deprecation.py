"""Old names: they work for one version more, and warn."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str, *, level: int = 3) -> None:
    """Warn that `old` is now `new`; `level` leads to the caller's line."""
    warnings.warn(
        f"{old} is now {new}; the old name goes with the next version",
        DeprecationWarning,
        stacklevel=level,
    )
