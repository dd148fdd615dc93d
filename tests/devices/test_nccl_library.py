"""Where NCCL is found, in which order, what is said if it is not; and its settings."""

import _ctypes
import ctypes
import shutil
import subprocess
import sys

import pytest

from unisono.devices import found, nccl
from unisono.errors import NcclMissing

SOURCE = "int ncclGetVersion(int *code) {{ *code = {0}; return 0; }}"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """library(path, 22705): a library that says it is NCCL 2.27.5, and does nothing."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("libraries")

    def make(path, version):
        built = folder / f"{version}.so"
        if not built.exists():
            source = built.with_suffix(".c")
            source.write_text(SOURCE.format(version))
            subprocess.run([compiler, "-shared", source, "-o", built], check=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(built, path)
        return str(path)

    return make


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """A host where NCCL is nowhere."""
    monkeypatch.delenv(nccl.VARIABLE, raising=False)
    monkeypatch.setattr(nccl, "package_folders", lambda name: [tmp_path / name])
    places = dict(nccl._PLACES)
    places["libraries of this process"] = lambda: iter(())
    places["the dynamic loader"] = lambda: iter(())
    monkeypatch.setattr(nccl, "_PLACES", tuple(places.items()))
    opened, original = [], ctypes.CDLL

    def open_library(path):
        opened.append(original(path))
        return opened[-1]

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    yield tmp_path
    nccl.find.cache_clear()
    for one in opened:
        _ctypes.dlclose(one._handle)


def found_anew():
    nccl.find.cache_clear()
    return nccl.find()


def test_nothing_found_says_where_and_what_to_do(nothing):
    with pytest.raises(NcclMissing, match="pip install nvidia-nccl-cu13") as missing:
        found_anew()
    assert len(missing.value.looked) == 5
    for place in ("UNISONO_NCCL", "wheels", "torch", "dynamic loader"):
        assert place in str(missing.value)
    assert found.collectives().fix == "pip install nvidia-nccl-cu13"
    assert not found.collectives().usable


def test_order_of_places(nothing, library, monkeypatch):
    """From the last place to the first: each is preferred to those before it."""
    torch = library(nothing / "torch/lib/libnccl.so.2", 21903)
    assert found_anew().path == torch
    wheel = library(nothing / "nvidia/nccl/lib/libnccl.so.2", 22705)
    assert found_anew().path == wheel
    assert found_anew().version == (2, 27, 5)
    named = library(nothing / "elsewhere/collectives.so", 23001)
    monkeypatch.setenv(nccl.VARIABLE, named)
    assert str(found_anew()) == f"NCCL 2.30.1 ({named})"
    assert found.collectives() == (True, f"2.30.1 ({named})", "")


def test_library_of_this_process_comes_before_wheels(nothing, library):
    loaded = library(nothing / "loaded/libnccl.so.2", 22005)
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1])\n"
        "from unisono.devices import nccl\n"
        "print(nccl.find().path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, loaded],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == loaded


def test_old_library_is_refused(nothing, library, monkeypatch):
    old = library(nothing / "nvidia/nccl/lib/libnccl.so.2", 21705)
    with pytest.raises(NcclMissing, match=r"NCCL 2\.17\.5 .* is too old: .*2\.18"):
        found_anew()
    monkeypatch.setenv(nccl.VARIABLE, old)
    with pytest.raises(NcclMissing, match="is too old"):
        found_anew()


@pytest.mark.parametrize("path", ["libc.so.6", "/no/such/libnccl.so"])
def test_named_library_must_be_one(nothing, library, monkeypatch, path):
    library(nothing / "nvidia/nccl/lib/libnccl.so.2", 22705)
    monkeypatch.setenv(nccl.VARIABLE, path)
    with pytest.raises(NcclMissing, match=f"UNISONO_NCCL={path} cannot be used"):
        found_anew()


def test_settings_have_the_layout_of_nccl_h():
    """ncclConfig_t of 2.18: an older form would be refused, a larger one misread."""
    made = nccl.settings()
    assert ctypes.sizeof(made) == made.size == 48
    assert nccl.Settings.blocking.offset == 16
    assert nccl.Settings.net_name.offset == 32
    assert nccl.Settings.split_share.offset == 40
    assert (made.magic, made.version, made.blocking) == (0xCAFEBEEF, 21800, 0)
    assert ctypes.sizeof(nccl.UniqueId) == 128
