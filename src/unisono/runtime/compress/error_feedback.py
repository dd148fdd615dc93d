"""Sums of encoded tensors, with error feedback at both ends.

    worker   encodes its gradient plus its residual, part by part; each part goes to
             its owner (all_to_all)
    owner    adds all parts in rank order, in float32, plus *its* residual; encodes the
             sum once, and all get that (all_gather)
    all      decode the same codes, the owner too: the same bits everywhere

Each element is encoded twice, whatever the number of ranks. With a 1-bit sign codec
this is the communication of 1-bit Adam: a thirtieth of the bytes, and errors that are
corrected in the next step instead of accumulating.

    sent per rank   codes of others' parts, and (n-1) times the code of its own part

Seide et al., "1-bit stochastic gradient descent" (2014); Tang et al., "1-bit Adam"
(2021).
"""

from __future__ import annotations

import numpy as np

from unisono import codecs
from unisono.codecs.feedback import Feedback
from unisono.codecs.topk import Floats
from unisono.runtime.call import arguments
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.collectives import Collectives
from unisono.runtime.compress.sums import CompressedSum
from unisono.runtime.stages import Stages

_COPIES = Reduction("sum")


class CodedSum(CompressedSum):
    """The sum of encoded tensors, with error feedback at workers and owners."""

    def __init__(self, comm: Collectives, codec: codecs.Codec, count: int) -> None:
        """The owner's residual is only of its own part."""
        super().__init__(comm, count)
        self._codec = codec
        self._worker = Feedback(self.memory, count)
        size = self.mine.stop - self.mine.start
        self.memory["owner"] = np.zeros(size, np.float32)
        sizes = zip(self.bounds, self.bounds[1:], strict=False)
        self._spans = [slice(begin, end) for begin, end in sizes]
        self._nbytes = [codec.nbytes(s.stop - s.start) for s in self._spans]

    def reduce(self, x: Floats, *, whole: bool = True, label: str = "") -> Stages:
        """Turn x into the sum, as decoded."""
        comm, codec, rank = self.comm, self._codec, self.comm.rank
        # With stochastic rounding, every rank has random numbers of its own.
        key = codecs.key(self.steps, rank) if codec.stochastic else 0
        self.steps += 1
        wanted = self._worker.wanted(x)
        codes = [codec.encode(wanted[span], key) for span in self._spans]
        for code, span in zip(codes, self._spans, strict=True):
            x[span] = codec.decode(code, span.stop - span.start)
        self._worker.sent_coarse(x)
        arrived = np.empty((comm.world_size, self._nbytes[rank]), np.uint8)
        call = arguments.all_to_all(
            comm.core.position,
            np.concatenate(codes),
            arrived.reshape(-1),
            self._nbytes,
            [self._nbytes] * comm.world_size,
        )
        yield comm.core.run(call, _COPIES, CallOptions(async_op=True, label=label))
        total = np.zeros(self.mine.stop - self.mine.start, np.float32)
        for code in arrived:
            codec.add(total, code)
        if not whole:
            x[self.mine] = total
            return
        yield from self._share_result(total, x, key, label)

    def _share_result(self, total: Floats, x: Floats, key: int, label: str) -> Stages:
        """Encode this rank's part once more, and send it to all."""
        comm, codec, kept = self.comm, self._codec, self.memory["owner"]
        with np.errstate(invalid="ignore"):
            total += kept
            code = codec.encode(total, key)
            kept[:] = total - codec.decode(code, total.size)
        np.copyto(kept, 0, where=~np.isfinite(kept))
        everything = np.empty(sum(self._nbytes), np.uint8)
        yield comm.all_gather(
            code, out=everything, counts=self._nbytes, async_op=True, label=label
        )
        begin = 0
        for nbytes, span in zip(self._nbytes, self._spans, strict=True):
            part = everything[begin : begin + nbytes]
            x[span] = codec.decode(part, span.stop - span.start)
            begin += nbytes
