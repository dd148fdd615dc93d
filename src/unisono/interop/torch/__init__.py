"""The PyTorch backend: `torch.distributed.init_process_group("unisono")`.

Nothing need be imported for it. torch finds `autoload` by its entry point and calls it
at the end of `import torch`; all it does is to leave a name. What makes a group is
imported when the first is made.

UNISONO_TORCH_REPLACES=gloo makes every group that asks for gloo one of ours, for
programs that do not let their users choose: see `replacement.py`.

There are two adapters, see `adapter_of`. The compiled one is built in the background by
the first program that could use it, or by `python -m unisono.interop.torch build`, and
used from then on.
"""

from __future__ import annotations

import logging
import os
from typing import Any

NAME = "unisono"
"""The name of the backend, for `init_process_group`."""

REPLACES = "UNISONO_TORCH_REPLACES"
"""The variable that names a backend whose groups become ours."""

_LOG = logging.getLogger("unisono")


def autoload() -> None:
    """Make the name known to torch; whatever goes wrong, `import torch` must not."""
    try:
        register()
    except Exception as why:
        _LOG.warning("unisono cannot be offered as a torch backend: %s", why)


def register() -> None:
    """Make the name known to torch, if this torch has distributed at all."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(
        NAME, _create, extended_api=True, devices=["cpu", "cuda"]
    )
    if other := os.environ.get(REPLACES, "").strip().lower():
        from unisono.interop.torch.replacement import replace

        replace(other)


def _create(options: Any, pg_options: Any = None) -> Any:
    """A process group of this rank, as torch asks for it."""
    from unisono.interop.torch.adapters import make

    return make(options, pg_options)


def register_gradients(model: Any, group: Any = None) -> dict[str, Any]:
    """Let the ranks of a host use the gradients of a model in place: `comm.register`.

    Gradients that are missing are made, of zeros. Clear them with
    `zero_grad(set_to_none=False)`: others that backward makes are not registered. By
    the names of the parameters, whether each is used in place, and why.
    """
    from unisono.interop.torch import registering

    return {**registering.register_gradients(model, group)}


def register_buckets(ddp: Any, hook: Any = None, state: Any = None) -> None:
    """Let the ranks of a host use the buckets of torch's DDP in place.

    Each is registered when it is first reduced. It takes the place of a hook: one that
    DDP is to have is given here, with its state, instead of `register_comm_hook`.
    """
    from unisono.interop.torch import registering

    registering.register_buckets(ddp, hook, state)


def adapter_of(group: Any = None) -> str:
    """Which adapter a group, or the default one, has: "python" or "compiled"."""
    from unisono.interop.torch import adapters

    return adapters.adapter_of(group)
