"""The compiled adapter is built beside the first program, which waits for nothing."""

import os
import sys
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from unisono.interop.torch import (  # noqa: E402
    adapter_of,
    adapters,
    background,
    commands,
    compiled,
)


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """An empty cache, and an interpreter that notes how it was started and waits.

    It ends when it is told to: `builder()`.
    """
    end = tmp_path / "end"
    os.mkfifo(end)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\nread line < {end}\n')
    program.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/bin/true")
    monkeypatch.setattr(sys, "executable", str(program))
    return lambda: end.write_text("now\n")  # waits for it to read


def started(tmp_path):
    return (tmp_path / "log").read_text().splitlines()


def test_one_process_builds_however_many_ask(builder, tmp_path):
    assert background.state() == "not built"
    assert background.begin()
    assert [background.begin() for _ in range(3)] == [False] * 3
    assert background.state() == "being built"
    builder()
    while background.state() != "not built":  # the lock goes with the process
        pass
    assert started(tmp_path) == ["-m unisono.interop.torch.background"]


def test_failed_build_is_kept_in_words_and_not_tried_again(
    builder, tmp_path, monkeypatch
):
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\necho 'no room left for templates'; exit 4\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setattr(os, "nice", lambda _: 0)
    assert background.main() == 1
    failed = compiled.path().parent / "failed"
    assert "no room left for templates" in failed.read_text()
    assert str(failed) in background.state()
    assert str(failed) in commands._status()
    assert not background.begin()
    background.forget_failure()
    assert background.begin()
    builder()


def test_nothing_is_started_without_a_compiler(builder, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not background.begin()
    assert not (tmp_path / "log").exists()


def alone():
    """The adapter of a group of one."""
    import torch.distributed as dist

    store, limit = dist.HashStore(), timedelta(seconds=60)
    dist.init_process_group("unisono", store=store, rank=0, world_size=1, timeout=limit)
    dist.all_reduce(torch.ones(2))
    found = adapter_of()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("wanted", "builds"), [("auto", True), ("python", False)])
def test_first_program_goes_on_in_python(forks, tmp_path, wanted, builds):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    env = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "CXX": "/bin/true",
        adapters.VARIABLE: wanted,
    }
    (end,) = forks.run(1, first_program, str(program), env=[env])
    assert end.status == 0, end.stderr
    assert end.value == ["python", builds]


def first_program(rank, program):
    sys.executable = program
    begun = []
    begin = background.begin
    background.begin = lambda: begun.append(begin())
    return alone(), begun == [True]
