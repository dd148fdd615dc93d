"""Compressed gradients: a codec for every bucket, with or without error feedback.

    DDP(net, comm, codec="fp8")                      dense, without error feedback
    DDP(net, comm, codec="topk:0.01")                1 % of the elements are sent
    DDP(net, comm, codec="powersgd:4")               matrices as low-rank products
    DDP(net, comm, codec="onebit")                   signs, feedback at both ends
    DDP(net, comm, codec="int4+feedback")            any dense codec, likewise
    DDP(net, comm, codec=lambda bucket: "fp8" if bucket.count > 4096 else None)

Error feedback keeps arrays as large as the gradients on each rank: what was not sent
yet. They differ between ranks, and are part of the state of training, as the
optimizer's state is:

    state = model.compression.state_dict()           flat, for `save_checkpoint`
    model.compression.load_state_dict(state)         continues with the same bits

Error feedback belongs to a bucket. So with it buckets stay as they were first filled,
and are not put into the order in which gradients are computed.
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
from unisono.parallel.common.flat import CPU
from unisono.parallel.common.shard_math import shard_bounds, uneven_counts
from unisono.parallel.data.buckets import Bucket
from unisono.runtime.call.work import Work
from unisono.runtime.communicator import Communicator
from unisono.runtime.compress.error_feedback import CodedSum
from unisono.runtime.compress.powersgd import LowRankSum
from unisono.runtime.compress.sparse import RandomKSum, TopKSum
from unisono.runtime.compress.sums import CompressedSum
from unisono.runtime.stages import StagedWork, Stages

CodecChoice = str | codecs.Codec | Scheme | None
BucketCodec = CodecChoice | Callable[[Bucket], CodecChoice]
FEEDBACK = "+feedback"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Compression:
    """The codecs of a strategy's buckets, and their error feedback."""

    def __init__(
        self, comm: Communicator, codec: BucketCodec, buckets: Sequence[Bucket]
    ) -> None:
        """Choose a codec for every bucket; the same on all ranks."""
        self.comm, self._codec = comm, codec
        self._dense: dict[int, str | None] = {}
        self._sums: dict[int, CompressedSum] = {}
        self.choose(buckets)

    def choose(self, buckets: Sequence[Bucket]) -> None:
        """Choose a codec for each of these buckets."""
        self._dense, self._sums = {}, {}
        for bucket in buckets:
            spec = self._codec(bucket) if callable(self._codec) else self._codec
            if spec is None:
                continue
            _refuse_type(bucket, spec)
            spec = str(spec) if isinstance(spec, codecs.Codec) else spec
            if isinstance(spec, str) and not _has_feedback(spec):
                self._dense[bucket.number] = dense(spec, "DDP or ZeRO")
            else:
                shapes = [tuple(p.shape) for p in bucket.params]
                self._sums[bucket.number] = compressed_sum(self.comm, spec, shapes)

    @property
    def has_feedback(self) -> bool:
        """Whether any bucket has error feedback, and so must keep its parameters."""
        return bool(self._sums)

    def all_reduce(
        self, bucket: Bucket, *, mean: bool, label: str, reproducible: bool
    ) -> Work:
        """Begin to all-reduce a bucket."""
        op = "mean" if mean else "sum"
        if bucket.number in self._sums:
            stages = self._stages(bucket, mean, True, label)
            return StagedWork(stages, bucket.data, f"all_reduce({label})")

        def begin(data: Tensor) -> Work:
            work: Work = self.comm.all_reduce(
                data,
                op=op,
                async_op=True,
                reproducible=reproducible,
                label=label,
                **self._codec_option(bucket),
            )
            return work

        return self._begun(bucket, begin, f"all_reduce({label})")

    def reduce_scatter(self, bucket: Bucket, *, label: str, reproducible: bool) -> Work:
        """Begin to average a bucket; each rank gets its shard, in place.

        With error feedback it is done at once: strategies that finish one bucket while
        another is launched would begin its later collectives in a different order.
        """
        assert bucket.data is not None
        if bucket.number in self._sums:
            stages = self._stages(bucket, True, False, label)
            done = StagedWork(stages, bucket.data, f"reduce_scatter({label})")
            done.wait()
            return done

        def begin(data: Tensor) -> Work:
            lower, upper = shard_bounds(bucket.count, self.comm)
            work: Work = self.comm.reduce_scatter(
                data,
                op="mean",
                out=data[lower:upper],
                counts=uneven_counts(bucket.count, self.comm.world_size),
                async_op=True,
                reproducible=reproducible,
                label=label,
                **self._codec_option(bucket),
            )
            return work

        return self._begun(bucket, begin, f"reduce_scatter({label})")

    def _begun(
        self, bucket: Bucket, begin: Callable[[Tensor], Work], call: str
    ) -> Work:
        assert bucket.data is not None
        return begin_coded(bucket.data, self._dense.get(bucket.number), call, begin)

    def _codec_option(self, bucket: Bucket) -> dict[str, Any]:
        name = self._dense.get(bucket.number)
        return {} if name is None else {"codec": name}

    def _stages(self, bucket: Bucket, mean: bool, whole: bool, label: str) -> Stages:
        data, summing = bucket.data, self._sums[bucket.number]
        assert data is not None
        exact = data.dtype is torch.float32 and data.device == CPU
        x = data.detach().to("cpu", torch.float32).numpy()
        yield from summing.reduce(x, whole=whole, label=label)
        if mean:
            x /= x.dtype.type(self.comm.world_size)
        if not exact:
            data.copy_(torch.from_numpy(x))

    # --- error feedback

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's error feedback, as copies by name; nothing is sent."""
        return feedback_state(self.comm, self._sums)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what this rank has saved; nothing is sent."""
        load_feedback_state(self.comm, self._sums, state)


def begin_coded(
    data: Tensor, codec: str | None, call: str, begin: Callable[[Tensor], Work]
) -> Work:
    """Begin a call on `data`; codecs work on copies in the host's memory."""
    if codec is None or data.device == CPU:
        return begin(data)
    return StagedWork(_on_host(data, begin), data, call)


