"""What this machine would choose: by the tuned table if there is one, or by rules."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.cli.output import print_json, print_text
from unisono.errors import BadArgument
from unisono.runtime.observe.explain import chooser, runner_up, when_tuned
from unisono.runtime.plan.select import AlgorithmChoice, choose
from unisono.runtime.plan.tuned import Tuned, tuned_here
from unisono.schedule.collective import collective as find_collective
from unisono.units import format_bytes, format_seconds

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
_ITEMSIZE = 4


def tell(
    collective: str, sizes: Sequence[int], n: int, per_host: int, *, json: bool
) -> int:
    """Print the choice for each size; elements are of four bytes."""
    what = find_collective(collective).name
    if not 1 <= n <= 4096 or per_host < 1:
        raise BadArgument(
            f"-n {n} --per-host {per_host}: expected 1 to 4096, and 1 or more"
        )
    table = tuned_here()
    hosts = tuple(rank // per_host for rank in range(n))
    choices = [(size, _choice(what, size, n, hosts, table)) for size in sizes]
    if json:
        print_json([_plain(what, size, n, choice) for size, choice in choices])
        return 0
    for size, choice in choices:
        print_text(f"{what} of {format_bytes(size)} on {n} ranks by {choice.algorithm}")
        print_text(f"  why        {choice.why}")
        print_text(f"  chosen by  {chooser(choice, table)}")
        if choice.predicted:
            print(f"  predicted  {format_seconds(choice.predicted)}")
        if choice.row is not None:
            print_text(f"  measured   {when_tuned(choice.row)}")
        if choice.runner_up:
            print_text(f"  runner-up  {runner_up(choice)}")
    return 0


def _choice(
    what: str, size: int, n: int, hosts: tuple[int, ...], table: Tuned | None
) -> AlgorithmChoice:
    common = {"named": None, "reproducible": False, "hosts": hosts}
    return choose(what, size, n, tuned=table, itemsize=_ITEMSIZE, **common)  # type: ignore[arg-type]


def _plain(what: str, size: int, n: int, choice: AlgorithmChoice) -> dict[str, object]:
    row = choice.row
    return {
        "collective": what,
        "size": size,
        "n": n,
        "algorithm": choice.algorithm,
        "by": choice.by,
        "why": choice.why,
        "predicted": choice.predicted or None,
        "measured": row.measured if row else None,
        "runner_up": choice.runner_up,
        "runner_up_predicted": choice.runner_up_predicted or None,
        "runner_up_measured": row.runner_up_measured if row else None,
    }
