"""The command: what it hands on, what it prints last, and errors of one paragraph and code 2."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from paddle_recompute import _installed
from paddle_recompute.app import cli
from paddle_recompute.app.config import Config
from paddle_recompute.app.launch import RankFailedError
from paddle_recompute.errors import DataError, LaunchError
from tests.app.commands import assert_refused, command
from tests.ranks import ROOT

CONFIGS = ROOT / "fleet_configs"
TINY = CONFIGS / "contrastive_ernie-tiny_2cpu.yaml"
FLEETRUN = ["fleetrun --master HOST:PORT", "paddle-recompute train"]


@pytest.fixture(autouse=True)
def outside_of_any_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets variables for the ranks; they are put back after each test.

    It locks the run's folder, which is below the current one: no other process is to want it.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE", "FLAGS_use_stride_kernel"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    monkeypatch.delenv("PADDLE_TRAINER_ID", raising=False)


@pytest.fixture
def fake_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `Trainer` that trains nothing and returns its settings."""

    class Trainer:
        def __init__(self, config: Config, sources: dict[str, str]) -> None:
            self.config = config
            assert sources["train.seed"] == (
                "default" if config.train.seed == 0 else f"override train.seed={config.train.seed}"
            )

        def run(self) -> dict[str, Any]:
            if self.config.train.seed == 13:
                raise DataError("pairs.tsv:7: one column where two are needed")
            print("trained")
            return {"max_steps": self.config.train.max_steps}

    module = types.ModuleType("paddle_recompute.app.trainer")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paddle_recompute.app.trainer", module)


def run(*arguments: str | Path, code: int = 0) -> Result:
    return command("train", *arguments, code=code)


# ------------------------------------------------------------------------------------ errors


def test_options_of_paddles_launcher_are_refused() -> None:
    for option in (["--master", "10.0.0.1:6170"], ["--rank", "1"]):
        result = run("--config", TINY, *option, code=2)
        assert all(word in result.stderr for word in (option[0], *FLEETRUN))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mine", "--faiss", "Flat"], "--faiss is gone: the search is exact"),
        (
            ["search", "--output=found.jsonl"],
            "--output is gone: give --json, and write its lines to a file",
        ),
    ],
)
def test_options_that_are_gone_are_refused(arguments: list[str], words: str) -> None:
    assert words in command(*arguments, code=2).stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["mine.yaml"], "name the YAML file with --config, as in --config mine.yaml"),
        (["train.max_steps=5"], "name the YAML file with --config, as in --config run.yaml"),
        (["--config", "a.yaml", "--train.max_steps=5"], "without --, as train.max_steps=VALUE"),
        (["--config", "a.yaml", "--max_step", "5"], "No such option '--max_step'"),
    ],
)
def test_a_setting_and_a_file_that_are_written_in_another_way(given: list[str], words: str) -> None:
    assert words in run("train", *given, code=2).stderr


def test_a_missing_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_installed, "_installed_version", lambda: None)
    for ranks in (1, 2):
        train = ["train", "--config", TINY, f"launch.num_ranks={ranks}"]
        assert_refused(
            train, "PaddlePaddle is not installed; for a CPU: pip install 'paddlepaddle>=2.6.2"
        )


@pytest.mark.usefixtures("fake_trainer")
def test_an_error_in_place_is_a_paragraph_and_with_debug_a_traceback_too() -> None:
    arguments = ("train", "--config", TINY, "launch.num_ranks=1", "train.seed=13")
    assert_refused(arguments, "pairs.tsv:7: one column where two are needed")
    result = command(*arguments, "--debug", code=2)
    assert "Traceback" in result.stderr and "in run" in result.stderr
    assert result.stderr.endswith(
        "paddle-recompute: pairs.tsv:7: one column where two are needed\n"
    )


@pytest.mark.parametrize(
    ("error", "code", "debug_shows"),
    [
        (RankFailedError("no such word", 2), 2, "Traceback"),
        (RankFailedError("rank 1 has died", 3), 2, "Traceback"),
        (RankFailedError("rank 1 was ended by SIGKILL", -9), 1, "Traceback"),
        (LaunchError("asks for 8 GPUs"), 2, "Traceback"),
        (KeyboardInterrupt(), 130, "all ranks have ended"),
    ],
)
def test_each_way_that_ranks_end_has_its_code(
    error: BaseException, code: int, debug_shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(cli._on_ranks, "launch_with_restarts", launch)
    result = run("--config", TINY, code=code)
    assert f"paddle-recompute: {error}" in result.stderr or code == 130
    assert "Traceback" not in result.stderr
    assert debug_shows in run("--config", TINY, "--debug", code=code).stderr


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("狗\tdog\n猫\n", [], "pairs.tsv:2: "),
        ("狗\tdog\n", ["contrastive.hard_negatives=1"], "pairs.tsv:1: 0 different negatives, few"),
    ],
)
def test_a_bad_line_of_the_data_is_told_before_a_rank_starts(
    text: str, overrides: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cli._on_ranks, "launch_with_restarts", lambda *_, **__: pytest.fail("started")
    )
    (tmp_path / "pairs.tsv").write_text(text)
    data = ["data.source=files", f"data.train_file={tmp_path / 'pairs.tsv'}"]
    assert_refused(["train", "--config", TINY, *data, *overrides], words)


# ---------------------------------------------------------------------------- what it does


@pytest.mark.usefixtures("fake_trainer")
@pytest.mark.parametrize(("rank", "lines"), [(0, 2), (1, 1)])
def test_under_fleetrun_the_first_rank_alone_prints_the_record(
    rank: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", str(rank))
    result = run("--config", CONFIGS / "contrastive_ernie-large_2x8gpu.yaml", "train.max_steps=999")
    assert len(result.stdout.splitlines()) == lines
    assert ("999" in result.stdout) == (rank == 0)


def test_more_ranks_are_given_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[Sequence[str], int]] = []

    def launch(config: Config, command: Sequence[str], *, max_restart: int) -> None:
        launched.append((command, max_restart))
        config.train.output_dir.mkdir(exist_ok=True)
        (config.train.output_dir / "result.json").write_text('{"mrr": 0.5,\n "名": "é"}\n')

    monkeypatch.setattr(cli._on_ranks, "launch_with_restarts", launch)
    overrides = [f"train.output_dir={tmp_path / 'run'}", "train.max_steps=50"]
    result = run("--config", TINY, "--max-restart", "3", *overrides)
    assert json.loads(result.stdout.splitlines()[-1]) == {"mrr": 0.5, "名": "é"}
    again = ["-m", "paddle_recompute", "train", "--config", str(TINY), *overrides]
    assert launched == [(again, 3)]
