"""torch's own tests of its process groups and of DDP, on our backend.

    python tests/interop/torch_suite.py -n 3
    python tests/interop/torch_suite.py -n 3 --as-gpu --only all_reduce --json out.json
    python tests/interop/torch_suite.py -n 2 --on-gpu --share 0/4

The tests come with torch, in `torch.testing._internal.distributed.distributed_test`.
Which of them run is settled while that module is imported, by comparing the name of the
backend with those that torch knows. So it is given a name that is ours and yet equal to
gloo and to mpi: what those two can do, we can. With --as-gpu the tests that ask for a
GPU run as well, on CPU tensors: most are tests of DDP that only say `.cuda()`. With
--on-gpu it is equal to nccl instead, and the tests of that run on one GPU, which all
ranks share and each takes for its own.

Exit status 0 if none fails.
"""

import argparse
import collections
import json
import logging
import os
import re
import sys
import tempfile
import time
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

OURS = "unisono"
LIMIT_S = 180
SUITE = "TORCH_SUITE"
"""Of processes that serve: the ranks and the device of the suite."""
SERVED = ("cuda",)
"""Devices that a process cannot use which was forked from one that has."""
# What only a real GPU can do, with whatever backend.
NEED_A_GPU = re.compile(
    "SyncBatchNorm|sync_bn_logged|stop_iteration_sync_bn|apply_optim_in_backward"
    "|native_mixed_precision_(no_)?grad_as"
    "|test_ddp_device$|test_ddp_inference$|test_ddp_logging_data_gpu$"
    "|test_average_parameters$|monitored_barrier_allreduce_hang"
)
# What cannot run where all ranks share one GPU, and why.
NOT_ON_ONE_GPU = {
    "names the GPU of its rank": "test_ddp_device$|test_ddp_logging_data_gpu$",
    "needs NCCL itself, which refuses two ranks on a GPU": (
        "monitored_barrier_allreduce_hang|test_nccl_high_priority_stream$"
        "|test_ddp_profiling_execution_trace$|test_average_parameters$"
    ),
    "fails with every backend: https://github.com/pytorch/pytorch/issues/112277": (
        "test_DistributedDataParallel$"
    ),
}
# Too heavy for ranks that share a few cores.
HEAVY = re.compile("test_ddp_uneven_inputs$")


class Name(str):
    """Our name, which is equal to others' names as well."""

    others = ("gloo", "mpi")

    def __eq__(self, other):
        return str(self) == other or other in self.others

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(self.others[0])  # by which sets of names find it

    def __str__(self):
        return "".join(self)


def suite(n, device=None):
    """The class of all tests, for n ranks; the device is what they take for GPUs."""
    os.environ.update(
        BACKEND=OURS,
        WORLD_SIZE=str(n),
        INIT_METHOD="file://",  # one test asks; each is given its own later
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(LIMIT_S),
        TORCH_NCCL_ASYNC_ERROR_HANDLING="1",  # one test prints it
    )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")

    import ranks  # noqa: F401  (so that the ranks need not)
    import torch

    if device == "cuda":
        _leave_to_ranks(torch, n)
    from torch.testing._internal import common_distributed as common

    torch.set_num_threads(1)
    common.TIMEOUT_OVERRIDE.clear()
    common.DistTestCases.backend_feature["plugin"].add(OURS)
    _gates(common, n, device)
    if device == "cuda":
        Name.others = ("nccl",)
    named = collections.ChainMap({"BACKEND": Name(OURS)}, os.environ)
    with mock.patch.object(os, "environ", named):
        from torch.testing._internal.distributed import distributed_test as module
    _open_monitored_barrier()
    return _test_case(module, n, device)


def _leave_to_ranks(torch, n):
    """Who imports the tests does not ask CUDA what there is: forks could not use it."""
    here = os.getpid()

    def or_in_rank(function, value):
        return lambda *_: value if os.getpid() == here else function(0)

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = torch._C._cuda_getDeviceCount = lambda: n
    newest = SimpleNamespace(major=9, minor=0, gcnArchName="", total_memory=1 << 37)
    for name, value in (
        ("get_device_capability", (9, 0)),
        ("get_device_properties", newest),
    ):
        setattr(torch.cuda, name, or_in_rank(getattr(torch.cuda, name), value))


