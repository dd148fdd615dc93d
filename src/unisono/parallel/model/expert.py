"""Mixture of experts: each rank has some of the experts; tokens are sent to them.

    moe = MoE(gate=nn.Linear(width, 8), experts=[Mlp(width) for _ in range(8)], comm=ep)
    y = moe(x)                        x: (..., width), this rank's own tokens

A gate scores the experts for each token, the best `top_k` process it, and the result is
their sum, weighted by their scores. Each rank has its own tokens (as in data
parallelism) and E/n of the experts:

    counts      all_gather     the number of tokens each rank has for each expert
    dispatch    all_to_all     tokens, sorted by expert, to the ranks that have them
    combine     all_to_all     results, back to the tokens' ranks

The numbers of tokens are uneven, change from step to step, and may be zero. Without a
capacity no token is dropped. With `capacity_factor`, an expert takes at most that times
the even share of each rank's tokens; choices beyond it are dropped, second choices
before first ones and later tokens first, and add nothing to the result (the residual
connection carries these tokens).

    sent per rank   forward: the tokens for other ranks' experts, and results for other
                    ranks' tokens; backward: the gradients of the same

An expert's gradient comes from all ranks' tokens. It is divided by the number of ranks,
as for the mean of their losses, which is what DDP does for all other parameters. `DDP`
of a module with experts does not average them, since ranks have different ones.

Lepikhin et al., "GShard" (2020); Fedus, Zoph, Shazeer, "Switch transformers" (2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unisono.errors import BadArgument, whole_number
from unisono.parallel.common import functions
from unisono.parallel.common.agreement import setup_together
from unisono.parallel.common.marking import forbid_assign, mark_sharded
from unisono.parallel.common.module_state import sync_module_state
from unisono.parallel.common.shard_math import divide_evenly
from unisono.runtime.communicator import Communicator
from unisono.runtime.failing import fail_together


class _Route(NamedTuple):
    """Where this rank's tokens go: one entry per token and choice, sorted by expert."""

    token: Tensor  # the token's number
    weight: Tensor  # the expert's score for it
    counts: Tensor  # the number of entries for each expert


