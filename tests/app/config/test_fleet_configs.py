"""Every file in fleet_configs/ loads, and its name says what it is."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from paddle_recompute.app.config import load_config

FOLDER = Path(__file__).resolve().parents[3] / "fleet_configs"
FILES = sorted(FOLDER.glob("*"))


def test_there_is_one_for_each_scenario() -> None:
    assert {
        "contrastive_ernie-tiny_2cpu.yaml",
        "contrastive_ernie-tiny_large-batch_2cpu.yaml",
        "contrastive_ernie-base_8gpu.yaml",
        "contrastive_ernie-large_2x8gpu.yaml",
    } <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_loads_and_is_what_its_name_says(file: Path) -> None:
    config = load_config(file)
    named = re.fullmatch(
        r"contrastive_ernie-([a-z]+)(?:_[a-z-]+)?_(?:(\d)x)?(\d)([cg]pu)\.yaml", file.name
    )
    assert named, "the name is <task>_<model>[_<variant>]_<topology>.yaml"
    preset, nodes, ranks, device = named.groups()
    assert config.model.preset == preset
    assert config.launch.num_nodes == int(nodes or 1)
    assert config.launch.num_ranks == int(ranks)
    assert config.launch.device == device
    assert config.without_effect() == []
    # model.init_from reads PaddleNLP's names: tests/weights/test_init_from.py.
    assert "not converted" not in " ".join(file.read_text().replace("#", " ").split())
    # The comment beside the batch says the product.
    line = next(line for line in file.read_text().splitlines() if "global_batch:" in line)
    factors = re.findall(r"\d+", line.partition("#")[2].partition(",")[0])
    assert math.prod(map(int, factors)) == config.contrastive.global_batch
