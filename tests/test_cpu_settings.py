"""The settings that make Paddle fast on a CPU: which, when, and what is said of them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import paddle
import pytest

from paddle_recompute import TrainStep, doctor, use_cpu_settings
from paddle_recompute._paddle import cpu_settings
from paddle_recompute._paddle.cpu_settings import MKL, STRIDES, SWITCH, CpuSettings, settings_for
from tests.fake_device import selected

ALL = "fpu avx2 avx512f avx512dq avx512cd avx512bw avx512vl"
pytestmark = pytest.mark.skipif(selected.is_selected(), reason="the settings are for CPUs")


@pytest.fixture
def an_amd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes this machine one with such a CPU, in which nothing was set, said or multiplied."""

    def describe(flags: str = ALL, vendor: str = "AuthenticAMD", mapped: str = "") -> None:
        (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\nflags\t\t: {flags}\n")
        (tmp_path / "maps").write_text(mapped)

    monkeypatch.setattr(cpu_settings, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu_settings, "MAPPED_FILES", tmp_path / "maps")
    monkeypatch.setattr(cpu_settings, "_said", set())
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in (MKL, STRIDES, SWITCH):
        monkeypatch.delenv(name, raising=False)
    paddle.set_flags({STRIDES: True})
    describe()
    return describe


@pytest.mark.parametrize(
    ("flags", "vendor", "chosen"),
    [
        (ALL, "AuthenticAMD", {MKL: "7"}),
        (ALL.replace("avx512cd", ""), "AuthenticAMD", {MKL: "5"}),
        (ALL, "GenuineIntel", {}),
    ],
)
def test_the_path_of_mkl_is_one_that_the_cpu_has(
    an_amd: Callable[..., None], flags: str, vendor: str, chosen: dict[str, str]
) -> None:
    an_amd(flags, vendor)
    assert settings_for({}, None) == chosen
    assert settings_for({}, "cpu") == {**chosen, STRIDES: "0"}
    assert settings_for({SWITCH: "0"}, "cpu") == {}


def test_both_are_set_once_in_a_process_that_runs(an_amd: Callable[..., None]) -> None:
    done = use_cpu_settings()
    assert done == CpuSettings({MKL: "7", STRIDES: "0"}, {})
    assert str(done) == f"set {MKL}=7, {STRIDES}=0"
    assert os.environ[MKL] == "7" and not paddle.get_flags(STRIDES)[STRIDES]
    matrix = paddle.ones([2, 2])
    matrix[0].zero_()  # as the documentation says: a slice is a copy
    assert float(matrix.sum()) == 4
    assert str(use_cpu_settings()) == "nothing to set"


def test_after_the_first_product_mkl_is_late(an_amd: Callable[..., None]) -> None:
    an_amd(mapped="7f00 r-xp /site-packages/paddle/libs/libmklml_intel.so\n")
    done = use_cpu_settings()
    assert done == CpuSettings({STRIDES: "0"}, {MKL: "7"})
    assert f"too late for {MKL}=7" in str(done) and MKL not in os.environ


def test_what_the_user_has_set_stays(
    an_amd: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MKL, "4")
    monkeypatch.setenv(STRIDES, "1")
    assert use_cpu_settings() == CpuSettings({}, {})
    assert os.environ[MKL] == "4" and paddle.get_flags(STRIDES)[STRIDES]


def test_a_slow_step_and_the_doctor_say_what_is_missing(
    an_amd: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("paddle_recompute.train_step.train_step.SLOW", 0.0)
    model, batch = paddle.nn.Linear(2, 2), paddle.ones([2, 2])
    optimizer = paddle.optimizer.SGD(parameters=model.parameters())
    with caplog.at_level(logging.WARNING, "paddle_recompute"):
        for _ in range(2):
            step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).mean())
            step([batch]), step([batch])
    (said,) = (one.getMessage() for one in caplog.records if SWITCH in one.getMessage())
    assert f"{MKL}=7" in said and f"{STRIDES}=0" in said
    assert MKL not in os.environ and paddle.get_flags(STRIDES)[STRIDES]
    assert said in doctor(model, batch, lambda model, x: model(x).mean()).notes
    use_cpu_settings()
    assert said not in doctor(model, batch, lambda model, x: model(x).mean()).notes


LOADED = """
import paddle
from paddle_recompute._paddle.cpu_settings import _has_multiplied
x = paddle.ones([8, 8]) * 2 + 1
before = _has_multiplied()
paddle.matmul(x, x)
print(before, _has_multiplied())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_paddle_loads_mkl_at_the_first_product() -> None:
    """If it were loaded earlier, the setting would come too late and nobody would notice."""
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]
