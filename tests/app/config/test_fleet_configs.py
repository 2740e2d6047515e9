"""Every file in fleet_configs/ loads, and its name says what it is."""

from __future__ import annotations

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


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_says_that_the_names_of_paddlenlp_are_not_converted(file: Path) -> None:
    """model.init_from reads them: tests/weights/test_init_from.py."""
    said = " ".join(line.strip("# ") for line in file.read_text().splitlines())
    assert "not converted" not in said


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_setting_has_an_effect(file: Path) -> None:
    assert load_config(file).without_effect() == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_comment_beside_the_batch_makes_that_batch(file: Path) -> None:
    line = next(line for line in file.read_text().splitlines() if "global_batch:" in line)
    product = 1
    for factor in re.findall(r"\d+", line.partition("#")[2].partition(",")[0]):
        product *= int(factor)
    assert product == load_config(file).contrastive.global_batch
