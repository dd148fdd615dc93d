"""Which FSDP unit is used next: the one that followed in the pass before.

And units that are gathered early, before the pass that uses them begins: after the
optimizer's step, so that the first gather runs while the next batch is loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

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

    def expected(self, count: int) -> list[FSDPUnit]:
        """The units that the next pass is expected to use first."""
        return self._this_pass[:count]

    def record(self, unit: FSDPUnit) -> FSDPUnit | None:
        """Record a use; returns the unit that followed it in the last pass, if any."""
        self._this_pass.append(unit)
        i = len(self._this_pass)
        same = self._last_pass[i - 1 : i] == [unit]
        return self._last_pass[i] if same and i < len(self._last_pass) else None


class EarlyUnits:
    """Units that were gathered before a pass, and the values they were gathered of."""

    def __init__(self) -> None:
        """None are."""
        self._versions: dict[FSDPUnit, int] = {}

    def add(self, unit: FSDPUnit) -> None:
        """The unit is gathered now."""
        self._versions[unit] = _version(unit.shard)

    def valid(self, unit: FSDPUnit) -> bool:
        """Whether it is gathered early, and its shard has not changed since then."""
        return unit.unsharded and self._versions.get(unit) == _version(unit.shard)

    def clear(self) -> None:
        """A pass begins, which uses them."""
        self._versions.clear()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def after_each_step(params: Iterable[Tensor], call: Callable[[], None]) -> None:
    """Make this call after every step of an optimizer that has one of the parameters.

    `call` is a method; its object may end, and with it the calls.
    """
    method = weakref.WeakMethod(call)
    mine = {id(param) for param in params}

    def stepped(optimizer: Optimizer, args: Any, options: Any) -> None:
        bound = method()
        groups = optimizer.param_groups
        if bound and any(id(p) in mine for group in groups for p in group["params"]):
            bound()

    handle = register_optimizer_step_post_hook(stepped)
    weakref.finalize(call.__self__, handle.remove)  # type: ignore[attr-defined]
