"""How the help of every verb shows options: no default where that is nothing."""

from __future__ import annotations

from cyclopts import Parameter


def _default(value: object) -> object:
    return value if value or (value == 0 and value is not False) else None


PARAMETER = Parameter(negative="", show_default=_default)
