"""Error feedback: values that were not sent are sent later.

    wanted   = gradient + residual         what should be sent
    sent     = a part of it, or a coarse copy
    residual = wanted - sent               for the next step

With this, biased schemes (top-k, signs) converge as the uncompressed run does; without
it they need not. The residual is as large as the gradient, belongs to one
rank, and is saved with the optimizer's state.

Momentum correction: if the optimizer's momentum were applied to the received values,
elements that are sent later would miss the momentum of the steps before. So each rank
keeps the velocity of its own gradients here, and velocities are summed and kept:

    velocity = momentum · velocity + gradient
    wanted   = velocity + residual         both are zero again where it was sent

Values that are not finite have been sent to all; they are not kept, since they would
make all later steps not finite.

Seide et al., "1-bit stochastic gradient descent" (2014); Karimireddy et al., "Error
feedback fixes SignSGD" (2019); Lin et al., "Deep gradient compression" (2018).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.codecs.topk import Floats, Places

Memory = dict[str, NDArray[Any]]


class Feedback:
    """What one rank has not sent of one tensor; it is kept in `memory`, by name."""

    def __init__(self, memory: Memory, count: int, momentum: float = 0.0) -> None:
        """Nothing is left at first."""
        self._memory, self._momentum = memory, momentum
        memory["residual"] = np.zeros(count, np.float32)
        if momentum:
            memory["velocity"] = np.zeros(count, np.float32)

    @property
    def residual(self) -> Floats:
        """What waits."""
        return self._memory["residual"]

    def wanted(self, x: Floats) -> Floats:
        """What should be sent, with x added: all that was kept. Not a copy."""
        if self._momentum:
            velocity = self._memory["velocity"]
            velocity *= np.float32(self._momentum)
            velocity += x
            x = velocity
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, and will be sent
            residual = self.residual
            residual += x
        return residual

    def sent(self, places: Places) -> None:
        """These elements have been sent as they were."""
        self.residual[places] = 0
        if self._momentum:
            self._memory["velocity"][places] = 0
        self._forget()

    def sent_coarse(self, copy: Floats) -> None:
        """All have been sent, as this copy."""
        with np.errstate(invalid="ignore"):
            residual = self.residual
            residual -= copy
        self._forget()

    def _forget(self) -> None:
        for name in ("residual", "velocity"):
            kept = self._memory.get(name)
            if kept is not None and not np.isfinite(kept).all():
                np.copyto(kept, 0, where=~np.isfinite(kept))
