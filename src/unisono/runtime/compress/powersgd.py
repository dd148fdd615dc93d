"""PowerSGD: matrices as products of low-rank factors, by two plain all_reduces.

A tensor here is a bucket of gradients, concatenated. Matrices whose factors are smaller
are sent as factors; the others are sent whole, together with the first factors, so that
there are always two all_reduces.

    sent   4 r(a+b) bytes for each matrix, 4 for every other element; twice (n-1)/n of
           that per rank, as an all_reduce does
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import numpy as np

from unisono.codecs.feedback import Feedback
from unisono.codecs.powersgd import PowerSGD, first_guess, orthogonal, product
from unisono.codecs.topk import Floats
from unisono.runtime.collectives import Collectives
from unisono.runtime.compress.sums import CompressedSum
from unisono.runtime.stages import Stages

Shape = tuple[int, ...]


class LowRankSum(CompressedSum):
    """The sum of tensors of these shapes, as low-rank factors where that is smaller."""

    def __init__(
        self,
        comm: Collectives,
        how: PowerSGD,
        shapes: Sequence[Shape],
        *,
        feedback: bool = True,
    ) -> None:
        """Every matrix has its Q, the starting point of each call."""
        ends = list(accumulate((prod(shape) for shape in shapes), initial=0))
        super().__init__(comm, ends[-1])
        self._how = how
        self._feedback = Feedback(self.memory, ends[-1]) if feedback else None
        self._thin: list[tuple[slice, tuple[int, int, int]]] = []
        self._whole: list[slice] = []
        for shape, begin, end in zip(shapes, ends, ends[1:], strict=False):
            sizes = how.sizes(shape)
            if sizes is None:
                self._whole.append(slice(begin, end))
            else:
                self._thin.append((slice(begin, end), sizes))
        for i in range(len(self._thin)):
            self._restart(i)

    def _restart(self, i: int) -> None:
        _, b, r = self._thin[i][1]
        self.memory[f"q{i}"] = first_guess(b, r, i)

    def reduce(self, x: Floats, *, whole: bool = True, label: str = "") -> Stages:
        """Turn x into the sum, of matrices its low-rank approximation."""
        n = self.comm.world_size
        warming = self.steps < self._how.warmup
        self.steps += 1
        if warming:
            yield self.comm.all_reduce(x, async_op=True, label=label)
            return
        wanted = x if self._feedback is None else self._feedback.wanted(x)
        matrices = [wanted[at].reshape(a, b) for at, (a, b, _) in self._thin]
        with np.errstate(invalid="ignore", over="ignore"):
            left = [m @ self.memory[f"q{i}"] for i, m in enumerate(matrices)]
            rest = [wanted[at] for at in self._whole]
            left, rest = yield from self._added(left, rest, f"{label} P".strip())
            left = [orthogonal(p) for p in left]
            right = [m.T @ p for m, p in zip(matrices, left, strict=True)]
            right, _ = yield from self._added(right, [], f"{label} Q".strip())
            for at, part in zip(self._whole, rest, strict=True):
                x[at] = part
            for i, (at, _) in enumerate(self._thin):
                x[at] = product(left[i], right[i]).reshape(-1)
                self.memory[f"q{i}"] = right[i]
                if not np.isfinite(right[i]).all():
                    self._restart(i)
            if self._feedback is not None:
                self._keep(x, n)

    def _added(self, factors: list[Floats], rest: list[Floats], label: str) -> Stages:
        """The sums of factors and other tensors, in one all_reduce."""
        every = [*factors, *rest]
        flat = np.concatenate([np.zeros(0, np.float32), *(f.ravel() for f in every)])
        yield self.comm.all_reduce(flat, async_op=True, label=label)
        ends = accumulate(f.size for f in every)
        parts = [
            flat[end - f.size : end].reshape(f.shape)
            for f, end in zip(every, ends, strict=True)
        ]
        return parts[: len(factors)], parts[len(factors) :]

    def _keep(self, x: Floats, n: int) -> None:
        """Keep the difference between this rank's matrices and the mean."""
        assert self._feedback is not None
        copy = self._feedback.residual.copy()
        for at, _ in self._thin:
            copy[at] = x[at] / np.float32(n)
        self._feedback.sent_coarse(copy)
