"""Pipelines on our ranks: the losses and gradients that one process would get."""

import pytest
from pipelines import SCHEDULES, pipelined
from ranks import group


def on_the_cpu(rank, name):
    with group(rank):
        pipelined(rank, name, "cpu")


@pytest.mark.quick(n=[2], name=["GPipe", "1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_pipeline_schedules_equal_one_process(ranks, n, name):
    ranks(n, on_the_cpu, name)
