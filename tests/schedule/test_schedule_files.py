"""Schedules in files: what is written is read again, and what is wrong is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from unisono.algorithms import library
from unisono.errors import BadArgument, ScheduleError
from unisono.schedule import Schedule, load, save

law = settings(max_examples=60)
CASES = [*library(), ("all_reduce", "dissemination:carry"), ("broadcast", "tree+ring")]
SUFFIXES = (".json", ".npz")


def scheduled(case: tuple[str, str], n: int) -> Schedule:
    what, name = case
    return unisono.schedule(what, name, n)


def contents(schedule: Schedule) -> dict[str, object]:
    """All that a file keeps."""
    return {
        "collective": schedule.collective,
        "name": schedule.name,
        "n": schedule.n,
        "root": schedule.root,
        "chunks": schedule.num_chunks,
        "temporaries": schedule.num_temporaries,
        "steps": [(step.phase, list(step)) for step in schedule],
    }


@pytest.mark.parametrize("suffix", SUFFIXES)
@law
@given(case=st.sampled_from(CASES), n=st.integers(1, 9), data=st.data())
def test_saved_schedule_is_loaded_unchanged(tmp_path_factory, suffix, case, n, data):
    root = data.draw(st.integers(0, n - 1))
    made = scheduled(case, n).rooted_at(root)
    path = tmp_path_factory.getbasetemp() / f"schedule{suffix}"
    save(made, path)
    assert contents(load(path)) == contents(made)
    assert contents(load(str(path), verify=False)) == contents(made)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_temporaries_and_phases_are_kept(tmp_path, suffix):
    carry = unisono.schedule("all_reduce", "dissemination:carry", 7)
    save(carry, tmp_path / f"carry{suffix}")
    read = load(tmp_path / f"carry{suffix}")
    assert read.num_temporaries == carry.num_temporaries == 1
    assert any(step.renames for step in read)
    stack = unisono.schedule("all_reduce", "hierarchical", 6)
    save(stack, tmp_path / f"stack{suffix}")
    phases = [step.phase for step in load(tmp_path / f"stack{suffix}")]
    assert phases == [step.phase for step in stack]
    assert len(set(phases)) == 3


def document(n: int = 3) -> dict[str, Any]:
    """A right JSON file of an all_gather by ring, as data."""
    steps = [
        [[(c + h) % n, (c + h + 1) % n, c, "copy"] for c in range(n)]
        for h in range(n - 1)
    ]
    return {
        "format": "unisono.schedule/1",
        "collective": "all_gather",
        "algorithm": "by hand",
        "n": n,
        "num_chunks": n,
        "steps": steps,
    }


def written(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_handwritten_file_is_read(tmp_path):
    more = {"cost": {"rounds": 2}, "phases": ["first"]}
    read = load(written(tmp_path / "own.json", document() | more))
    assert (read.name, read.root, read.num_temporaries) == ("by hand", 0, 0)
    assert [step.phase for step in read] == ["first", "all_gather"]
    assert read.verify().transfers == 6


def test_json_has_names_only_where_they_change(tmp_path):
    path = tmp_path / "carry.json"
    save(unisono.schedule("all_reduce", "dissemination:carry", 3), path)
    rows = [row for step in json.loads(path.read_text())["steps"] for row in step]
    assert {len(row) for row in rows} == {4, 5}
    assert all(row[2] != row[4] for row in rows if len(row) == 5)


def with_row(row: list[Any]) -> dict[str, Any]:
    right = document()
    right["steps"][0][0] = row
    return right


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in document().items() if k != key}


MALFORMED = {
    "a list": [],
    "no steps": without("steps"),
    "no format": without("format"),
    "another format": document() | {"format": "unisono.schedule/2"},
    "no such collective": document() | {"collective": "all_gathr"},
    "n is a text": document() | {"n": "3"},
    "no ranks": document() | {"n": 0},
    "chunks do not fit": document() | {"num_chunks": 4},
    "root outside": document() | {"root": 3},
    "negative temporaries": document() | {"num_temporaries": -1},
    "steps are no lists": document() | {"steps": [1, 2]},
    "transfers are no lists": document() | {"steps": [[1, 2]]},
    "too short": with_row([0, 1, 0]),
    "too long": with_row([0, 1, 0, "copy", 0, 0]),
    "no such kind": with_row([0, 1, 0, "move"]),
    "no kind": with_row([0, 1, 0, None]),
    "half a rank": with_row([0.5, 1, 0, "copy"]),
    "rank as text": with_row(["0", 1, 0, "copy"]),
    "no chunk": with_row([0, 1, None, "copy"]),
    "too large for a rank": with_row([0, 2**63, 0, "copy"]),
    "beyond all numbers": with_row([0, 10**30, 0, "copy"]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_json_is_refused_with_the_name_of_the_file(tmp_path, case):
    path = written(tmp_path / "bad.json", MALFORMED[case])
    with pytest.raises(BadArgument, match=r"bad\.json: not a schedule"):
        load(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "text", [b"", b"{", b"PK", b"PK\x03\x04 but no archive", b"\xff\xfe"]
)
def test_files_of_other_kinds_are_refused(tmp_path, suffix, text):
    path = tmp_path / f"bad{suffix}"
    path.write_bytes(text)
    with pytest.raises(BadArgument, match="not a schedule"):
        load(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"cut{suffix}"
    save(unisono.schedule("all_gather", "ring", 5), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(BadArgument, match="not a schedule"):
        load(path)


def arrays(tmp_path: Path) -> dict[str, np.ndarray]:
    """The arrays of a right npz file."""
    save(unisono.schedule("all_gather", "ring", 4), tmp_path / "right.npz")
    with np.load(tmp_path / "right.npz") as data:
        return dict(data)


@pytest.mark.parametrize("key", ["head", "lengths", "src", "dst", "chunk", "into"])
def test_npz_without_an_array_is_refused(tmp_path, key):
    columns = arrays(tmp_path)
    del columns[key]
    np.savez(tmp_path / "bad.npz", **columns)  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match=r"bad\.npz: not a schedule"):
        load(tmp_path / "bad.npz")


@pytest.mark.parametrize("key", ["lengths", "src", "reduces"])
def test_npz_with_an_array_too_short_is_refused(tmp_path, key):
    columns = arrays(tmp_path)
    columns[key] = columns[key][:-1]
    np.savez(tmp_path / "bad.npz", **columns)  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="different lengths"):
        load(tmp_path / "bad.npz")


ODD: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "half ranks": ("src", lambda column: column + 0.5),
    "ranks in a table": ("dst", lambda column: column.reshape(3, 4)),
    "ranks as text": ("src", lambda column: np.array(["a"] * column.size)),
    "lengths that are not whole": ("lengths", lambda column: column / 1.0),
}


@pytest.mark.parametrize("case", ODD)
def test_npz_with_arrays_of_the_wrong_kind_is_refused(tmp_path, case):
    columns = arrays(tmp_path)
    key, change = ODD[case]
    columns[key] = change(columns[key])
    np.savez(tmp_path / "bad.npz", **columns)  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match=r"bad\.npz: not a schedule"):
        load(tmp_path / "bad.npz")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_byte_is_refused_or_changes_nothing(tmp_path, suffix):
    made = unisono.schedule("all_gather", "ring", 4)
    save(made, tmp_path / f"right{suffix}")
    right = (tmp_path / f"right{suffix}").read_bytes()
    refused = 0
    for at in range(0, len(right), 5):
        damaged = right[:at] + bytes([right[at] ^ 0xFF]) + right[at + 1 :]
        (tmp_path / f"bad{suffix}").write_bytes(damaged)
        try:
            read = load(tmp_path / f"bad{suffix}")
        except (BadArgument, ScheduleError):
            refused += 1
        else:
            assert contents(read) == contents(made)
    assert refused


def test_single_array_under_the_name_npz_is_refused(tmp_path):
    with open(tmp_path / "bad.npz", "wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(BadArgument, match="not a schedule"):
        load(tmp_path / "bad.npz")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_file_is_refused(tmp_path, suffix):
    with pytest.raises(BadArgument, match="No such file"):
        load(tmp_path / f"none{suffix}")


@pytest.mark.parametrize("name", ["schedule.txt", "schedule", "schedule.npy"])
def test_another_suffix_is_refused(tmp_path, name):
    with pytest.raises(BadArgument, match=r"is saved as \.json or \.npz"):
        save(unisono.schedule("all_gather", "ring", 3), tmp_path / name)
    assert not (tmp_path / name).exists()
    with pytest.raises(BadArgument, match=r"is read from \.json or \.npz"):
        load(tmp_path / name)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_wrong_contents_are_found_on_loading(tmp_path, suffix):
    ring = unisono.schedule("all_gather", "ring", 4)
    wrong = ring.but(make=lambda: list(ring)[:-1])
    path = tmp_path / f"wrong{suffix}"
    save(wrong, path)
    with pytest.raises(ScheduleError, match="never receives chunk"):
        load(path)
    assert contents(load(path, verify=False)) == contents(wrong)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0, 3, 0, "copy"], "is outside the ranks"),
        ([0, 1, 0, "copy", 2], "temporaries"),
    ],
)
def test_broken_rules_are_found_on_loading(tmp_path, row, words):
    path = written(tmp_path / "wrong.json", with_row(row))
    with pytest.raises(ScheduleError, match=words):
        load(path)
