"""Old path of `Pipeline` and its `table`."""

from __future__ import annotations

import warnings

from unisono.parallel.model.pipeline import Pipeline
from unisono.parallel.model.pipeline_order import table

__all__ = ["Pipeline", "table"]

warnings.warn(
    "unisono.parallel.pipeline: import Pipeline from unisono.parallel, and table from "
    "unisono.parallel.model.pipeline_order",
    DeprecationWarning,
    stacklevel=2,
)
