"""`unisono secret`."""

import json
import re
import stat

import pytest

from unisono.cli import main


def test_secret_prints_a_new_secret_each_time(capsys):
    result = set()
    for _ in range(3):
        assert main(["secret"]) == 0
        result.add(capsys.readouterr().out)
    assert len(result) == 3
    assert all(re.fullmatch(r"[0-9a-f]{64}\n", text) for text in result)
    assert main(["secret", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["secret"]) == 64


def test_secret_file_is_private(capsys, tmp_path):
    file = tmp_path / "secret"
    assert main(["secret", "--file", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert re.fullmatch(r"[0-9a-f]{64}\n", file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["there", "no/such/folder"])
def test_secret_file_is_never_overwritten(capsys, tmp_path, name):
    (tmp_path / "there").write_text("another's")
    assert main(["secret", "--file", str(tmp_path / name)]) == 2
    assert "cannot be made" in capsys.readouterr().err
    assert (tmp_path / "there").read_text() == "another's"


def test_env_does_not_print_the_secret(capsys, monkeypatch):
    monkeypatch.setenv("UNISONO_SECRET", "ab" * 32)
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "abab" not in out
    assert re.search(r"UNISONO_SECRET +\(is set\)", out)