@torch.no_grad()
def _on_host(data: Tensor, begin: Callable[[Tensor], Work]) -> Stages:
    copy = torch.empty_like(data, device="cpu").copy_(data)
    yield begin(copy)
    data.copy_(copy)


def feedback_state(
    comm: Communicator, sums: Mapping[int, CompressedSum]
) -> dict[str, Tensor]:
    """The error feedback of these sums, as copies by name, and its rank."""
    state = {"place": torch.tensor([comm.rank, comm.world_size])}
    for number, summing in sums.items():
        state[f"bucket {number}: steps"] = torch.tensor(summing.steps)
        for name, array in summing.memory.items():
            state[f"bucket {number}: {name}"] = torch.from_numpy(array.copy())
    return state


def load_feedback_state(
    comm: Communicator, sums: Mapping[int, CompressedSum], state: Mapping[str, Tensor]
) -> None:
    """Load it; BadArgument if the state is of other buckets or of another rank."""
    if "place" in state and (place := state["place"].tolist()) != [
        comm.rank,
        comm.world_size,
    ]:
        raise BadArgument(
            f"load_state_dict: the state is of rank {place[0]} of {place[1]}, this is "
            f"rank {comm.rank} of {comm.world_size}; each rank loads its own. With "
            "another number of ranks, start without it: its error feedback is lost"
        )
    saved = {name: list(array.shape) for name, array in state.items()}
    known = feedback_state(comm, sums)
    mine = {name: list(array.shape) for name, array in known.items()}
    if odd := [n for n in saved | mine if saved.get(n) != mine.get(n)]:
        raise BadArgument(
            f"load_state_dict: {odd[0]!r} is {saved.get(odd[0], 'missing')} in the "
            f"state, expected {mine.get(odd[0], 'nothing')}; use the module, codec and "
            "bucket_cap_mb that it was saved with"
        )
    for number, summing in sums.items():
        summing.steps = int(state[f"bucket {number}: steps"])
        for name, array in summing.memory.items():
            array[...] = state[f"bucket {number}: {name}"].numpy()


def dense(spec: Any, where: str) -> str | None:
    """The name of a codec without error feedback, or None; BadArgument for others."""
    if spec is None:
        return None
    if is_scheme(spec) or (isinstance(spec, str) and spec.endswith(FEEDBACK)):
        raise BadArgument(
            f"{where}: codec {spec}: error feedback is not supported here; expected a "
            "dense codec, such as fp8 or int8, or fp8@hosts"
        )
    codecs.get(spec.removesuffix("@hosts") if isinstance(spec, str) else spec)
    return str(spec)


def _has_feedback(spec: str) -> bool:
    signs = spec.partition(":")[0] == "onebit"
    return is_scheme(spec) or signs or spec.endswith(FEEDBACK)


def compressed_sum(
    comm: Communicator, spec: str | Scheme, shapes: Sequence[tuple[int, ...]]
) -> CompressedSum:
    """A sum with error feedback, for a flat tensor of tensors of these shapes."""
    count = sum(torch.Size(shape).numel() for shape in shapes)
    if isinstance(spec, str) and not is_scheme(spec):
        return CodedSum(comm, codecs.get(spec.removesuffix(FEEDBACK)), count)
    how = scheme(spec)
    if isinstance(how, PowerSGD):
        return LowRankSum(comm, how, shapes)
    if isinstance(how, RandomK):
        return RandomKSum(comm, how, count)
    return TopKSum(comm, how, count)


def _refuse_type(bucket: Bucket, spec: CodecChoice) -> None:
    if bucket.dtype not in _FLOATS:
        raise BadArgument(
            f"codec {spec}: the gradient of {bucket.names[0]} is {bucket.dtype}; "
            "expected float32, bfloat16 or float16: give None for its bucket"
        )
