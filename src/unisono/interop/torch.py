"""The PyTorch backend: `torch.distributed.init_process_group("unisono")`.

Nothing need be imported for it. torch finds `autoload` by its entry point and calls it
at the end of `import torch`; all it does is to leave a name. What makes a group is
imported when the first is made.
"""

from __future__ import annotations

import logging
from typing import Any

NAME = "unisono"
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

    if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, pg_options: Any = None) -> Any:
    """A process group of this rank, as torch asks for it."""
    from unisono.interop._torch.adapters import make

    return make(options, pg_options)
