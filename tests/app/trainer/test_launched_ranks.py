"""Runs under our launcher, with sharding: it gives its ranks settings of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddle_recompute.app.launch import launch
from tests.app.trainer.test_offloaded_runs import ON_RANKS, RUN
from tests.app.trainer.test_trainer import assert_same_run, tiny, write_pairs
from tests.ranks import ROOT

ALL = {**RUN, "train__save_every": None}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stage 1": {"strategy__sharding": True},
    "stage 3": ON_RANKS,
}
TRAIN = """
import sys
from paddle_recompute import Trainer, load_config
from paddle_recompute.app.launch import prepare_rank

prepare_rank()
for file in sys.argv[1:]:
    Trainer(load_config(file)).run()
"""


@pytest.mark.timeout(240)
def test_launched_runs_have_the_bits_of_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    for name in [name for name in os.environ if name.startswith("FLAGS_")]:
        monkeypatch.delenv(name)  # what a user has set wins over the launcher
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "train.py").write_text(TRAIN)
    files = []
    for name, changes in WAYS.items():
        config = tiny(tmp_path, **{**ALL, **changes, "train__output_dir": str(tmp_path / name)})
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(config.to_dict()))
    launch(config, [str(tmp_path / "train.py"), *map(str, files)])
    for name in WAYS:
        assert_same_run(tmp_path / name, tmp_path / "plain")
