"""Compiled kernels on disk: used again, never when another could have changed them."""

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from unisono.devices import found, kernel_cache, nvrtc, rtc
from unisono.devices.once import OncePerKey
from unisono.errors import BadArgument, CompilationFailed, DeviceError

pytestmark = pytest.mark.one_in(2)

WANTED = ((9, 0), "float32", "sum")


class Compiler:
    """In the place of NVRTC; counts what it compiles."""

    version = (13, 0)

    def __init__(self, log):
        self.log = log

    def architectures(self):
        return [75, 80, 90]

    def compile(self, main, sources, options):
        with open(self.log, "a") as log:
            log.write("compiled\n")
        time.sleep(0.2)  # long enough for others to come
        return nvrtc.Compiled("|".join([main, *options]).encode() * 50, "")

    @property
    def count(self):
        log = Path(self.log)
        return log.read_text().count("\n") if log.exists() else 0


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    made = Compiler(str(tmp_path / "log"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(kernel_cache.VARIABLE, raising=False)
    monkeypatch.setattr(rtc, "find", lambda: made)
    return made


@pytest.fixture
def compile_anew(compiler, monkeypatch):
    """compile_anew(): as in a process that has not compiled anything yet."""

    def run(*wanted):
        monkeypatch.setattr(rtc, "_IMAGES", OncePerKey())
        return rtc.compile_kernel(*(wanted or WANTED))

    return run


def files(suffix="cubin"):
    return sorted(kernel_cache.CACHE.folder().glob(f"*.{suffix}"))


def test_second_compilation_comes_from_the_file(compiler, compile_anew):
    image = compile_anew()
    [file] = files()
    assert file.name.startswith("sm_90-float32-sum-")
    assert file.stat().st_mode & 0o077 == 0
    assert compile_anew() == image
    assert compiler.count == 1
    assert {path.suffix for path in file.parent.iterdir()} == {".cubin", ".lock"}


def test_key_has_all_that_the_image_depends_on(compiler, compile_anew, monkeypatch):
    compile_anew()
    compile_anew((8, 0), "float32", "sum")
    compile_anew((9, 0), "float32", "max")
    compile_anew((9, 0), "float16", "sum")
    monkeypatch.setattr(Compiler, "version", (13, 1))
    compile_anew()
    changed = dict(rtc.sources())
    changed["device/move.cuh"] += "\n"
    monkeypatch.setattr(rtc, "sources", lambda: changed)
    compile_anew()
    monkeypatch.setattr(rtc, "_OPTIONS", (*rtc._OPTIONS, "--use_fast_math"))
    compile_anew()
    assert compiler.count == len(files()) == 7


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_file_that_others_can_write_to_is_not_loaded(compiler, compile_anew, mode):
    image = compile_anew()
    [file] = files()
    file.write_bytes(file.read_bytes())
    file.chmod(mode)
    assert compile_anew() == image
    assert compiler.count == 2
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_file_of_another_user_is_not_loaded(compiler, compile_anew):
    compile_anew()
    [file] = files()
    os.chown(file, 12345, -1)
    compile_anew()
    assert compiler.count == 2
    assert file.stat().st_uid == os.geteuid()


def test_link_is_not_followed(compiler, compile_anew, tmp_path):
    compile_anew()
    [file] = files()
    file.rename(tmp_path / "aside")
    file.symlink_to(tmp_path / "aside")
    compile_anew()
    assert compiler.count == 2
    assert not file.is_symlink()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:40],
        lambda content: b"",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    ],
    ids=["one byte short", "no image", "empty", "one bit"],
)
def test_damaged_file_is_not_loaded(compiler, compile_anew, damage, caplog):
    image = compile_anew()
    [file] = files()
    file.write_bytes(damage(file.read_bytes()))
    assert compile_anew() == image
    assert "is damaged" in caplog.text
    assert compile_anew() == image
    assert compiler.count == 2


def test_file_under_the_name_of_another_is_not_loaded(compiler, compile_anew):
    compile_anew()
    [file] = files()
    other = compile_anew((9, 0), "float32", "max")
    [another] = set(files()) - {file}
    another.write_bytes(file.read_bytes())
    assert compile_anew((9, 0), "float32", "max") == other
    assert compiler.count == 3


