"""The options `codec=` and `coded=` of a call, together."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.codecs import Codec
from unisono.schedule.coding import Scope


@dataclass(frozen=True)
class Coding:
    """A codec, and the ranks between which values are sent encoded."""

    codec: Codec
    scope: Scope = Scope.ALL

    def __str__(self) -> str:
        """As in "fp8" or "fp8@hosts"."""
        return f"{self.codec}@hosts" if self.scope is Scope.HOSTS else f"{self.codec}"
