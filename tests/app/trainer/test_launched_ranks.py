"""``paddle-recompute train`` with sharding: our launcher gives its ranks settings of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.app.trainer.test_shards_of_ranks import ON_RANKS, RUN
from tests.app.trainer.test_trainer import assert_same_run, tiny, write_pairs
from tests.processes import python

ALL = {**RUN, "train__eval_before": False, "train__save_every": None}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stage 1": {"strategy__sharding": True},
    "stage 3": ON_RANKS,
}


@pytest.mark.timeout(240)
def test_launched_runs_have_the_bits_of_the_plain_one(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    # What a user has set wins over the launcher.
    own = {key: value for key, value in os.environ.items() if not key.startswith("FLAGS_")}
    for name, changes in WAYS.items():
        output = {"train__output_dir": str(tmp_path / name)}
        config = tiny(tmp_path, **{**ALL, **changes, **output}).to_dict()
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        python("-m", "paddle_recompute", "train", "--config", file, env=own)
        assert_same_run(tmp_path / name, tmp_path / "plain")
