"""The driver of a world of actors: it places and starts them, and collects results.

Ranks are numbered so that those of one host stand together, whatever bundles they were
given: hierarchies follow from the order of ranks. One wait hears of results and deaths
alike, in the order in which they come; first is the failure that does not merely tell
of another's end.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import unisono
from unisono.errors import ConnectFailed, PeerLost, UnisonoError
from unisono.interop.ray.actor import ActorAddress, RankActor, places
from unisono.launch.exceptions import RankReport

_GRACE_S = 5.0  # for the others to report
_LOG = logging.getLogger("unisono")


@dataclass(frozen=True)
class RayJob:
    """What to run, and on what."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    takes_comm: bool  # whether `fn` is given a communicator
    resources: dict[str, float]
    strategy: str
    placement_s: float
    environment: dict[str, str]
    runtime_env: dict[str, Any]


def play(plan: RayJob, ranks: int, *, restarts: int, least: int) -> list[Any]:
    """The results by rank, after so many restarts at most."""
    while True:
        gang = _Attempt(plan, ranks)
        try:
            return gang.run()
        except Exception as error:
            left = ranks - len(gang.dead)
            if not restarts:
                raise
            restarts -= 1
            if gang.dead and least <= left < ranks:
                ranks = left
            _LOG.warning("run: %s; started again with %d ranks", error, ranks)


@dataclass
class _ActorState:
    """One actor, seen from the driver."""

    actor: Any
    where: ActorAddress | None = None
    report: RankReport | None = None
    at: float = 0.0
    died: bool = False
    number: int = -1

    def __str__(self) -> str:
        if self.where is None:
            return f"rank {self.number}"
        return (
            f"rank {self.number} (pid {self.where.pid} on node "
            f"{self.where.address}, {self.where.node[:12]})"
        )


