"""torch.compile looks into all Python that runs; what C++ calls back is left out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


def leave_frame_out(function: Callable[..., Any]) -> None:
    """Have one function run as it is; what it calls may be compiled."""
    with suppress(AttributeError):  # a torch without them
        frames = torch._C._dynamo.eval_frame
        actions = frames._FrameAction
        strategy = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, strategy)


def leave_out(*classes: type) -> None:
    """Have their methods, and all that these call, run as they are."""
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(skip, skip)
        for one in classes:
            for method in vars(one).values():
                if hasattr(method, "__code__"):
                    frames.set_code_exec_strategy(method.__code__, strategy)
    except AttributeError:  # a torch without them
        return