def _gates(common, n, device):
    """Say what is skipped before ranks are started for it, not by them."""

    def gpu(test):
        return test if device else unittest.skip("needs a GPU")(test)

    counted = common.skip_if_lt_x_gpu

    def gpus(count, *, allow_cpu=False):
        return counted(count, allow_cpu=True) if allow_cpu else gpu

    common.skip_if_no_gpu, common.skip_if_lt_x_gpu = gpu, gpus
    if device:
        common.init_multigpu_helper = lambda n, _: {rank: [rank] for rank in range(n)}
    if n < 8:
        common.skip_if_small_worldsize = unittest.skip("needs 8 ranks")


def _open_monitored_barrier():
    """dist.monitored_barrier refuses all names but gloo's; ours has the method."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
        if c10d._rank_not_in_group(group):
            return
        if isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        found = c10d._get_default_group() if group is None else group
        found.monitored_barrier(timeout or c10d.default_pg_timeout, wait_all_ranks)

    dist.monitored_barrier = c10d.monitored_barrier = monitored_barrier


def _test_case(module, n, device):
    import torch

    class TorchSuite(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            served = device in SERVED
            fork = torch.multiprocessing.get_context("fork").Process
            self._start_processes(served_process if served else fork)

        @classmethod
        def _run(cls, rank, *args, **options):
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            if device:
                one_as_all(torch.device(device), rank, n)
            super()._run(rank, *args, **options)

    for name in unittest.TestLoader().getTestCaseNames(TorchSuite):
        if why := _impossible(name, device):
            skipped = unittest.skip(why)(getattr(TorchSuite, name))
            setattr(TorchSuite, name, skipped)
    TorchSuite.__module__, TorchSuite.__qualname__ = __name__, "TorchSuite"
    return TorchSuite


def _impossible(name, device):
    """Why a test cannot run on such devices; None if it can."""
    if device == "cpu" and NEED_A_GPU.search(name):
        return "needs a real GPU"
    if device == "cuda":
        reasons = NOT_ON_ONE_GPU.items()
        return next((why for why, names in reasons if re.search(names, name)), None)
    return None


def served_process(target, name, args, kwargs):
    """A process that is forked from one that has imported all, and not used CUDA."""
    from torch import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    about = dict(os.environ), target, args, kwargs
    return context.Process(target=begin, name=name, args=about)


def begin(environment, target, args, kwargs):
    os.environ.update(environment)
    target(*args, **kwargs)


def one_as_all(device, rank, n):
    """From here on this process takes the CPU, or the only GPU, for each of n GPUs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel as Ddp
    from torch.overrides import TorchFunctionMode

    on_cpu = device.type == "cpu"

    def mapped(value):
        named = isinstance(value, str | torch.device) and "cuda" in str(value)
        return device if named or type(value) is int else value

    class OnOne(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if function is torch.Tensor.cuda:
                return args[0] if on_cpu else args[0].to(device)
            if function is torch.Tensor.to:
                args = (args[0], *map(mapped, args[1:]))
            if kwargs.get("device") is not None:
                kwargs["device"] = mapped(kwargs["device"])
            return function(*args, **kwargs)

    made, moved = Ddp.__init__, torch.nn.Module.to

    def init(self, net, device_ids=None, output_device=None, *args, **kwargs):
        one = [0] if device_ids and not on_cpu else None
        made(self, net, one, None, *args, **kwargs)

    def to(self, *args, **kwargs):
        kwargs = {key: mapped(value) for key, value in kwargs.items()}
        return moved(self, *map(mapped, args), **kwargs)

    Ddp.__init__, torch.nn.Module.to = init, to
    torch.nn.Module.cuda = lambda self, *_: self if on_cpu else moved(self, device)
    torch.cuda.device_count = lambda: n
    (_no_gpu if on_cpu else _one_gpu)(torch.cuda, rank)
    OnOne().__enter__()


def _no_gpu(cuda, rank):
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.current_device = lambda: rank


def _one_gpu(cuda, rank):
    """What names a GPU of its rank has the only one."""
    import torch.distributed as dist

    cuda.set_device = lambda *args, **kwargs: None
    stream, barrier, synchronize = cuda.Stream, dist.barrier, cuda.synchronize
    cuda.synchronize = lambda device=None: synchronize(0)

    class Stream(stream):
        def __new__(cls, device=None, priority=0, **kwargs):
            return stream.__new__(cls, 0, priority, **kwargs)

    def on_one(*args, device_ids=None, **kwargs):
        return barrier(*args, device_ids=[0] if device_ids else None, **kwargs)

    cuda.Stream, dist.barrier = Stream, on_one


class Results(unittest.TestResult):
    """How each test ended, and how long it took."""

    def __init__(self):
        super().__init__()
        self.ends = {}

    def startTest(self, test):  # noqa: N802
        super().startTest(test)
        self._began = time.monotonic()

    def _end(self, test, how, why=""):
        seconds = round(time.monotonic() - getattr(self, "_began", 0), 2)
        name = test.id().rpartition(".")[2]
        self.ends[name] = {"how": how, "why": why, "seconds": seconds}

    def addSuccess(self, test):  # noqa: N802
        self._end(test, "passed")

    def addSkip(self, test, why):  # noqa: N802
        self._end(test, "skipped", why)

    def addError(self, test, error):  # noqa: N802
        self._end(test, "failed", self._exc_info_to_string(error, test))

    addFailure = addError  # noqa: N815


def run(cases, names, log, ends_file=None):
    """Run these tests; whatever they and their ranks say goes to a file.

    How they ended is kept in another one after each test: some never end.
    """
    results = Results()
    logging.disable(logging.ERROR)
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        for name in names:
            unittest.TestSuite([cases(name)]).run(results)
            if ends_file:
                Path(ends_file).write_text(json.dumps(results.ends))
    finally:
        sys.stdout.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
    return results.ends


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=3, help="how many ranks")
    parser.add_argument("--as-gpu", action="store_true", help="the GPU tests, too")
    parser.add_argument("--on-gpu", action="store_true", help="those of NCCL, on a GPU")
    parser.add_argument("--share", default="0/1", help="2/4: every fourth, from 2 on")
    parser.add_argument("--only", action="append", help="a regular expression")
    parser.add_argument("--json", help="where to write how each test ended")
    result = parser.parse_args()
    device = "cuda" if result.on_gpu else "cpu" if result.as_gpu else None
    cases = suite(result.n, device)
    if device in SERVED:
        os.environ[SUITE] = f"{result.n} {device}"
        globals()["TorchSuite"] = cases
    names = unittest.TestLoader().getTestCaseNames(cases)
    wanted = re.compile("|".join(result.only or [""]))
    first, step = map(int, result.share.split("/"))
    names = [x for x in names if wanted.search(x) and not HEAVY.search(x)]
    names = names[first::step]
    with tempfile.TemporaryFile("w+") as log:
        ends = run(cases, names, log, result.json)
    for name, end in ends.items():
        if end["how"] == "failed":
            sys.stdout.write(f"--- {name}\n{end['why']}\n")
    count = collections.Counter(end["how"] for end in ends.values())
    figures = ", ".join(
        f"{count[how]} {how}" for how in ("passed", "failed", "skipped")
    )
    how = ", the CPU as GPU" if device == "cpu" else ", on a GPU" if device else ""
    sys.stdout.write(f"torch's suite on {result.n} ranks{how}: {figures}\n")
    return 1 if count["failed"] or not count["passed"] else 0


if __name__ == "__main__":
    import torch_suite  # so that other processes find what is in it

    sys.exit(torch_suite.main())
elif __name__ == "torch_suite" and SUITE in os.environ:
    _n, _device = os.environ[SUITE].split()
    TorchSuite = suite(int(_n), _device)