class _Attempt:
    """One attempt."""

    def __init__(self, plan: RayJob, n: int) -> None:
        self._plan, self._n = plan, n
        self._ranks: list[_ActorState] = []
        self._named: set[int] = set()  # as lost, by others

    @property
    def dead(self) -> set[int]:
        """Ranks whose actor died, or whose death others report and that did not answer.

        Who leaves because another died may be named by a third; but it has reported.
        """
        died = {rank.number for rank in self._ranks if rank.died}
        silent = {rank.number for rank in self._ranks if rank.report is None}
        return died | (self._named & silent)

    def run(self) -> list[Any]:
        """Place the actors, start the ranks, wait for results, end."""
        group = placement_group(
            [self._plan.resources] * self._n, strategy=self._plan.strategy
        )
        try:
            self._place(group)
            self._number_ranks()
            self._listen()
        finally:
            for rank in self._ranks:
                with contextlib.suppress(Exception):
                    ray.kill(rank.actor)
            remove_placement_group(group)
        failed = [rank for rank in self._ranks if rank.report and rank.report.failed]
        if failed:
            raise _failure(min(failed, key=_order))
        return [rank.report.result for rank in self._ranks if rank.report]

    def _place(self, group: Any) -> None:
        plan = self._plan
        if not group.wait(plan.placement_s):
            raise ConnectFailed(
                f"run: {self._n} times {plan.resources} cannot be placed "
                f"({plan.strategy}) within {plan.placement_s:g} s; of "
                f"{_amounts(plan, ray.cluster_resources())} in the cluster, "
                f"{_amounts(plan, ray.available_resources())} are free",
                missing=range(self._n),
            )
        rest = dict(plan.resources)
        options: dict[str, Any] = {
            "num_cpus": rest.pop("CPU", 0),
            "num_gpus": rest.pop("GPU", 0),
            "memory": rest.pop("memory", None),
            "resources": rest,
            "max_restarts": 0,
        }
        if plan.runtime_env:
            options["runtime_env"] = plan.runtime_env
        actor = ray.remote(RankActor)
        for bundle in range(self._n):
            at = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            )
            made = actor.options(scheduling_strategy=at, **options).remote()
            self._ranks.append(_ActorState(made, number=bundle))

    def _number_ranks(self) -> None:
        """Ask all where they are, and number them anew, host by host."""
        for rank in self._ranks:
            try:
                rank.where = ray.get(rank.actor.where.remote())
            except ray.exceptions.RayError as why:
                raise ConnectFailed(
                    f"run: rank {rank.number} of {self._n} was not started: "
                    f"{_first_line(why)}; is unisono {unisono.__version__} installed "
                    "on every node, or named in runtime_env?",
                    missing=[rank.number],
                ) from why
            if rank.where.version != unisono.__version__:
                raise ConnectFailed(
                    f"run: {rank} has unisono {rank.where.version}, the driver "
                    f"{unisono.__version__}; install the same on all nodes",
                    missing=[rank.number],
                )
        hosts = [self._where(rank).host for rank in self._ranks]
        self._ranks.sort(key=lambda rank: hosts.index(self._where(rank).host))
        for number, rank in enumerate(self._ranks):
            rank.number = number

    @staticmethod
    def _where(rank: _ActorState) -> ActorAddress:
        assert rank.where is not None
        return rank.where

    def _variables(self) -> list[dict[str, str]]:
        hosts = [self._where(rank).host for rank in self._ranks]
        common = self._plan.environment | {"UNISONO_JOB": secrets.token_hex(16)}
        if len(set(hosts)) > 1:
            first = self._where(self._ranks[0])
            host = f"[{first.address}]" if ":" in first.address else first.address
            common["UNISONO_ADDRESS"] = f"{host}:{first.port}"
            common["UNISONO_SECRET"] = secrets.token_hex(32)
        return [common | place for place in places(hosts)]

    # Listening

    def _listen(self) -> None:
        plan = self._plan
        work = ray.put((plan.fn, plan.args))  # once, however many ranks there are
        waiting = {
            rank.actor.play.remote(variables, plan.takes_comm, work): rank
            for rank, variables in zip(self._ranks, self._variables(), strict=True)
        }
        until: float | None = None
        while waiting:
            left = None if until is None else max(until - time.monotonic(), 0.0)
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
            if not ready:  # the grace is over
                return
            for reference in ready:
                rank = waiting.pop(reference)
                self._hear(rank, reference)
                if until is None and rank.report and rank.report.failed:
                    until = time.monotonic() + _GRACE_S

    def _hear(self, rank: _ActorState, reference: Any) -> None:
        rank.at = time.monotonic()
        try:
            rank.report = pickle.loads(ray.get(reference))
        except ray.exceptions.RayActorError as why:
            rank.died = True
            where = self._where(rank)
            lost = PeerLost(
                f"run: {rank} died before it returned: {_first_line(why)}",
                ranks=[rank.number],
                pids=[where.pid],
                host=where.address,
            )
            rank.report = RankReport(failed=True, error=lost)
        except Exception as why:  # a result that cannot be read here
            error = UnisonoError(f"run: what {rank} returned cannot be read: {why}")
            rank.report = RankReport(failed=True, error=error)
        else:
            if isinstance(rank.report.error, PeerLost):
                self._named.update(rank.report.error.ranks)


def _order(rank: _ActorState) -> tuple[bool, float]:
    """Which failure is first: reports of another's end come last."""
    return rank.report is not None and rank.report.lost_a_peer, rank.at


def _failure(rank: _ActorState) -> BaseException:
    report = rank.report or RankReport()
    error = report.error
    if error is None:
        error = UnisonoError(f"run: {rank} raised {report.summary}")
    elif not isinstance(error, Exception):  # its exit is not the driver's
        error = PeerLost(
            f"run: {rank} left by {report.summary}, without a result",
            ranks=[rank.number],
        )
    if report.traceback:
        error.add_note(f"On {rank} of run:\n\n{report.traceback}")
    return error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _amounts(plan: RayJob, resources: dict[str, float]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in plan.resources)
