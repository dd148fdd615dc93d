"""Column-parallel layers of one module that get the same input communicate once for it.

Queries, keys and values are often three layers on one input, as are the two of a gated
MLP. Each would prepare its input by itself, which costs an all_reduce of its gradient
in backward, or with a sharded sequence an all_gather in forward. The first of them
prepares it, and the others take the same tensor: autograd adds up their gradients
before they are communicated.

The prepared input is kept until the module that contains the layers has computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SharedInput:
    """The last input of several layers, and what was prepared from it."""

    def __init__(self) -> None:
        """Nothing is prepared."""
        self._input: Tensor | None = None
        self._prepared: Tensor | None = None
        self._state = (0, False)

    def prepare(self, x: Tensor, prepare: Callable[[Tensor], Tensor]) -> Tensor:
        """What was prepared from x before, if x is unchanged, or prepare(x)."""
        state = (0 if x.is_inference() else x._version, torch.is_grad_enabled())
        if self._prepared is None or self._input is not x or self._state != state:
            self._input, self._prepared, self._state = x, prepare(x), state
        return self._prepared

    def clear(self, *_: Any) -> None:
        """The module has computed: keep no activations."""
        self._input = self._prepared = None
