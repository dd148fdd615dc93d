"""unisono inside Ray: a world of actors, and a backend of `ray.util.collective`.

    import unisono.interop.ray as unisono_ray

    def train(comm, rate):
        ...
        return comm.all_reduce(gradients)

    results = unisono_ray.run(train, 0.1, num_ranks=8, resources={"CPU": 4})

Every rank is an actor of its own, in a placement group. Rank 0's actor finds the
address and a free port on its node; the driver makes the job's secret; both reach the
ranks as arguments of a call, by Ray's own means and no other. Whoever can read what
actors are sent can read the secret: Ray's cluster is the border of trust.

When a rank fails, the others have a moment to report and are then ended. The failure
that came first is raised here, as the exception that it was, with its rank and node
in a note; an actor that died is a PeerLost which names them.

    register()    # once in the driver and in each actor
    ray.util.collective.init_collective_group(n, rank, backend="unisono")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

from unisono.errors import BadArgument, MissingExtra, unknown, whole_number

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as missing:
    if missing.name != "ray":
        raise
    raise MissingExtra("ray", "unisono.interop.ray") from missing

from unisono.interop.ray.actor import play_script
from unisono.interop.ray.collective import register
from unisono.interop.ray.driver import RayJob, play

__all__ = ["register", "run", "run_script"]

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class RayOptions(TypedDict, total=False):
    """How a world of actors is made; all but the first have defaults."""

    num_ranks: Required[int]
    resources: Mapping[str, float] | None  # of each rank; {"CPU": 1}
    strategy: str  # of the placement group; PACK
    restarts: int  # after a failure; 0
    min_ranks: int | None  # with as few as these if some died; as before
    timeout_s: float | None  # of every collective
    placement_s: float  # until the resources must be there; 60
    environment: Mapping[str, str] | None  # set before anything runs
    runtime_env: Mapping[str, Any] | None  # Ray's


def run(fn: Callable[..., Any], *args: Any, **options: Unpack[RayOptions]) -> list[Any]:
    """Run `fn(comm, *args)` on `num_ranks` actors and return the results by rank.

    `resources` are what each rank takes, {"CPU": 1} by default; `strategy` is the
    placement group's, PACK or SPREAD. After a failure all is started again, up to
    `restarts` times: with as many ranks as before, or, if `min_ranks` allows it, with
    those that are left when some have died. `timeout_s` is the deadline of every
    collective, `placement_s` how long to wait for the resources. `environment` is set
    before `fn` runs; `runtime_env` is Ray's.
    """
    return _play(fn, args, True, **options)


def run_script(path: str | Path, *argv: str, **options: Unpack[RayOptions]) -> None:
    """Run a script as `num_ranks` actors: one that calls `unisono.init()` itself.

    It is the same script that `unisono run` and the other engines start. The file must
    be there on every node; what it prints goes where Ray's actors print.
    """
    _play(play_script, (str(path), argv), False, **options)


def _play(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    takes_comm: bool,
    *,
    num_ranks: int,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    restarts: int = 0,
    min_ranks: int | None = None,
    timeout_s: float | None = None,
    placement_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> list[Any]:
    ranks = _at_least_one("num_ranks", num_ranks)
    if strategy not in _STRATEGIES:
        raise unknown("strategy of a placement group", str(strategy), _STRATEGIES)
    again = whole_number("run: restarts", restarts)
    least = ranks if min_ranks is None else _at_least_one("min_ranks", min_ranks)
    if again < 0 or least > ranks:
        raise BadArgument(
            f"run: restarts = {again}, min_ranks = {least}: expected 0 or more, and "
            f"at most num_ranks = {ranks}"
        )
    variables = dict(environment or {})
    if timeout_s is not None:
        variables["UNISONO_TIMEOUT_S"] = str(float(timeout_s))
    plan = RayJob(
        fn=fn,
        args=args,
        takes_comm=takes_comm,
        resources=_resources(resources),
        strategy=strategy,
        placement_s=placement_s,
        environment=variables,
        runtime_env=dict(runtime_env or {}),
    )
    return play(plan, ranks, restarts=again, least=least)


def _at_least_one(name: str, value: object) -> int:
    number = whole_number(f"run: {name}", value)
    if number < 1:
        raise BadArgument(f"run: {name} = {number}: a world has at least one rank")
    return number


def _resources(given: Mapping[str, float] | None) -> dict[str, float]:
    resources = {"CPU": 1.0} if given is None else dict(given)
    for name, amount in resources.items():
        if not isinstance(name, str) or not amount > 0:
            raise BadArgument(
                f"run: resources = {resources}: expected amounts above 0 by name, as "
                'in {"CPU": 2, "GPU": 1}'
            )
    if not resources:
        raise BadArgument("run: resources = {}: a rank takes something, as {'CPU': 1}")
    return resources
