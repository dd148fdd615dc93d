"""What a communicator asks of a world that can change its size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ResizableWorld(Protocol):
    """A world that can shrink and grow; see `runtime.world.membership`."""

    def shrink(self, comm: Any, timeout_s: float, dead: Sequence[int]) -> Any:
        """The communicator of the surviving ranks."""

    def grow(
        self, comm: Any, world_size: int, timeout_s: float, address: str | None
    ) -> Any:
        """The communicator of these ranks and those that join."""

    def release(self) -> None:
        """Close the endpoints of earlier worlds."""
