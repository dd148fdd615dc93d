"""Groups of another backend become ours: UNISONO_TORCH_REPLACES=gloo.

For programs that do not let their users choose. Every group is made by one function of
torch, whoever asked: `init_process_group`, `new_group`, a device mesh, a framework. By
then the backend has a name, a map of devices to names, or none at all, which is torch's
default for the device. In each of these the replaced name becomes ours, and what the
program gave for the other's options is left out.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

from unisono.interop.torch import NAME


def replace(other: str) -> None:
    """From now on, whoever asks torch for the backend `other` gets ours."""
    from torch.distributed import distributed_c10d

    _replace_groups(distributed_c10d, other)
    if other == "gloo":  # torch's default, and the only one that has this call
        _serve_monitored_barrier(distributed_c10d)


def replaced(c10d: Any, asked: str, other: str) -> str:
    """A backend as torch writes it, with our name in the place of `other`."""
    if other not in asked.lower() and asked.lower() != c10d.Backend.UNDEFINED:
        return asked
    devices = c10d.BackendConfig(c10d.Backend(asked)).get_device_backend_map()
    names = {device: str(name).lower() for device, name in devices.items()}
    if other not in names.values():
        return asked
    if set(names.values()) == {other}:
        return NAME
    return ",".join(
        f"{device}:{NAME if name == other else name}" for device, name in names.items()
    )


def _replace_groups(c10d: Any, other: str) -> None:
    make_group = c10d._new_process_group_helper

    @functools.wraps(make_group)
    def make_ours(
        size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        given = replaced(c10d, str(backend), other)
        if given == NAME != str(backend).lower():
            kwargs["backend_options"] = None  # the other's
        return make_group(size, rank, ranks, c10d.Backend(given), *args, **kwargs)

    c10d._new_process_group_helper = make_ours


def _serve_monitored_barrier(c10d: Any) -> None:
    """torch has it for groups of gloo only, by their name."""
    import torch.distributed as dist

    of_gloo = c10d.monitored_barrier

    @functools.wraps(of_gloo)
    def of_both(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        if c10d._rank_not_in_group(group) or c10d.get_backend(group) != NAME:
            of_gloo(group, timeout, wait_all_ranks)
            return
        if timeout is None:
            timeout = c10d._get_default_timeout(c10d.Backend(NAME))
        elif isinstance(timeout, float):
            timeout = timedelta(seconds=timeout)
        ours = c10d._get_default_group() if group is None else group
        ours.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    c10d.monitored_barrier = dist.monitored_barrier = of_both
