"""Barriers with one notice from rank to rank: every rank still hears of all."""

import numpy as np
import pytest

from unisono import schedule
from unisono.schedule.lower import lower
from unisono.schedule.notices import joined_notices

BY = ["direct", "dissemination", "hierarchical:levels=4x8,by=direct/dissemination"]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("n", [32])
def test_every_rank_hears_of_all(by, n):
    known = np.eye(n, dtype=bool)
    for step in joined_notices(schedule("barrier", by, n)):
        src, dst, *_ = step.flat()
        before = known.copy()
        for s, d in zip(src.tolist(), dst.tolist(), strict=True):
            known[d] |= before[s]
    assert known.all()


@pytest.mark.parametrize("by", BY)
def test_ranks_send_once_to_each_rank_in_a_step(by):
    n = 32
    whole = schedule("barrier", by, n)
    joined = joined_notices(whole)
    for step, before in zip(joined, whole, strict=True):
        pairs = list(zip(*(a.tolist() for a in step.flat()[:2]), strict=True))
        assert len(pairs) == len(set(pairs))
        wanted = zip(*(a.tolist() for a in before.flat()[:2]), strict=True)
        assert set(pairs) == set(wanted)


def test_a_program_has_as_many_messages_as_steps_across():
    hosts = [r // 4 for r in range(32)]
    made = joined_notices(schedule("barrier", BY[2], 32))
    sent = [len(p.messages) for p in lower(made, hosts=hosts).programs]
    assert max(sent) == 3  # dissemination between 8 hosts
