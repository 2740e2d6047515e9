"""The launcher with real ranks: what they are given, what is shown, how a failure is told."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paddle_recompute._paddle import cpu_settings
from paddle_recompute.app.cli import _process
from paddle_recompute.app.config import Config, load_config
from paddle_recompute.app.launch import (
    RankFailedError,
    _rank_settings,
    launch,
    launcher,
    restarts,
)
from paddle_recompute.errors import DependencyError, LaunchError
from tests.ranks import ROOT

TINY = ROOT / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml"
WORKER = ["-m", "tests.app.launch.launch_worker"]
DRIVER = """
import sys
from paddle_recompute import load_config
from paddle_recompute.app.launch import launch

config, folder, *command = sys.argv[1:]
launch(load_config(config, [f"train.output_dir={folder}"]), command)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Loads the tiny configuration with `overrides`, its output in a folder of the test."""
    monkeypatch.setattr(launcher, "_PATIENCE", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # Paddle sets it where it is imported
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")  # Paddle would prefer it
    return lambda *overrides: load_config(TINY, [f"train.output_dir={tmp_path}", *overrides])


# ------------------------------------------------------------------------- what the ranks get


def test_rank_zero_is_shown_and_gets_its_share_of_the_cores(
    config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(_rank_settings, "available_cores", lambda: 6)
    monkeypatch.setenv("A_SECRET", "do not write me down")
    launch(config(), [*WORKER, "settings"])
    first, *shown = capfd.readouterr().out.splitlines()
    assert first.startswith("starting 2 ranks on cpu, OMP_NUM_THREADS=3")
    assert first.endswith(f"logs in {tmp_path / 'logs'}")
    given = "PADDLE_TRAINERS_NUM=2 OMP_NUM_THREADS=3 PADDLE_DISTRI_BACKEND=gloo MASTER_ADDR=None"
    assert shown == [f"rank 0 {given}"]
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs["workerlog.1"] == f"rank 1 {given}\n"
    assert set(logs) == {"workerlog.0", "workerlog.1"}
    assert "do not write me down" not in "".join(logs.values())


AMD = {"MKL_DEBUG_CPU_TYPE": "7"}
CONTIGUOUS = {"FLAGS_use_stride_kernel": "0"}


@pytest.mark.parametrize(
    ("ranks", "own", "device", "chosen"),
    [
        (2, {}, "cpu", {"OMP_NUM_THREADS": "4", **AMD, **CONTIGUOUS}),
        (2, {}, "gpu", {"OMP_NUM_THREADS": "4", **AMD}),
        (16, AMD, None, {"OMP_NUM_THREADS": "1"}),
        (2, {"OMP_NUM_THREADS": "1", **AMD, "FLAGS_use_stride_kernel": "1"}, "cpu", {}),
    ],
)
def test_settings_of_the_user_win(
    ranks: int,
    own: dict[str, str],
    device: str | None,
    chosen: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_rank_settings, "available_cores", lambda: 8)
    monkeypatch.setattr(cpu_settings, "is_amd_on_linux", lambda: True)
    monkeypatch.setattr(cpu_settings, "_flags", lambda: cpu_settings._AVX512)
    assert _rank_settings.speed_settings(ranks, own, device=device) == chosen
    assert "GLOG_minloglevel" not in _rank_settings.quiet_settings({"GLOG_minloglevel": "0"})


def test_ranks_of_other_machines_do_not_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `fleetrun` starts a command on two machines with two ranks each."""
    environment = {"PADDLE_TRAINERS_NUM": "4", "PADDLE_LOCAL_SIZE": "2"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(_rank_settings, "available_cores", lambda: 8)
    monkeypatch.setattr(_process, "require_paddle", mock.Mock(side_effect=DependencyError("here")))
    with pytest.raises(DependencyError, match="here"):  # before it joins the others
        _process.prepare_one_of_ranks("")
    assert environment["OMP_NUM_THREADS"] == "4"


def test_cores_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(_rank_settings, "CPU_QUOTA", tmp_path / "cpu.max")
    assert _rank_settings.available_cores() == 8
    for quota, cores in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(quota)
        assert _rank_settings.available_cores() == cores


# ------------------------------------------------------------------------------- what goes wrong


def test_the_error_of_the_rank_that_failed_by_itself_is_told(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 ends first, because of rank 1."""
    monkeypatch.setattr(launcher, "_PATIENCE", 20.0)
    with pytest.raises(RankFailedError) as caught:
        launch(config(), [*WORKER, "refuse"])
    assert str(caught.value) == "pairs.tsv:7: one column where two are needed"
    assert caught.value.code == launcher.REFUSED


@pytest.mark.parametrize(
    ("worker", "code", "words"),
    [
        ("fail", 1, "rank 1 ended with code 1; its output is in .*workerlog.1(.|\n)*ZeroDivision"),
        ("killed", -signal.SIGKILL, "rank 1 was ended by SIGKILL, .* memory runs out"),
        ("peers", launcher.AGAIN, "^rank 9 has died$"),
        ("deaf", launcher.AGAIN, "^rank 9 has died$"),
    ],
)
def test_how_a_rank_failed_is_told(
    worker: str, code: int, words: str, config: Callable[..., Config], tmp_path: Path
) -> None:
    arguments = [str(tmp_path)] if worker == "deaf" else []
    with pytest.raises(RankFailedError, match=words) as caught:
        launch(config(), [*WORKER, worker, *arguments])
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["launch.device=gpu", "launch.num_ranks=8"],
            "8 asks for as many GPUs .* install paddlepaddle-gpu .*launch.device=cpu",
        ),
        (
            ["launch.num_nodes=4"],
            "asks for 4 machines .* fleetrun --master HOST:PORT --nnodes 4 --rank N "
            "--nproc_per_node 2 paddle-recompute train .* N from 0 to 3",
        ),
        (["train.output_dir=/dev/null/run"], "/dev/null/run/logs: cannot be written"),
    ],
)
def test_what_cannot_be_started_here_is_refused(
    overrides: list[str],
    words: str,
    config: Callable[..., Config],
) -> None:
    with pytest.raises(LaunchError, match=words):
        launch(config(*overrides), [*WORKER, "settings"])


def test_more_ranks_than_gpus_are_refused(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    import paddle

    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    for ranks, words in ((4, r"4 asks .* finds 2 \(CUDA_VISIBLE_DEVICES: 0,3\).*=2$"), (1, "=1$")):
        with pytest.raises(LaunchError, match=words):
            launch(config("launch.device=gpu", f"launch.num_ranks={ranks}"), [*WORKER, "settings"])
        monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 0)


# ------------------------------------------------------------------------- terminals and signals


def test_a_terminal_sees_the_bar_move_and_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    terminal, side_of_child = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 97, 0, 0))
    # COLUMNS would win over the size of the terminal; readline, which pytest imports, sets it
    # behind the back of os.environ, hence the explicit environment.
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    command = ["-c", DRIVER, str(TINY), str(tmp_path), *WORKER, "wait", str(tmp_path)]
    child = subprocess.Popen(
        [sys.executable, *command],
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdin=side_of_child,
        stdout=side_of_child,
        stderr=side_of_child,
        start_new_session=True,
        preexec_fn=_let_ctrl_c_arrive,
    )
    os.close(side_of_child)
    shown = bytearray()
    reader = threading.Thread(target=_read_all, args=(terminal, shown), daemon=True)
    reader.start()
    ranks = _wait_for_ranks(tmp_path)
    _wait_until(lambda: b"\rstep 2/9" in shown)
    assert b"terminal True 97" in shown
    os.write(terminal, b"\x03")
    _wait_until(lambda: not any(_is_running(pid) for pid in ranks))
    assert child.wait(30) == -signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", DRIVER, str(TINY), str(tmp_path), *WORKER, "wait"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen([*command, str(tmp_path)], env=environment, stdout=subprocess.DEVNULL)
    ranks = _wait_for_ranks(tmp_path)
    driver.send_signal(number)
    assert driver.wait(30) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    _wait_until(lambda: not any(_is_running(pid) for pid in ranks))


def _let_ctrl_c_arrive() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A shell that runs the tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _read_all(terminal: int, into: bytearray) -> None:
    try:
        while new := os.read(terminal, 1024):
            into += new
    except OSError:  # the other side is closed
        pass


def _wait_for_ranks(folder: Path) -> list[int]:
    files = [folder / "0.pid", folder / "1.pid"]
    _wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def _wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    """Not gone, and not a zombie that nobody collects either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("code", "starts"), [(launcher.AGAIN, 3), (-9, 3), (launcher.REFUSED, 1)])
def test_ranks_start_again_after_an_error_that_another_start_may_not_have(
    code: int, starts: int, monkeypatch: pytest.MonkeyPatch, config: Callable[..., Config]
) -> None:
    tried = []

    def failed(*_: Any, **__: Any) -> None:
        tried.append(code)
        raise RankFailedError("why", code)

    monkeypatch.setattr(restarts, "launch", failed)
    with pytest.raises(RankFailedError, match="why"):
        restarts.launch_with_restarts(config(), [], max_restart=2)
    assert len(tried) == starts