class MoE(nn.Module):
    """Experts over the ranks of `comm`; every rank calls it with its own tokens.

    After a forward pass `balance_loss` is to be added to the loss, times a small
    number, so that experts are used evenly (Switch); `load` is the number of tokens
    that all ranks sent to each expert, and `dropped` how many choices of this rank were
    dropped.
    """

    balance_loss: Tensor
    load: Tensor
    dropped: int

    def __init__(
        self,
        gate: nn.Module,
        experts: Sequence[nn.Module],
        comm: Communicator,
        *,
        top_k: int = 2,
        capacity_factor: float | None = None,
        replicas: Communicator | None = None,
    ) -> None:
        """Keep this rank's share of the experts; all ranks pass the same ones.

        `replicas` are ranks that have the same experts, as another axis of a mesh.
        """
        super().__init__()
        self.comm, self.replicas = comm, replicas
        self.gate = gate
        self.num_experts = len(experts)
        self.capacity_factor = capacity_factor
        outer = comm if replicas is None else replicas
        with setup_together(outer, "MoE"), setup_together(comm, "MoE") as settings:
            self.top_k = self._checked(top_k)
            mine = divide_evenly("MoE: experts", self.num_experts, comm.world_size)
            settings.append(
                f"{len(experts)} experts, top_k = {top_k}, capacity {capacity_factor}"
            )
        all_modules = nn.ModuleList([gate, *experts])
        for others in (replicas, comm):
            if others is not None:
                sync_module_state(others, all_modules, "MoE")
        self.first = comm.rank * mine
        self.experts = nn.ModuleList(experts[self.first : self.first + mine])
        for name, param in self.experts.named_parameters():
            mark_sharded(param, comm, averaged=True)
            if param.requires_grad:
                self._average(name, param)
        forbid_assign(self, "MoE")

    def _checked(self, top_k: int) -> int:
        if not 1 <= whole_number("MoE: top_k", top_k) <= self.num_experts:
            raise BadArgument(
                f"MoE: top_k = {top_k}: expected 1..{self.num_experts}, the experts"
            )
        capacity = self.capacity_factor
        if capacity is not None and not capacity > 0:
            raise BadArgument(
                f"MoE: capacity_factor = {capacity}: expected more than 0, or None to "
                "drop nothing"
            )
        return top_k

    def forward(self, x: Tensor) -> Tensor:
        """The experts' output for this rank's tokens, in the shape of x."""
        rows = x.reshape(-1, x.shape[-1])
        route = self._route(rows)
        n = self.comm.world_size
        all_counts = self._gather_counts(route.counts)
        sent = route.counts.view(n, -1).sum(1).tolist()
        here = all_counts[:, self.first : self.first + len(self.experts)]
        received = here.sum(1).tolist()
        dispatched = functions.exchange(
            rows[route.token], self.comm, sent, received, label="MoE: dispatch"
        )
        processed = self._run_experts(dispatched, here)
        back = functions.exchange(
            processed, self.comm, received, sent, label="MoE: combine"
        )
        weighted = back * route.weight.unsqueeze(-1).to(back.dtype)
        result = back.new_zeros(rows.shape[0], back.shape[-1])
        result = result.index_add(0, route.token, weighted)
        return result.view(*x.shape[:-1], back.shape[-1])

    def _route(self, rows: Tensor) -> _Route:
        """Choose experts for the tokens, and sort the choices by expert."""
        scores = self.gate(rows).float() if rows.dtype.itemsize < 4 else self.gate(rows)
        if scores.shape[-1] != self.num_experts:
            with fail_together(self.comm, "an error: the gate"):
                raise BadArgument(
                    f"MoE: the gate scores {scores.shape[-1]} experts, there are "
                    f"{self.num_experts}"
                )
        probabilities = scores.softmax(-1)
        best, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            best = best / best.sum(-1, keepdim=True)
        # First choices of all tokens come first; choices are dropped from the end.
        expert = chosen.t().reshape(-1)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=self.num_experts)
        self._mean_probabilities = probabilities.sum(0) / max(rows.shape[0], 1)
        if self.capacity_factor is not None:
            even = expert.numel() / self.num_experts
            capacity = ceil(self.capacity_factor * even)
            starts = counts.cumsum(0) - counts
            every = torch.arange(expert.numel(), device=expert.device)
            rank_in_expert = every - starts[expert[order]]
            order = order[rank_in_expert < capacity]
            counts = counts.clamp(max=capacity)
        self.dropped = expert.numel() - order.numel()
        token = order % max(rows.shape[0], 1)
        return _Route(token, best.t().reshape(-1)[order], counts)

    def _gather_counts(self, counts: Tensor) -> Tensor:
        """Every rank's counts (n, E); sets `load` and `balance_loss` from them."""
        every: Tensor = self.comm.all_gather(counts.unsqueeze(0), label="MoE: counts")
        self.load = every.sum(0)
        used = self.load.to(self._mean_probabilities.dtype) / self.load.sum().clamp(
            min=1
        )
        self.balance_loss = self.num_experts * (used * self._mean_probabilities).sum()
        return every

    def _run_experts(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Run each expert on its tokens; input and output are sorted by rank."""
        numbers = torch.arange(counts.shape[1], device=counts.device)
        numbers = numbers.repeat(counts.shape[0])
        by_expert = numbers.repeat_interleave(counts.reshape(-1)).argsort(stable=True)
        parts = tokens[by_expert].split(counts.sum(0).tolist())
        outputs = [run(part) for run, part in zip(self.experts, parts, strict=True)]
        return torch.cat(outputs)[by_expert.argsort()]

    def _average(self, name: str, param: nn.Parameter) -> None:
        """From now on average its gradient, as for the mean of all ranks' losses."""
        others, label = self.replicas, f"MoE: {name}"
        count = self.comm.world_size * (others.world_size if others else 1)

        def averaged(grad: Tensor) -> Tensor:
            own: Tensor = grad / count
            return own if others is None else others.all_reduce(own, label=label)

        param.register_hook(averaged)
