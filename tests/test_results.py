"""Results that cannot be written where they were wanted are kept elsewhere."""

import gzip
import json
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from unisono.cli import _plot, output
from unisono.errors import BadArgument
from unisono.results import write_or_keep
from unisono.trace import document


@pytest.fixture
def wanted(tmp_path, monkeypatch):
    """A path below a file, where nothing can be; temporary files are in `tmp_path`."""
    (tmp_path / "occupied").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "occupied" / "run.pt.trace.json.gz"


def kept(call):
    """The file in which a call that fails has kept its result."""
    with pytest.raises(BadArgument, match="cannot be written: ") as error:
        call()
    return Path(re.search(r"; the result is in (\S+)$", str(error.value))[1])


def test_result_is_kept_with_its_suffix(wanted, tmp_path):
    file = kept(lambda: write_or_keep(wanted, lambda there: there.write_bytes(b"7")))
    assert file.parent == tmp_path
    assert file.name.startswith("unisono-run-")
    assert file.name.endswith(".pt.trace.json.gz")
    assert file.read_bytes() == b"7"


def test_result_that_can_be_kept_nowhere_says_so(wanted, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(BadArgument, match="nor could it be kept in /nowhere: No such"):
        write_or_keep(wanted, lambda there: there.write_bytes(b"7"))


def test_texts_of_commands_are_kept(wanted):
    assert kept(lambda: output.write_file(wanted, "text")).read_text() == "text"


def test_trace_is_kept(wanted):
    file = kept(lambda: document.write({"traceEvents": []}, wanted))
    assert json.loads(gzip.decompress(file.read_bytes())) == {"traceEvents": []}


def test_picture_is_kept(wanted, monkeypatch):
    pyplot = SimpleNamespace(close=lambda figure: None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    figure = SimpleNamespace(
        tight_layout=lambda: None,
        savefig=lambda file, dpi: file.write_text("picture"),
    )
    assert kept(lambda: _plot.save(figure, wanted)).read_text() == "picture"
