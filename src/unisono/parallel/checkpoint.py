"""Old path of `save_checkpoint` and `load_checkpoint`."""

from __future__ import annotations

import warnings

from unisono.parallel.common.checkpoint import load_checkpoint as load
from unisono.parallel.common.checkpoint import save_checkpoint as save

__all__ = ["load", "save"]

warnings.warn(
    "unisono.parallel.checkpoint: import save_checkpoint and load_checkpoint from "
    "unisono.parallel",
    DeprecationWarning,
    stacklevel=2,
)
