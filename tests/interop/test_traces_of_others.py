"""Files that other programs wrote: none is part of this repository.

    UNISONO_FOREIGN_TRACES=FOLDER python -m pytest tests/interop -k traces_of_others

Chakra's are all *.et under the folder, those of PyTorch's profiler all *.json and
*.json.gz that have events.
"""

import gzip
import json
import os
from pathlib import Path

import pytest

from unisono.interop import chakra, kineto
from unisono.interop.what_if import read, what_if

NAMED = "UNISONO_FOREIGN_TRACES"
FOLDER = os.environ.get(NAMED)
if not FOLDER:
    pytest.skip(f"{NAMED} names no folder with files", allow_module_level=True)
FILES = sorted(Path(FOLDER).rglob("*"))


def files_of(*ends):
    found = [path for path in FILES if path.name.endswith(ends) and path.is_file()]
    names = [str(path.relative_to(FOLDER)) for path in found]
    return pytest.mark.parametrize("path", found, ids=names)


def events_of(path):
    """The events with a duration of a trace in Chrome's form; none in other files."""
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        document = json.loads(data)
    except (OSError, EOFError, ValueError):
        return []
    if isinstance(document, dict):
        document = document.get("traceEvents", [])
    return [e for e in document if isinstance(e, dict) and "dur" in e]


@files_of(".et")
def test_chakra_file_is_read_and_written(path, tmp_path):
    nodes = chakra.load(path)
    assert nodes
    data = chakra.dumps(nodes)
    again = tmp_path / "again.et"
    again.write_bytes(data)
    assert chakra.load(again) == nodes
    assert chakra.dumps(nodes) == data


@files_of(".et")
def test_chakra_file_is_run_again(path):
    trace = read(path)
    answer = what_if(path, "switch:8")
    assert answer.before == trace.seconds
    assert len(trace.calls) == sum(one.times for one in answer.calls)
    assert trace.with_times([0.0] * len(trace.calls)) <= trace.seconds


@files_of(".json", ".json.gz")
def test_profile_is_run_again(path):
    if not events_of(path):
        pytest.skip("no trace in Chrome's form")
    trace = kineto.load(path)
    ranks = max((call.ranks for call in trace.calls), default=1)
    strides = {call.stride for call in trace.calls}
    answer = what_if(path, f"switch:{max(ranks, 1) * max(strides, default=1) * 8}")
    assert answer.before == trace.seconds
    assert len(trace.calls) == sum(one.times for one in answer.calls)
