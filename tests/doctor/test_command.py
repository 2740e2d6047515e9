"""``paddle-recompute doctor`` from end to end: its ranks, its report and its exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from paddle_recompute.app import cli
from tests.app.trainer.test_trainer import tiny, write_pairs
from tests.processes import outside_of_ranks, python

OWN = '''
import os
import random

import paddle


class Block(paddle.nn.Layer):
    def __init__(self, width):
        super().__init__()
        self.linear = paddle.nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).tanh()


class Unrepeatable(Block):
    """Draws from a source that nobody puts back, on rank 1 only where there is one."""

    def forward(self, x):
        is_faulty = os.environ.get("PADDLE_TRAINER_ID", "1") == "1"
        return super().forward(x) * (1 + random.SystemRandom().random() * is_faulty)


class Encoder(paddle.nn.Layer):
    def __init__(self, vocab_size, width=8, faulty=False, pooler=False):
        super().__init__()
        self.embedding = paddle.nn.Embedding(vocab_size, width)
        kinds = [Block, Unrepeatable if faulty else Block, Block]
        self.blocks = paddle.nn.LayerList([kind(width) for kind in kinds])
        if pooler:
            self.pooler = paddle.nn.Linear(width, width)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x.mean(axis=1)
'''


DOCTOR = ("doctor", "--config", "run.yaml")
REPORT = Path("run/doctor.json")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny(tmp_path).to_dict()))
    monkeypatch.chdir(tmp_path)


def own(**options: bool) -> list[str]:
    model = {"name": "own:Encoder", "options": options}
    return [f"model={json.dumps(model)}"]


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command in this process, with one rank."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.delenv("PADDLE_TRAINER_ID", raising=False)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(cli.main, [*DOCTOR, *arguments])

    return call


FAULTY = ("not_repeatable", "blocks.1")
UNUSED = ("unused_parameter", "pooler.weight")


@pytest.mark.timeout(300)  # a launcher and two ranks, beside other tests
def test_a_fault_on_one_of_two_ranks_is_named(tmp_path: Path) -> None:
    given = [*own(faulty=True, pooler=True), "launch.num_ranks=2"]
    done = python(
        *("-m", "paddle_recompute", *DOCTOR, *given),
        folder=tmp_path,
        env={**outside_of_ranks(), "OMP_NUM_THREADS": "1"},
        timeout=280,
        fails=True,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    report = json.loads(REPORT.read_text())
    (finding,), (warning,) = report["findings"], report["warnings"]
    assert (warning["kind"], warning["where"]) == UNUSED, warning
    assert (finding["kind"], finding["where"]) == FAULTY, finding
    assert finding["message"].startswith("(rank 1)")
    assert "not_repeatable at blocks.1" in output and "Traceback" not in output


def test_a_warning_alone_ends_with_exit_code_0(called: Callable[..., Result]) -> None:
    result = called(*own(pooler=True))
    assert result.exit_code == 0, result.output
    report = json.loads(REPORT.read_text())
    assert report["ok"] and report["findings"] == []
    (warning,) = report["warnings"]
    assert (warning["kind"], warning["where"]) == UNUSED, warning
    assert not warning["message"].startswith("(rank")
    assert "1 warning:\n- unused_parameter at pooler.weight" in result.output
    assert "ok: no fault found" in result.output


@pytest.mark.parametrize(
    "policy",
    [
        ["recompute.policy=budget", "recompute.memory_budget=1GiB"],
        ["recompute.policy=segments", "mode=static"],
    ],
)
def test_policies_that_dygraph_does_not_apply(
    policy: list[str], called: Callable[..., Result]
) -> None:
    result = called(*policy)
    assert result.exit_code == 0, result.output
    assert ": each part is recomputed here, as by policy: all" in result.output
    assert "2 recomputed\nok: no fault found" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "a.yaml", "--parity"], "--parity is gone: call paddle-recompute parity"),
        (["--self-test"], "--self-test is gone: call python -m benchmarks.correctness.self_test"),
        (["--output", "a.json"], "--output is gone: the report is in train.output_dir/doctor.json"),
    ],
)
def test_refused_options(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(cli.main, ["doctor", *arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_a_folder_that_is_a_file_is_told_before_the_steps(called: Callable[..., Result]) -> None:
    result = called("train.output_dir=pairs.tsv")
    assert result.exit_code == 2
    assert "train.output_dir: pairs.tsv: " in result.output and "is a file" in result.output
    assert "Comparing" not in result.output


def test_a_report_that_cannot_be_written_is_told(called: Callable[..., Result]) -> None:
    REPORT.mkdir(parents=True)
    result = called()
    assert result.exit_code == 2
    assert f"{REPORT}: cannot be written" in result.output