def test_folder_that_others_can_write_to_is_not_used(compiler, compile_anew, caplog):
    image = compile_anew()
    folder = kernel_cache.CACHE.folder()
    folder.chmod(0o777)
    assert compile_anew() == image
    assert compiler.count == 2
    assert "others can write to" in caplog.text
    assert not found.kernels().usable


def test_folder_that_cannot_be_made(compiler, compile_anew, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_anew() == compile_anew()
    assert compiler.count == 2


def test_folder_that_can_only_be_read(compiler, compile_anew, monkeypatch, caplog):
    """Root may write everywhere, so what the system would say is said in its place."""
    image = compile_anew()

    def refuse(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr(kernel_cache.tempfile, "mkstemp", refuse)
    monkeypatch.setattr(kernel_cache, "alone", refuse)
    assert compile_anew() == image
    assert compiler.count == 1
    compile_anew((9, 0), "int8", "sum")
    assert "is not kept: read-only" in caplog.text
    assert len(files()) == 1


def test_cache_can_be_turned_off(compiler, compile_anew, monkeypatch):
    monkeypatch.setenv(kernel_cache.VARIABLE, "0")
    assert compile_anew() == compile_anew()
    assert compiler.count == 2
    assert not kernel_cache.CACHE.folder().exists()
    assert found.kernels().words == "off (UNISONO_CACHE=0)"
    monkeypatch.setenv(kernel_cache.VARIABLE, "no")
    with pytest.raises(BadArgument, match="UNISONO_CACHE=no: expected 0 or 1"):
        compile_anew()
    assert not found.kernels().usable


def test_failed_compilation_leaves_nothing(compiler, compile_anew, monkeypatch):
    def fail(*_):
        raise CompilationFailed("no", log="no")

    with monkeypatch.context() as patch:
        patch.setattr(Compiler, "compile", fail)
        with pytest.raises(CompilationFailed):
            compile_anew()
    assert files() == []
    compile_anew()
    assert compiler.count == 1


def test_threads_compile_once(compiler, monkeypatch):
    monkeypatch.setenv(kernel_cache.VARIABLE, "0")
    monkeypatch.setattr(rtc, "_IMAGES", OncePerKey())
    images = []
    threads = [
        threading.Thread(target=lambda: images.append(rtc.compile_kernel(*WANTED)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(images) == 8
    assert len(set(images)) == 1
    assert compiler.count == 1


def compile_in_process(rank, folder):
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
    rtc.find = lambda: Compiler(f"{folder}/log")
    rank.tell("ready")
    rank.until("ready", *range(rank.n))
    return len(rtc.compile_kernel(*WANTED))


def test_processes_at_once_compile_once(forks, tmp_path):
    ends = forks.run(5, compile_in_process, str(tmp_path))
    assert [end.status for end in ends] == [0] * 5, ends
    assert len({end.value for end in ends}) == 1
    assert Compiler(f"{tmp_path}/log").count == 1


def test_holder_of_the_lock_that_does_not_go_on(compiler, compile_anew, monkeypatch):
    """It may have been stopped; the wait is bounded, and the kernel compiled here."""
    monkeypatch.setattr(kernel_cache, "_PATIENCE_S", 0.1)
    compile_anew()
    [file], [lock] = files(), files("lock")
    file.unlink()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        compile_anew()
    assert compiler.count == 2
    assert files() == [file]


def test_size_of_the_cache_is_reported(compile_anew):
    assert found.kernels().words.endswith("unisono/kernels: empty")
    compile_anew()
    assert found.kernels().words.endswith("KiB")
    assert "1 kernel, " in found.kernels().words
    compile_anew((8, 0), "float32", "sum")
    assert "2 kernels, " in found.kernels().words


def test_real_kernel_is_compiled_once(tmp_path, monkeypatch):
    try:
        nvrtc.find()
    except DeviceError as why:
        pytest.skip(str(why))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(kernel_cache.VARIABLE, raising=False)
    monkeypatch.setattr(rtc, "_IMAGES", OncePerKey())
    image = rtc.compile_kernel((8, 6), "float32", "sum")
    assert image.startswith(b"\x7fELF")
    monkeypatch.setattr(rtc, "_IMAGES", OncePerKey())
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", None)
    assert rtc.compile_kernel((8, 6), "float32", "sum") == image
