"""The commands `estimate` and `plan`: table, page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from paddle_recompute.app.cli import _process, main
from paddle_recompute.app.config import load_config
from paddle_recompute.errors import ConfigError
from paddle_recompute.planner import RecomputePlan
from tests.app.report.pages import Page
from tests.planner.chains import measured
from tests.ranks import ROOT

CONFIG = str(ROOT / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml")
# The smallest peak is 59 to 61 MiB, with another machine or order of tests; plain takes 164.
SMALL = ["launch.num_ranks=1", "data.vocab_size=500", "model.num_layers=3"]


@pytest.fixture(autouse=True)
def _settings_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would choose another path of MKL, for this process and all tests after it."""
    monkeypatch.setattr(_process, "speed_settings", lambda *_, **__: {})


@measured
def test_plan_writes_a_table_and_a_page(tmp_path: Path) -> None:
    budget = ["--memory-budget", "80MiB", "contrastive.global_batch=128", "--output", str(tmp_path)]
    result = CliRunner().invoke(main, ["plan", "--config", CONFIG, *budget, *SMALL])
    assert result.exit_code == 0, result.output
    assert "largest batch" in result.output and "plan for 80.0 MiB" in result.output
    for policy in ("plain", "every_n: 2", "all", "smallest"):
        assert policy in result.output
    page = Page(tmp_path / "memory.html")
    assert page.links == [] and page.text.count("smallest") == 2  # table, words
    assert f"written: {tmp_path / 'plan.json'}" in result.output
    for words in ("plan for 80.0 MiB", "Memory over one step"):
        assert words in page.text
    assert RecomputePlan.load(tmp_path / "plan.json").memory_budget == 80 * 2**20


@measured
def test_estimate_of_another_step_makes_a_plan() -> None:
    arguments = ["estimate", "--config", CONFIG, "data.vocab_size=500", "model.num_layers=2"]
    budget = ["--memory-budget", "16MiB", "--json"]  # plain takes 19, all recomputed 12
    plain = CliRunner().invoke(main, [*arguments, "--what-if", "batch=96,gpus=3", *budget])
    assert plain.exit_code == 0, plain.output
    told = json.loads(plain.stdout)
    peaks = {row["policy"]: row["peak_bytes"] for row in told["policies"]}
    assert peaks["smallest"] <= 16 * 2**20 < peaks["plain"]
    batches = {row["policy"]: row["largest_batch"] or 0 for row in told["policies"]}
    # The search stops within a 64th.
    assert batches["plain"] < 96 <= batches["smallest"] * 65 / 64
    assert told["plan"]["memory_budget"] == 16 * 2**20
    spread = ["recompute.offload_parameters=ranks", "recompute.num_shards=3"]
    small = ["contrastive.global_batch=24", "contrastive.chunk_size=4"]
    given = [*arguments, *spread, *small, "--memory-budget", "1GiB"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0, result.output
    assert "as configured: offload_parameters: ranks; the table is without it" in result.output
    assert "no plan" in result.output and "does not go with offload_parameters" in result.output


@measured
def test_estimate_needs_no_budget() -> None:
    small = [*SMALL[:2], "model.num_layers=2", "contrastive.global_batch=32"]
    small.append("contrastive.chunk_size=16")
    result = CliRunner().invoke(main, ["estimate", "--config", CONFIG, *small])
    assert result.exit_code == 0, result.output
    assert "as configured: a step takes" in result.output
    kept = CliRunner().invoke(
        main,
        ["estimate", "--config", CONFIG, *small, 'recompute.keep=["**.linear1", "**.linear2"]'],
    )
    assert "; recomputed blocks keep **.linear1, **.linear2:" in kept.output
    peaks = [
        re.search(rf"^{words} +(\d\S+ \w+) ", kept.output, re.MULTILINE)
        for words in ("all", "as configured: a step takes", "smallest")
    ]
    assert peaks[0] and peaks[1] and peaks[2]
    assert peaks[0][1] == peaks[1][1] != peaks[2][1]


@pytest.mark.parametrize(
    "setting",
    [
        "recompute.offload_parameters=host",
        "recompute.offload=host",
        "recompute.engine=fleet",
        "model.towers=separate",
        "train.compile=to_static",
    ],
)
def test_plan_refuses_what_train_refuses(setting: str) -> None:
    budget = ["recompute.memory_budget=2147483648", "recompute.policy=budget"]
    with pytest.raises(ConfigError) as refusal:
        load_config(CONFIG, [*SMALL, setting, *budget])
    given = ["--memory-budget", "2147483648", *SMALL, setting]
    result = CliRunner().invoke(main, ["plan", "--config", CONFIG, *given])
    assert result.exit_code == 2 and str(refusal.value).partition(" has ")[2] in result.output
    assert result.stdout == "" and "Measuring" not in result.output


def test_plan_refuses_a_run_without_recompute() -> None:
    given = ["--memory-budget", "1GiB", *SMALL, "recompute.enable=false"]
    result = CliRunner().invoke(main, ["plan", "--config", CONFIG, *given])
    assert result.exit_code == 2 and "recompute.enable is false; set it to true" in result.output
    assert result.stdout == "" and "Measuring" not in result.output


@measured
def test_a_budget_that_is_too_small_for_a_configuration_of_ranks() -> None:
    small = ["data.vocab_size=500", "model.num_layers=1", "contrastive.global_batch=8"]
    given = ["--memory-budget", "1MiB", *small]
    result = CliRunner().invoke(main, ["plan", "--config", CONFIG, *given])
    assert result.exit_code == 2 and "strategy.sharding: true" in result.output
    result = CliRunner().invoke(main, ["plan", "--config", CONFIG, *given, "launch.num_ranks=1"])
    assert result.exit_code == 2 and "sharding" not in result.output


@measured
def test_estimate_with_segments_advises_settings() -> None:
    small = ["data.vocab_size=500", "model.num_layers=2", "contrastive.global_batch=8"]
    segments = ["mode=static", "recompute.policy=segments"]
    result = CliRunner().invoke(main, ["estimate", "--config", CONFIG, *small, *segments])
    assert result.exit_code == 0, result.output
    assert "set recompute.policy=all or every_n, or let paddle-recompute plan" in result.output
    result = CliRunner().invoke(
        main, ["estimate", "--config", CONFIG, *small, 'recompute.keep=["none"]']
    )
    assert result.exit_code == 2 and "recompute.keep: the pattern 'none'" in result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "needs a budget"),
        (["--memory-budget", "12 bananas"], "no number of bytes"),
        (["--memory-budget", "A100-40G"], "no number of bytes"),
        (["--memory-budget", "8GiB", "--what-if", "hats=3"], "is not known"),
        (
            ["--memory-budget", "8GiB", "--output", CONFIG],
            f"--output: {CONFIG}: {CONFIG} is a file",
        ),
        (["--memory-budget", "8GiB", "launch.device=gpu"], "launch.device is gpu, but the"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["plan", "--config", CONFIG, *arguments, *SMALL])
    assert result.exit_code == 2 and message in result.output
