"""The commands `estimate` and `plan`: table, picture, page."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from paddle_recompute._paddle import memory
from paddle_recompute.app.cli import _process, main
from paddle_recompute.app.memory_page import budget_of_card
from paddle_recompute.app.trainer import what_if
from paddle_recompute.errors import PlanError
from paddle_recompute.planner import RecomputePlan
from tests.ranks import ROOT

CONFIG = str(ROOT / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml")
SMALL = ["launch.num_ranks=1", "data.vocab_size=500", "model.num_layers=3"]

needs_peaks = pytest.mark.skipif(
    not memory.can_reset_peak(), reason="2.6 cannot start the peak anew"
)


@pytest.fixture(autouse=True)
def _settings_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would choose another path of MKL, for this process and all tests after it."""
    monkeypatch.setattr(_process, "speed_settings", lambda *_, **__: {})


@needs_peaks
def test_plan_writes_a_table_a_picture_and_a_page(tmp_path: Path) -> None:
    budget = ["--memory-budget", "60MiB", "--what-if", "batch=128", "--output", str(tmp_path)]
    result = CliRunner().invoke(main, ["plan", "--config", CONFIG, *budget, *SMALL])
    assert result.exit_code == 0, result.output
    assert "largest batch" in result.output and "plan for 60.0 MiB" in result.output
    for policy in ("plain", "every_n: 2", "segments: auto", "all", "smallest"):
        assert policy in result.output
    assert (tmp_path / "memory.png").read_bytes()[1:4] == b"PNG"
    page = (tmp_path / "memory.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page and "http" not in page
    assert RecomputePlan.load(tmp_path / "plan.json").memory_budget == 60 * 2**20


@needs_peaks
def test_estimate_needs_no_budget() -> None:
    result = CliRunner().invoke(
        main, ["estimate", "--config", CONFIG, "contrastive.chunk_size=32", *SMALL]
    )
    assert result.exit_code == 0, result.output
    assert "as configured: a step takes" in result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "needs a budget"),
        (["--memory-budget", "12 bananas"], "no number of bytes"),
        (["--memory-budget", "GTX9"], "is not known"),
        (["--what-if", "hats=3"], "is not known"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["plan", "--config", CONFIG, *arguments, *SMALL])
    assert result.exit_code == 2 and message in result.output


def test_cards_and_what_ifs() -> None:
    assert budget_of_card("a100-40g") == 40 * 2**30 - 3 * 2**29
    assert what_if("batch=512,gpus=8") == ["contrastive.global_batch=512", "launch.num_ranks=8"]
    with pytest.raises(PlanError):
        budget_of_card("GTX9")
