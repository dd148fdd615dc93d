"""For which GPUs NVRTC compiles, and what is said of the driver."""

import shutil
import subprocess

import pytest

from unisono.devices import found, rtc
from unisono.errors import NvrtcTooOld, UnsupportedDevice


class Known:
    """An NVRTC that knows these architectures."""

    version = (12, 4)

    def __init__(self, *known):
        self.known = list(known)

    def architectures(self):
        return self.known

    def __str__(self):
        return "NVRTC 12.4 (here)"


OLD, NEW = Known(50, 70, 75, 80, 86, 89, 90), Known(75, 80, 86, 90, 100, 103, 120)


@pytest.mark.parametrize(
    ("library", "capability", "arch"),
    [
        (OLD, (7, 0), 70),
        (OLD, (7, 5), 75),
        (OLD, (8, 7), 86),
        (OLD, (9, 0), 90),
        (NEW, (10, 1), 100),
        (NEW, (10, 3), 103),
        (NEW, (12, 1), 120),
    ],
)
def test_newest_architecture_that_the_gpu_runs(library, capability, arch):
    assert rtc.architecture(library, capability) == arch


@pytest.mark.parametrize(
    ("library", "capability", "error", "words"),
    [
        (OLD, (10, 0), NvrtcTooOld, r"10\.0, .*5\.0 to 9\.0; NVRTC 12\.8 .*--upgrade"),
        (OLD, (20, 0), NvrtcTooOld, r"20\.0, .*the newest NVRTC is needed"),
        (OLD, (6, 1), UnsupportedDevice, r"6\.1; unisono needs 7\.0 or newer"),
        (NEW, (7, 0), UnsupportedDevice, r"7\.0, and .*nvidia-cuda-nvrtc-cu12"),
    ],
)
def test_gpu_that_nvrtc_does_not_know(library, capability, error, words):
    with pytest.raises(error, match=words) as refused:
        rtc.architecture(library, capability)
    assert refused.value.capability == capability


def test_absent_driver_is_told(monkeypatch):
    monkeypatch.setattr(found, "_DRIVER", "libno-such-driver.so.1")
    assert found.driver() == (
        *(False, "none (no libno-such-driver.so.1): no NVIDIA GPU can be used here"),
        "",
    )


def test_version_of_the_driver(monkeypatch, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, built = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuDriverGetVersion(int *v) { *v = 12080; return 0; }")
    subprocess.run([compiler, "-shared", source, "-o", built], check=True)
    monkeypatch.setattr(found, "_DRIVER", str(built))
    assert found.driver() == (True, f"{built}, for CUDA 12.8", "")
