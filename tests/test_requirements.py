"""What `make` installs beside the package is what the package and its extras need."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def listed(*extras):
    command = [sys.executable, str(ROOT / "tools" / "requirements.py"), *extras]
    return subprocess.check_output(command, text=True).splitlines()


def test_extras_that_an_extra_names_are_included():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    found = listed("test")
    assert extras["test"][0] == "unisono[cli,lowp,notebook]"
    for needed in (*extras["test"][1:], *extras["cli"], *extras["notebook"]):
        assert needed in found
    assert not any(line.startswith("unisono") for line in found)


def test_without_extras_it_is_what_the_package_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert listed() == project["project"]["dependencies"]
