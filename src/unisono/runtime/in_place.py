"""Arrays that collectives use in place: made so, or made so afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.runtime.call.registered import Registered
from unisono.runtime.call.shared_arrays import shared_array
from unisono.runtime.core import Core


class InPlaceArrays:
    """The part of a communicator that makes arrays accessible to all of its ranks."""

    core: Core

    def empty(
        self, shape: int | Sequence[int], dtype: Any = "float32", *, device: str = "cpu"
    ) -> Any:
        """An array in memory that all ranks can use: collectives on it copy nothing.

        Every rank makes its own. A NumPy array in shared memory, of which
        torch.from_numpy makes a tensor; or, with device="cuda" or "cuda:1", a
        `DeviceArray`, of which torch.as_tensor and cupy.asarray make theirs.
        """
        self.core.check_usable("empty")
        return shared_array(self.core.session, shape, dtype, device)

    def register(self, x: Any) -> Registered:
        """Make an array's memory such that collectives on it, or on parts, copy little.

        For arrays that others have allocated, and on each rank for itself: its pages
        are replaced by shared ones, its address and content stay. Nothing may write to
        it meanwhile. It ends with `unregister`, or when this communicator is closed;
        then the pages are private again. Memory that nobody else holds any more is kept
        until the next `register` or `unregister`. The result says whether calls use the
        array in place, and why.
        """
        self.core.check_usable("register")
        return self.core.registered.add(x)

    def unregister(self, x: Any) -> None:
        """Undo `register`. Calls in flight on the array may go on, as they began."""
        self.core.check_open("unregister")
        self.core.registered.remove(x)
