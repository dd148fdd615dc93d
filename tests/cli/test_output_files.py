"""Files that commands write: checked before the work, kept if writing fails."""

from pathlib import Path

import pytest

from unisono.cli import output
from unisono.errors import BadArgument


def test_files_that_cannot_be_written_are_refused_before_work(run, tmp_path):
    folder, nowhere = str(tmp_path), str(tmp_path / "none" / "f.svg")
    simulate = ("simulate", "all_reduce", "-t", "ring:4", "-b", "1K", "--picture")
    bench = ("bench", "all_reduce", "-n", "2", "-J")
    explain = ("explain", "all_reduce", "ring", "-n", "3")
    file = tmp_path / "a.file"
    file.touch()
    for command, last, message in (
        (simulate, str(tmp_path / "picture.text"), "suffix is the format"),
        (simulate, nowhere, "there is no folder"),
        (bench, folder, "this is a folder"),
        (bench, nowhere, "there is no folder"),
        ((*explain, "--svg"), nowhere, "there is no folder"),
        ((*explain, "--svg"), "x.html", "expected a name with .svg"),
        ((*explain, "--html"), "x.svg", "expected a name with .html"),
        (("run", "-n", "1", "--records", str(file)), "echo", "a.file is no folder"),
        (("trace", "why", folder, "--pickle"), str(file), "a.file is no folder"),
        (("trace", "open", "none", "--per-rank"), str(file), "a.file is no folder"),
    ):
        code, out, err = run(*command, last)
        assert (code, out) == (2, "")
        assert message in err
    code, out, err = run("trace", "run", "-o", folder, "-n", "1", "echo", "began")
    assert (code, out) == (2, "")
    assert "this is a folder" in err


def test_result_that_cannot_be_written_is_kept_elsewhere(tmp_path):
    with pytest.raises(BadArgument, match="the result is in ") as error:
        output.write_file(tmp_path / "none" / "result.json", "what was found")
    kept = Path(str(error.value).rpartition(" ")[2])
    assert kept.read_text() == "what was found"
    assert kept.suffix == ".json"
    kept.unlink()
