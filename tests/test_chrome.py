"""The sheet that traces are drawn on: what Perfetto would take for something else."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.chrome import COMING, INSTANT, Sheet
from unisono.trace import faults

PLACES = st.tuples(st.integers(0, 3), st.sampled_from(["sends", "receives", "ranges"]))
TIMES = st.floats(0, 20, allow_nan=False)


def events(doc, phase):
    return [e for e in doc["traceEvents"] if e["ph"] == phase]


def ns(us):
    return round(us * 1e3)


@pytest.mark.sweep
@given(
    st.lists(st.tuples(PLACES, TIMES, TIMES), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=8),
)
def test_any_sheet_passes_the_strict_checks(slices, arrows):
    sheet = Sheet()
    made = [sheet.slice(*at, "x", begin, end) for at, begin, end in slices]
    for source, sink in arrows:
        sheet.arrow(made[source % len(made)], made[sink % len(made)], 7)
    doc = sheet.document()
    assert faults(doc) == []
    assert len(events(doc, "s")) == len(events(doc, "f")) == len(arrows)
    for phase, ends in (("s", "sent"), ("f", "came")):
        for event, arrow in zip(events(doc, phase), sheet.arrows, strict=True):
            meant = getattr(arrow, ends)
            opened = [
                s
                for s in sheet.slices
                if (s.rank, s.tid) == (meant.rank, meant.tid)
                and ns(s.begin) <= ns(event["ts"])
            ]
            assert opened[-1] is meant  # the last that was opened there
    assert all(arrow.sent.begin <= arrow.came.begin for arrow in sheet.arrows)


@given(st.integers(0, 10**12), st.integers(0, 10**6))
def test_times_are_the_same_rounded_or_truncated(begin, lasts):
    sheet = Sheet()
    sheet.slice(0, "sends", "x", begin / 1e3, (begin + lasts) / 1e3)
    (event,) = events(sheet.document(), "X")
    assert int(event["ts"] * 1000.0) == round(event["ts"] * 1000.0) == begin
    lasts = max(1, lasts)
    assert int(event["dur"] * 1000.0) == round(event["dur"] * 1000.0) == lasts


def test_awaited_message_has_a_slice_from_its_sending():
    sheet = Sheet()
    early = sheet.slice(1, "messages", "recv from 0", 1, 9, category="message")
    sent = sheet.slice(0, "messages", "send to 1", 4, 6, category="message")
    sheet.arrow(sent, early, 100)
    doc = sheet.document()
    coming = [e for e in events(doc, "X") if e["cat"] == COMING]
    (event,) = coming
    assert (event["name"], event["ts"], event["dur"]) == ("from 0", 4.0, 5.0)
    assert event["tid"] == early.tid  # within the slice that waited
    counted = [(e["pid"], e["ts"], e["args"]["bytes"]) for e in events(doc, "C")]
    assert counted == [(0, 4.0, 100), (0, 9.0, 0)]


def test_clock_error_does_not_reverse_an_arrow():
    sheet = Sheet()
    came = sheet.slice(1, "receives", "from 0", 1, 2)
    sent = sheet.slice(0, "sends", "to 1", 3, 4)
    sheet.arrow(sent, came)
    doc = sheet.document()
    assert faults(doc) == []
    (arrow,) = sheet.arrows
    assert arrow.came.begin == 3
    assert arrow.came.end == pytest.approx(3 + INSTANT)


def test_thread_ids_are_unique_and_no_process_ids():
    sheet = Sheet()
    for rank in range(6):
        for lane in ("calls", "sends", "waiting"):
            sheet.slice(rank, lane, "x", 0, 1)
    named = [
        e for e in events(sheet.document(), "M") if e["name"].startswith("thread_")
    ]
    tids = Counter(e["tid"] for e in named if e["name"] == "thread_name")
    assert len(tids) == 18
    assert set(tids.values()) == {1}
    assert tids.keys().isdisjoint(range(6))


def test_events_are_the_first_key_of_the_document():
    sheet = Sheet()
    sheet.slice(0, "sends", "x", 0, 1)
    first, *others = sheet.document(schemaVersion=2, traceName="t")
    assert first == "traceEvents"
    assert {"schemaVersion", "traceName", "displayTimeUnit"} <= set(others)
