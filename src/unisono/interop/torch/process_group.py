"""The Python adapter: a torch `ProcessGroup` whose methods call unisono.

torch reaches a process group by two sets of names: Python's, and those by which its C++
half calls back into Python. Methods that were renamed have both spellings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from unisono.interop.torch.allocation import NO_ALLOCATOR
from unisono.interop.torch.collectives import TorchCollectives
from unisono.interop.torch.dynamo import leave_out
from unisono.interop.torch.rendezvous import GroupRendezvous
from unisono.interop.torch.work import PendingCall

_NO_TIMEOUT = timedelta(milliseconds=-1)


class UnisonoProcessGroup(dist.ProcessGroup):
    """One rank's end of a group. `adapter` names which of the two it is."""

    adapter = "python"

    def __init__(
        self,
        rendezvous: GroupRendezvous,
        store: Any,
        devices: Sequence[str] = ("cpu",),
    ) -> None:
        """`store` is the group's own; `devices` are those whose tensors it serves."""
        super().__init__(rendezvous.rank, rendezvous.size)
        self._calls = TorchCollectives(rendezvous, devices)
        self._store = store
        self._group_name = rendezvous.name
        self._description = "undefined"
        self._sequence = 0

    # --- who it is

    def rank(self) -> int:
        """This process's number in the group."""
        return self._calls.rank

    def size(self) -> int:
        """How many there are."""
        return self._calls.size

    def name(self) -> str:
        """The name of the backend."""
        return "unisono"

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _get_group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        """The description given when the group was made."""
        return self._description

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    def _get_group_desc(self) -> str:
        return self._description

    getRank, getSize = rank, size  # noqa: N815
    _get_backend_name = getBackendName = name  # noqa: N815
    getGroupName, setGroupName = _get_group_name, _set_group_name  # noqa: N815
    getGroupDesc, setGroupDesc = _get_group_desc, _set_group_desc  # noqa: N815

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._calls.devices]

    def _get_backend(self, device: torch.device) -> UnisonoProcessGroup:
        if torch.device(device).type not in self._calls.devices:
            kinds = " and ".join(self._calls.devices)
            raise RuntimeError(f"this group serves tensors on {kinds}, not {device}")
        return self

    supports_splitting = supports_coalescing = False
    supports_time_estimate = supports_shrinking = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether allocate_tensor makes tensors on this device."""
        return self._calls.tensors.serves(torch.device(device))

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor of so many elements in memory that the ranks of a host share."""
        return self._calls.tensors.make(size, dtype, torch.device(device))

    @property
    def mem_allocator(self) -> Any:
        """unisono has none: torch's own memory is shared between ranks anyway."""
        raise RuntimeError(NO_ALLOCATOR)

    def get_group_store(self) -> Any:
        """The store that torch gave the group."""
        return self._store

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _start_coalescing(self, device: torch.device) -> None:
        self._calls.start_together()

    def _end_coalescing(self, device: torch.device) -> PendingCall:
        return self._calls.end_together()

    # --- its end

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of calls that have none of their own."""
        self._calls.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group."""
        self._calls.leave()

    def abort(self) -> None:
        """Leave the group; what is in flight fails, here and on the others."""
        self._calls.close()

    # --- collectives

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Any = None
    ) -> PendingCall:
        """Reduce in place."""
        opts = _options(c10d.AllreduceOptions, opts, timeout)
        return self._calls.allreduce(_several(tensors), opts)

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: Any = None
    ) -> PendingCall:
        """Reduce several in place."""
        opts = _options(c10d.AllreduceCoalescedOptions, opts)
        return self._calls.allreduce(tensors, opts)

    def reduce(
        self, tensors: Any, root: Any = None, op: Any = None, timeout: Any = None
    ) -> PendingCall:
        """Reduce for the root."""
        if isinstance(root, int):
            opts = _options(c10d.ReduceOptions, op, timeout)
            opts.rootRank = root
        else:
            opts = _options(c10d.ReduceOptions, root)
        return self._calls.reduce(_several(tensors), opts)

    def broadcast(
        self, tensors: Any, root: Any = None, timeout: Any = None
    ) -> PendingCall:
        """The root's tensors on all ranks."""
        opts = _rooted(c10d.BroadcastOptions, root, timeout)
        return self._calls.broadcast(_several(tensors), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingCall:
        """The tensors of all ranks, on every rank."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(c10d.AllgatherOptions, opts)
        return self._calls.allgather(outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> PendingCall:
        """The same for several."""
        opts = _options(c10d.AllgatherOptions, opts)
        return self._calls.allgather_coalesced(outputs, inputs, opts)

    def all_gather_single(
        self, output: Tensor, x: Tensor, opts: Any = None
    ) -> PendingCall:
        """The tensors of all ranks, on every rank, in one."""
        opts = _options(c10d.AllgatherOptions, opts)
        return self._calls.all_gather_single(output, x, opts)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> PendingCall:
        """The same for several."""
        opts = _options(c10d.AllgatherOptions, opts)
        return self._calls.all_gather_single_coalesced(outputs, inputs, opts)

    def gather(
        self, outputs: Any, inputs: Any, root: Any = None, timeout: Any = None
    ) -> PendingCall:
        """The tensors of all ranks on the root."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _rooted(c10d.GatherOptions, root, timeout)
        return self._calls.gather(outputs, inputs, opts)

    def scatter(
        self, outputs: Any, inputs: Any, root: Any = None, timeout: Any = None
    ) -> PendingCall:
        """The root's tensors, one for each."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _rooted(c10d.ScatterOptions, root, timeout)
        return self._calls.scatter(outputs, inputs, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> PendingCall:
        """Reduced tensors, one for each."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(c10d.ReduceScatterOptions, opts, timeout)
        return self._calls.reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(
        self, output: Tensor, x: Tensor, opts: Any = None
    ) -> PendingCall:
        """Reduced rows of one tensor."""
        opts = _options(c10d.ReduceScatterOptions, opts)
        return self._calls.reduce_scatter_single(output, x, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> PendingCall:
        """The same for several."""
        opts = _options(c10d.ReduceScatterOptions, opts)
        return self._calls.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingCall:
        """One tensor for each, and one from each."""
        opts = _options(c10d.AllToAllOptions, opts)
        return self._calls.alltoall(outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        x: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> PendingCall:
        """Rows of one tensor for each, and some from each."""
        opts = _options(c10d.AllToAllOptions, opts)
        splits = list(output_split_sizes), list(input_split_sizes)
        return self._calls.all_to_all_single(output, x, *splits, opts)

    def barrier(self, opts: Any = None) -> PendingCall:
        """Wait until all have come."""
        return self._calls.barrier(_options(c10d.BarrierOptions, opts))

    def monitored_barrier(
        self, timeout: timedelta = _NO_TIMEOUT, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all have arrived; rank 0 names the missing ranks."""
        self._calls.monitored_barrier(timeout, wait_all_ranks)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> PendingCall:
        """One message."""
        return self._calls.send(_several(tensors), dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> PendingCall:
        """One message."""
        return self._calls.recv(_several(tensors), src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> PendingCall:
        """One message from any rank."""
        return self._calls.recv(_several(tensors), None, tag)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _several(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _options(kind: Callable[[], Any], given: Any, timeout: Any = None) -> Any:
    """Options as given; or the default ones, with an operation or a timeout."""
    if given is not None and hasattr(given, "asyncOp"):
        return given
    made = kind()
    if isinstance(given, timedelta):
        timeout = given
    elif given is not None:
        made.reduceOp = given
    if timeout is not None:
        made.timeout = timeout
    return made


def _rooted(kind: Callable[[], Any], root: Any, timeout: Any) -> Any:
    if root is None or hasattr(root, "asyncOp"):
        return _options(kind, root)
    made = _options(kind, None, timeout)
    made.rootRank = root
    return made


leave_out(UnisonoProcessGroup)
