"""The queues of a GPU that the streams of a process share.

A stream is given one of a few queues, in which kernels begin in order. A kernel that
waits for its turn in one stream keeps those of other streams behind it in the queue. If
it waits for one of them, as ranks that are threads of a process do, both wait until a
call times out. So such ranks should have a queue each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
"""CUDA reads it when a process first uses a GPU."""
DEFAULT, MOST = 8, 32
UNDER_MPS = 2
"""What a process has under MPS, if nothing is said."""
FEWEST = 4
"""With so many, a few streams can wait while others go on."""
_DRIVER = "UNISONO_CUDA_DRIVER"
_MPS = "CUDA_MPS_PIPE_DIRECTORY"
_REQUESTED_BY = "UNISONO_CUDA_QUEUES_OF"
"""The process that set the variable, if unisono did."""


def request_all() -> None:
    """Ask CUDA for as many as there are, if nobody has decided and it is not too late.

    To be called before ranks begin as threads: the environment is no safe place then.
    """
    if VARIABLE not in os.environ and _may_use_cuda() and not _uses_cuda():
        os.environ[VARIABLE] = str(MOST)
        os.environ[_REQUESTED_BY] = str(os.getpid())


def drop_inherited() -> None:
    """In a process that is one rank: undo what another process asked for its threads.

    Under MPS all processes share the queues, and a fourth one with all would get none.
    """
    by = os.environ.get(_REQUESTED_BY)
    if by is None or by == str(os.getpid()) or _uses_cuda():
        return
    del os.environ[_REQUESTED_BY]
    if os.environ.get(VARIABLE) == str(MOST):  # else somebody has decided since
        del os.environ[VARIABLE]


def count() -> int:
    """How many a process has, by its environment."""
    text = os.environ.get(VARIABLE, "")
    if text.isdigit():
        return max(1, min(int(text), MOST))
    return UNDER_MPS if runs_mps() else DEFAULT


def words() -> str:
    """How many, and why."""
    if VARIABLE in os.environ:
        return f"{count()} ({VARIABLE}={os.environ[VARIABLE]})"
    return f"{count()} ({VARIABLE} is not set{', under MPS' if runs_mps() else ''})"


def runs_mps() -> bool:
    """Whether processes of this host that use a GPU are clients of MPS."""
    folder = Path(os.environ.get(_MPS) or "/tmp/nvidia-mps")
    return (folder / "control").exists()


def _may_use_cuda() -> bool:
    return bool(os.environ.get(_DRIVER)) or Path("/dev/nvidiactl").exists()


def _uses_cuda() -> bool:
    from unisono import _native  # not where only the words are wanted

    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return _native.cuda_is_used() or (cuda is not None and cuda.is_initialized())
