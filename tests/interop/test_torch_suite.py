"""Some of torch's own tests at three ranks; `make torch-suite` runs all there are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# It runs once for all of them.
pytestmark = [pytest.mark.timeout(600), pytest.mark.sweep]

SUITE = Path(__file__).with_name("torch_suite.py")
SOME = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_product",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_min",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_equal_split_full_group",
    "test_all_to_all_single_unequal_split_complex",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_full_group",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_gather_checks",
    "test_get_future",
    "test_get_rank_size_group",
    "test_irecv",
    "test_monitored_barrier_gloo_subgroup",
    "test_reduce_sum_twice",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    found = tmp_path_factory.mktemp("suite") / "ends.json"
    pattern = f"^({'|'.join(SOME)})$"
    subprocess.run(
        [sys.executable, SUITE, "-n", "3", "--only", pattern, "--json", found],
        capture_output=True,
        timeout=500,
        check=False,
    )
    return json.loads(found.read_text())


@pytest.mark.parametrize("name", SOME)
def test_torch_suite_test_passes(ends, name):
    assert ends[name]["how"] == "passed", ends[name]["why"]
