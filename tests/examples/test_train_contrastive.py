"""The example runs as its docstring says, as one process and under Paddle's launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

SCRIPT = ROOT / "examples" / "train_contrastive.py"
NUM_STEPS = 14  # more than an epoch, which has 11 steps


MICRO_BATCHES = ("strategy.gradient_merge=true", "strategy.gradient_merge_configs.k_steps=2")
CHUNKS = ("contrastive.chunk_tokens=32", "contrastive.learnable_temperature=true")


@pytest.mark.parametrize(("num_ranks", "settings"), [(1, MICRO_BATCHES), (2, CHUNKS)])
def test_it_trains_and_finds_what_it_learned(
    num_ranks: int, settings: tuple[str, ...], tmp_path: Path
) -> None:
    pairs = [f"w{i} x{i * i % 97}\tW{i} X{i * i % 97}\n" for i in range(200)]
    (tmp_path / "pairs.tsv").write_text("".join(pairs))
    arguments = [
        str(ROOT / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml"),
        "data.source=files",
        f"data.train_file={tmp_path / 'pairs.tsv'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.valid_pairs=20",
        "data.pool_size=100",
        "data.vocab_size=200",
        "model.num_layers=1",
        "model.hidden_size=16",
        "model.intermediate_size=16",
        "contrastive.global_batch=16",
        *settings,
        f"train.max_steps={NUM_STEPS}",
        "train.warmup_steps=2",
        f"train.output_dir={tmp_path / 'run'}",
    ]
    launcher = []
    if num_ranks > 1:
        launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(num_ranks)]
        launcher += ["--log_dir", str(tmp_path / "logs")]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *arguments],
        env={**_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+ +loss (\S+)$", done.stdout, re.M)]
    assert len(losses) == NUM_STEPS
    assert sum(losses[-3:]) < sum(losses[:3])
    assert "'recall@1'" in done.stdout and "'queries': 20" in done.stdout
    assert (tmp_path / "run" / "model.pdparams").stat().st_size > 0


def test_it_is_short_enough_to_copy() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 90


def _environment() -> dict[str, str]:
    """Without what makes a process a rank, should the tests run under a launcher themselves."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
