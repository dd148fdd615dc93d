"""A trace in numbers: worked out by hand for small ones."""

import pytest

from unisono.chrome import Sheet
from unisono.trace.draw import COLLECTIVE
from unisono.trace.summary import differences, differences_text, summarise

MB = 1_000_000


def call(
    sheet, rank, seq, begin, end, *, arrived, works=(), asynchronous=False, nbytes=MB
):
    """One rank's side of an all_reduce on four ranks."""
    args = {
        "Process Group Description": "world",
        "Seq": seq,
        "Group size": 4,
        "collective": "all_reduce",
        "algorithm": "ring",
        "bytes": nbytes,
        "async": asynchronous,
        "line": f"train.py:{rank}",
    }
    sheet.slice(rank, "calls", "all_reduce", begin, end, category=COLLECTIVE, args=args)
    about = {"seq": seq}
    sheet.slice(
        *(rank, "arrival", "all had arrived", arrived, arrived + 1),
        category="arrival",
        args=about,
    )
    for begun, ended in works:
        sheet.slice(
            *(rank, "receives", "from 1", begun, ended),
            category="receives",
            args={**about, "kind": "reduce"},
        )


def late_by(us):
    """Two calls; rank 3 comes late to both, by so many microseconds."""
    sheet = Sheet()
    for rank in range(4):
        late = us if rank == 3 else rank
        for seq in (1, 2):
            at = seq * 10_000.0
            call(
                *(sheet, rank, seq, at, at + us + 1000),
                arrived=at + late,
                works=[(at + us + 10, at + us + 260), (at + us + 300, at + us + 550)],
            )
    return sheet.document()


def test_time_counts_from_the_last_arrival():
    (row,) = summarise(late_by(700)).rows
    assert (row.collective, row.algorithm, row.calls) == ("all_reduce", "ring", 2)
    assert row.time == pytest.approx(1000e-6)
    assert row.total == pytest.approx(2000e-6)
    assert row.busbw == pytest.approx(MB * 1.5 / 1000e-6)
    assert row.floor == pytest.approx(500e-6)
    assert row.share == pytest.approx(0.5)


def test_late_ranks_are_listed_with_their_cost():
    first, *_ = summarise(late_by(700)).late
    assert (first.rank, first.last, first.at) == (3, 2, "train.py:3")
    assert first.cost == pytest.approx(2 * (700 - 2) * 1e-6)
    assert first.worst == pytest.approx(698e-6)


def test_blocking_calls_are_exposed_and_asynchronous_ones_only_while_awaited():
    sheet = Sheet()
    call(sheet, 0, 1, 0, 100, arrived=0)
    call(sheet, 0, 2, 200, 300, arrived=200, asynchronous=True)
    sheet.slice(
        *(0, "waiting", "for its call", 270, 310),
        category="waiting",
        args={"seq": 2, "kind": "block"},
    )
    found = summarise(sheet.document())
    assert found.busy == pytest.approx(200e-6)
    assert found.exposed == pytest.approx(130e-6)
    assert found.overlap == pytest.approx(0.35)


def test_two_traces_are_compared_by_kind_of_call():
    slow, quick = summarise(late_by(700)), summarise(late_by(100))
    (change,) = differences(slow, quick)
    assert change.ratio == pytest.approx(1.0)  # lateness is not the collective's
    other = Sheet()
    call(other, 0, 1, 0, 4000, arrived=0, nbytes=2 * MB)
    changes = differences(slow, summarise(other.document()))
    assert [(c.nbytes, c.before is None, c.after is None) for c in changes] == [
        (2 * MB, True, False),
        (MB, False, True),
    ]
    text = differences_text(changes)
    assert "2 → 0" in text
    assert "0 → 1" in text


def test_empty_trace_has_an_empty_summary():
    found = summarise(Sheet().document())
    assert (found.ranks, found.calls, found.rows, found.late) == (0, 0, (), ())
    assert "0 calls" in str(found)
