"""Ranks for the strategies: threads for most, processes where that matters."""

import pytest
import torch

from forked import Forks
from unisono.testing import world

LIMIT_S = 240.0


@pytest.fixture(autouse=True, scope="package")
def _one_thread_each():
    """Sums in one order, whatever else runs on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _mkldnn_as_it_was():
    """Sums in one order, also after torch has met a product it has no kernel for.

    On an Arm without bfloat16 it then does without MKL-DNN for good, in this process:
    what was computed before, and kept to be compared with, has other bits.
    """
    before = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.fixture
def threads():
    """threads(n, function, *args): the values of n ranks that are threads."""

    def run(n, function, *args, timeout_s=100.0):
        with world(n, timeout_s=timeout_s) as made:
            return made.run(function, *args)

    return run


@pytest.fixture
def refusals(threads):
    """refusals(n, function): what each of n ranks raises; all of them must."""

    def run(n, function):
        def refused(comm):
            try:
                function(comm)
            except Exception as error:
                return error
            raise AssertionError(f"rank {comm.rank} raised nothing")

        return threads(n, refused)

    return run


@pytest.fixture(scope="session")
def forks():
    """The process that the ranks which are processes are forked from."""
    with Forks(LIMIT_S) as made:
        yield made


@pytest.fixture
def processes(forks):
    """processes(n, function, *args): the values of n ranks that are processes."""

    def run(n, function, *args):
        ends = forks.run(n, function, *args)
        bad = [end for end in ends if end.status != 0]
        assert not bad, "\n".join(f"rank {e.rank}: {e.status}\n{e.stderr}" for e in bad)
        return [end.value for end in ends]

    return run
