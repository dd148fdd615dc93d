"""What was published of Llama 3 405B, on 8,192 simulated GPUs."""

import pytest

from unisono.parallel.estimate import Axes
from unisono.search import Limits, search

AXES = Axes(dp=64, tp=8, pp=16)
"""Llama 3 405B on 8,192 H100, 43 % of the peak (Llama Team, 2024, table 4)."""


@pytest.mark.sweep
def test_llamas_choice_is_found_with_its_throughput():
    how = {"batch": 2048, "sequence": 8192, "limits": Limits({"cp": 1, "tp": 8})}
    found = search("405B", "dgx-h100:1024", **how, top=6)
    published = found.on(AXES)
    assert published.time <= 1.05 * found.best.time
    assert found.utilisation(published) == pytest.approx(0.43, rel=0.06)
