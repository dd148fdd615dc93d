"""Gradients that travel as less than they are: a codec for every bucket.

    DDP(net, comm, codec="fp8")                      coded, nothing remembered
    DDP(net, comm, codec="topk:0.01")                1 % of them; the rest waits
    DDP(net, comm, codec="powersgd:4")               matrices as thin products
    DDP(net, comm, codec="onebit")                   signs, remembered at both ends
    DDP(net, comm, codec="int4+feedback")            any dense codec, likewise
    DDP(net, comm, codec=lambda bucket: "fp8" if bucket.count > 4096 else None)

Those that remember (error feedback) keep arrays as large as the gradients on each rank.
They are this rank's alone, and part of the state of training, as the optimizer's is:

    state = model.compression.state_dict()           flat, for `checkpoint.save`
    model.compression.load_state_dict(state)         goes on bit for bit

What is remembered belongs to a bucket. So buckets then stay as they were first made,
instead of being put into the order in which gradients come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono import codecs
from unisono.codecs.options import Scheme, is_scheme, scheme
from unisono.codecs.powersgd import PowerSGD
from unisono.codecs.randomk import RandomK
from unisono.errors import BadArgument
from unisono.parallel.buckets import Bucket
from unisono.parallel.flat import counts_of, share
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator
from unisono.runtime.compress.error_feedback import CodedSum
from unisono.runtime.compress.powersgd import LowRankSum
from unisono.runtime.compress.sparse import RandomKSum, TopKSum
from unisono.runtime.compress.sums import Summing
from unisono.runtime.stages import Staged, Stages

Choice = str | codecs.Codec | Scheme | None
PerBucket = Choice | Callable[[Bucket], Choice]
FEEDBACK = "+feedback"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Compression:
    """What the buckets of a strategy travel as, and what that remembers."""

    def __init__(
        self, comm: Communicator, codec: PerBucket, buckets: Sequence[Bucket]
    ) -> None:
        """Choose for every bucket; the same on all ranks."""
        self.comm, self._codec = comm, codec
        self._codes: dict[int, str | None] = {}
        self._sums: dict[int, Summing] = {}
        self.settle(buckets)

    def settle(self, buckets: Sequence[Bucket]) -> None:
        """Choose for these buckets instead."""
        self._codes, self._sums = {}, {}
        for bucket in buckets:
            told = self._codec(bucket) if callable(self._codec) else self._codec
            if told is None:
                continue
            _refuse_type(bucket, told)
            told = str(told) if isinstance(told, codecs.Codec) else told
            if isinstance(told, str) and not _remembers(told):
                self._codes[bucket.number] = dense(told, "DDP or ZeRO")
            else:
                shapes = [tuple(p.shape) for p in bucket.params]
                self._sums[bucket.number] = summing(self.comm, told, shapes)

    @property
    def remembers(self) -> bool:
        """Whether any bucket has to stay as it is."""
        return bool(self._sums)

    def all_reduce(
        self, bucket: Bucket, *, mean: bool, label: str, reproducible: bool
    ) -> Work:
        """Begin to reduce a bucket, whole on every rank."""
        op = "mean" if mean else "sum"
        if bucket.number in self._sums:
            stages = self._stages(bucket, mean, True, label)
            return Staged(stages, bucket.data, f"all_reduce({label})")
        work: Work = self.comm.all_reduce(
            bucket.data,
            op=op,
            async_op=True,
            reproducible=reproducible,
            label=label,
            **self._coded(bucket),
        )
        return work

    def reduce_scatter(self, bucket: Bucket, *, label: str, reproducible: bool) -> Work:
        """Begin to average a bucket; each rank has its share, in its place.

        What remembers is done at once: strategies that land one bucket while another
        is launched would begin its later collectives in an order of their own.
        """
        assert bucket.data is not None
        if bucket.number in self._sums:
            stages = self._stages(bucket, True, False, label)
            done = Staged(stages, bucket.data, f"reduce_scatter({label})")
            done.wait()
            return done
        lower, upper = share(bucket.count, self.comm)
        work: Work = self.comm.reduce_scatter(
            bucket.data,
            op="mean",
            out=bucket.data[lower:upper],
            counts=counts_of(bucket.count, self.comm.world_size),
            async_op=True,
            reproducible=reproducible,
            label=label,
            **self._coded(bucket),
        )
        return work

    def _coded(self, bucket: Bucket) -> dict[str, Any]:
        code = self._codes.get(bucket.number)
        return {} if code is None else {"codec": code}

    def _stages(self, bucket: Bucket, mean: bool, whole: bool, label: str) -> Stages:
        data, way = bucket.data, self._sums[bucket.number]
        assert data is not None
        exact = data.dtype is torch.float32
        x = data.detach().numpy() if exact else data.detach().float().numpy()
        yield from way.reduce(x, whole=whole, label=label)
        if mean:
            x /= x.dtype.type(self.comm.world_size)
        if not exact:
            data.copy_(torch.from_numpy(x))

    # --- what is remembered

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank remembers, as copies by name; nothing is sent."""
        return memory_of(self.comm, self._sums)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what this rank has saved; nothing is sent."""
        load_memory(self.comm, self._sums, state)


def memory_of(comm: Communicator, sums: Mapping[int, Summing]) -> dict[str, Tensor]:
    """What these remember, as copies by name, and whose it is."""
    state = {"place": torch.tensor([comm.rank, comm.world_size])}
    for number, way in sums.items():
        state[f"bucket {number}: steps"] = torch.tensor(way.steps)
        for name, kept in way.memory.items():
            state[f"bucket {number}: {name}"] = torch.from_numpy(kept.copy())
    return state


def load_memory(
    comm: Communicator, sums: Mapping[int, Summing], state: Mapping[str, Tensor]
) -> None:
    """The way back; BadArgument if it is not of these, or not this rank's."""
    if "place" in state and (place := state["place"].tolist()) != [
        comm.rank,
        comm.world_size,
    ]:
        raise BadArgument(
            f"load_state_dict: the state is of rank {place[0]} of {place[1]}, this is "
            f"rank {comm.rank} of {comm.world_size}; each rank loads its own. In "
            "another world begin without it: what was not sent yet is lost"
        )
    told = {name: list(kept.shape) for name, kept in state.items()}
    mine = {name: list(kept.shape) for name, kept in memory_of(comm, sums).items()}
    if odd := [n for n in told | mine if told.get(n) != mine.get(n)]:
        raise BadArgument(
            f"load_state_dict: {odd[0]!r} is {told.get(odd[0], 'not there')} in the "
            f"state, expected {mine.get(odd[0], 'nothing')}; use the module, codec and "
            "bucket_cap_mb that it was saved with"
        )
    for number, way in sums.items():
        way.steps = int(state[f"bucket {number}: steps"])
        for name, kept in way.memory.items():
            kept[...] = state[f"bucket {number}: {name}"].numpy()


