"""Which FSDP unit is used next: the one that followed in the pass before."""

from __future__ import annotations

from unisono.parallel.sharded.fsdp_unit import FSDPUnit


class UnitOrder:
    """The order in which units are used; it predicts the next one."""

    def __init__(self) -> None:
        """Nothing is known of the first pass."""
        self._last_pass: list[FSDPUnit] = []
        self._this_pass: list[FSDPUnit] = []

    def restart(self) -> None:
        """A pass begins."""
        self._last_pass, self._this_pass = self._this_pass, []

    def record(self, unit: FSDPUnit) -> FSDPUnit | None:
        """Record a use; returns the unit that followed it in the last pass, if any."""
        self._this_pass.append(unit)
        i = len(self._this_pass)
        same = self._last_pass[i - 1 : i] == [unit]
        return self._last_pass[i] if same and i < len(self._last_pass) else None
