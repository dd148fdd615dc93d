"""What functions on torch's ranks have in common: a group, tensors, comparisons."""

import contextlib
import os
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

import unisono

# So that ranks need not, each for itself.
import unisono.interop.torch.adapters
import unisono.interop.torch.process_group

# Names that torch gave new ones; both must work.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
warnings.filterwarnings("ignore", message=".*deprecated", category=FutureWarning)

unisono.schedule("all_reduce", "ring", 2).verify()


def store_of(rank, kind="file"):
    """A store that the ranks share."""
    path = os.path.join(os.environ["UNISONO_TEST_STORES"], rank.job)
    file = dist.FileStore(path, rank.n)
    if kind == "file":
        return file
    if kind == "hash":
        assert rank.n == 1, "a HashStore is one process's own"
        return dist.HashStore()
    assert kind == "tcp", kind
    port = 0 if rank.number == 0 else int(file.get("port"))
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=rank.number == 0,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
    )
    if rank.number == 0:
        file.set("port", str(store.port))
    return store


@contextlib.contextmanager
def group(rank, backend="unisono", kind="file", store=None, timeout_s=60, **options):
    """The group of all ranks, while it lasts."""
    torch.set_num_threads(1)
    torch.manual_seed(rank.number)
    dist.init_process_group(
        backend,
        store=store_of(rank, kind) if store is None else store,
        rank=rank.number,
        world_size=rank.n,
        timeout=timedelta(seconds=timeout_s),
        **options,
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def bits(tensor):
    """A tensor's bytes, to be compared."""
    made = torch.empty(tensor.numel(), dtype=tensor.dtype)
    made.copy_(tensor.detach().reshape(-1))
    return made.view(torch.uint8)


def expect(found, wanted, what=""):
    """Compare two tensors, bit for bit."""
    result = f"{what}: {found} where {wanted} was expected"
    assert found.dtype == wanted.dtype, result
    assert found.shape == wanted.shape, result
    assert torch.equal(bits(found), bits(wanted)), result


def close(found, wanted, limit=1e-6):
    """Compare two lists of tensors, such as the parameters of two models."""
    found, wanted = list(found), list(wanted)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)


def until(true, limit_s=30.0):
    """Wait for something to become true."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def ended(work, how):
    """Wait for a call in one of the ways there are; its value if it tells one."""
    if how == "sync":
        assert work is None
        return None
    if how == "future":
        return work.get_future().wait()
    if how == "polled":
        until(work.is_completed)
        assert work.is_success()
        assert work.exception() is None
    work.wait()
    return work.result()


WAYS = ("sync", "async", "future", "polled")
