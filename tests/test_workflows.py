"""Workflows and pre-commit hooks: they run what the Makefile runs, and no more."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from test_wheel import PYTHONS

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, re.MULTILINE))


def read(file):
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def jobs(file):
    return read(file)["jobs"].items()


def test_there_is_one_workflow_each_for_lint_tests_and_wheels():
    assert [file.stem for file in WORKFLOWS] == ["lint", "tests", "wheels"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_run_targets_of_the_makefile(file):
    for name, job in jobs(file):
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands, f"{file.name}: {name} runs nothing"
        for command in commands:
            make, target, *variables = shlex.split(command)
            assert make == "make"
            assert target in TARGETS
            for variable in variables:
                assert f"$({variable.partition('=')[0]})" in MAKEFILE


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_can_only_read_and_do_end(file):
    assert read(file)["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for _, job in jobs(file))


def test_tests_run_on_every_python_that_wheels_are_built_for():
    quick = dict(jobs(ROOT / ".github" / "workflows" / "tests.yml"))["quick"]
    assert quick["strategy"]["matrix"]["python"] == PYTHONS


def test_wheels_are_built_on_a_tag_for_both_architectures():
    file = ROOT / ".github" / "workflows" / "wheels.yml"
    assert read(file)[True]["push"] == {"tags": ["v*"]}  # YAML reads `on` as true
    runners = dict(jobs(file))["wheels"]["strategy"]["matrix"]["os"]
    assert sum(runner.endswith("-arm") for runner in runners) == 1
    assert len(runners) == 2


def test_hooks_run_the_tools_of_make_check():
    recipe = MAKEFILE.partition("\ncheck:")[2].partition("\n\n")[0]
    tools = set(re.findall(r"\$\(BIN\)/([a-z-]+)", recipe))
    config = read(ROOT / ".pre-commit-config.yaml")
    entries = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    ours = {
        entry.split()[0].removeprefix(".venv/bin/")
        for entry in entries
        if entry.startswith(".venv/bin/")
    }
    assert ours == tools == {"ruff", "mypy", "lint-imports", "python"}


ARM = (ROOT / "tools" / "arm.sh").read_text(encoding="utf-8")
NAMED_TESTS = re.findall(r"::(test_\w+)", MAKEFILE + ARM)


def test_tests_named_in_makefile_and_arm_script_exist():
    files = (ROOT / "tests").rglob("test_*.py")
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert len(NAMED_TESTS) > 5
    for name in NAMED_TESTS:  # pytest takes prefixes too
        assert re.search(rf"^def {name}", text, re.MULTILINE), name