def dense(spec: Any, where: str) -> str | None:
    """The name of a codec that remembers nothing, or None; BadArgument for others."""
    if spec is None:
        return None
    if is_scheme(spec) or (isinstance(spec, str) and spec.endswith(FEEDBACK)):
        raise BadArgument(
            f"{where}: codec {spec}: nothing is remembered here; expected a dense "
            f"codec, such as fp8 or int8, or fp8@hosts"
        )
    codecs.get(spec.removesuffix("@hosts") if isinstance(spec, str) else spec)
    return str(spec)


def _remembers(spec: str) -> bool:
    signs = spec.partition(":")[0] == "onebit"
    return is_scheme(spec) or signs or spec.endswith(FEEDBACK)


def summing(
    comm: Communicator, told: str | Scheme, shapes: Sequence[tuple[int, ...]]
) -> Summing:
    """The sum that remembers, for tensors of these shapes one after the other."""
    count = sum(torch.Size(shape).numel() for shape in shapes)
    if isinstance(told, str) and not is_scheme(told):
        return CodedSum(comm, codecs.get(told.removesuffix(FEEDBACK)), count)
    how = scheme(told)
    if isinstance(how, PowerSGD):
        return LowRankSum(comm, how, shapes)
    if isinstance(how, RandomK):
        return RandomKSum(comm, how, count)
    return TopKSum(comm, how, count)


def _refuse_type(bucket: Bucket, told: Choice) -> None:
    if bucket.dtype not in _FLOATS:
        raise BadArgument(
            f"codec {told}: the gradient of {bucket.names[0]} is {bucket.dtype}; "
            "expected float32, bfloat16 or float16: give None for its bucket"
        )
