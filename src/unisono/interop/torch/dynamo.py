"""torch.compile looks into all Python that runs; what C++ calls back is left out."""

from __future__ import annotations

import torch


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
