"""An agreement that has ended without a world, in words."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.errors import ConnectFailed, PeerLost, UnisonoError
from unisono.runtime.world.agreement import (
    ActionKind,
    Agreement,
    AgreementAction,
    Proposal,
)
from unisono.transports.session import Peer


def agreement_error(
    step: AgreementAction, rules: Agreement, peers: Sequence[Peer]
) -> UnisonoError:
    """The error of a rank that is left out, or one of too few."""
    if step.kind is ActionKind.NO_MAJORITY:
        away = ", ".join(str(peers[r]) for r in step.ranks)
        return ConnectFailed(
            f"shrink: {away} did not call shrink within {rules.timeout_s:g} s or "
            "cannot be reached, and may be alive: from another host a process that "
            "exited and a network that refuses connections look the same. The "
            "ranks that are here are too few to continue without them (more than "
            f"half of {rules.n}, or half with rank 0): restart the job, call "
            "shrink with a longer timeout_s on all, or, if you know that they have "
            "exited, with dead=[their ranks]",
            missing=step.ranks,
        )
    return PeerLost(
        f"shrink: rank {rules.me} was left out: the others have continued "
        f"without it{_epoch_of(step.proposal)}, because it did not call shrink in "
        "time or could not be reached; start it again, with init(join=True), while "
        "they call grow",
        ranks=[rules.me],
        pids=[peers[rules.me].pid],
        host=peers[rules.me].host,
        collective="shrink",
    )


def _epoch_of(proposal: Proposal | None) -> str:
    if proposal is None or not proposal.members:
        return ""
    ranks = ", ".join(map(str, proposal.members))
    return f" in epoch {proposal.epoch} (ranks {ranks} of this one)"
