"""torch's pipelines on a GPU that the ranks share: what one process gets."""

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import gpu_group, n, needs_gpu
from pipelines import SCHEDULES, pipelined

pytestmark = needs_gpu


def on_the_gpu(rank, name, which):
    with gpu_group(rank, adapter=which):
        pipelined(rank, name, "cuda")
        # Pipelines leave nothing behind that later calls could meet.
        x = torch.ones(1000, device="cuda")
        dist.all_reduce(x)
        assert x.unique().tolist() == [rank.n]


@pytest.mark.cases(12)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_equal_one_process(ranks, either_adapter, name):
    ranks(n, on_the_gpu, name, either_adapter)


def test_three_ranks_with_two_stages_each(ranks):
    ranks(3, on_the_gpu, "Interleaved1F1B", "python")


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
def test_between_hosts(forks, name):
    ends = forks.run(n, on_the_gpu, name, "python", hosts=(1, 1))
    assert [end.status for end in ends] == [0, 0], ends
