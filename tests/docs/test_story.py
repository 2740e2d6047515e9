"""The tutorial for encoders, from pairs to a second round with hard negatives: all its commands."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import Page
from tests.docs.test_code import merged
from tests.ranks import ROOT

TUTORIAL = Page("docs/tutorial_encoders.md")
PAIRS = 400
# Added to the commands that train: the same way with less to compute.
SMALLER = (
    *("model.hidden_size=16", "model.intermediate_size=32", "model.num_layers=1"),
    *("model.num_heads=2", "train.max_steps=4", "contrastive.global_batch=16"),
)
SMALLER_CHUNKS = ("contrastive.chunk_tokens=64", "contrastive.tile=4")


def write_pairs(file: Path) -> None:
    draw = random.Random(0)
    words = [f"word{number}" for number in range(200)]
    lines = [
        f"{one} of {other}\tthe {other} that is {one} and number {number}"
        for number, (one, other) in enumerate(draw.choices(words, k=2) for _ in range(PAIRS))
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_command(folder: Path, changes: tuple[str, ...]) -> None:
    """``paddle-recompute`` of this environment, which adds `changes` to the commands that train."""
    file = folder / "paddle-recompute"
    file.write_text(
        "#!/bin/sh\n"
        f'case "$1" in train|doctor) set -- "$@" {" ".join(changes)};; esac\n'
        f'exec {sys.executable} -m paddle_recompute "$@"\n',
        encoding="utf-8",
    )
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.timeout(600)
def test_the_story_goes_from_pairs_to_a_second_round(tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PADDLE_RECOMPUTE_CACHE": str(tmp_path / "cache"),
    }
    write_pairs(tmp_path / "pairs.tsv")
    write_command(commands, SMALLER)
    configuration = tmp_path / "run.yaml"
    printed = ""
    blocks = TUTORIAL.code()
    assert [language for language, _ in blocks] == [
        *("bash", "bash", "yaml", "bash", "bash"),
        "python",
    ]
    for language, code in blocks:
        if language == "bash":
            run = subprocess.run(
                ["sh", "-e", "-c", code],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
            )
            assert run.returncode == 0, f"{code}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
            printed += run.stdout
        elif language == "yaml":
            before = yaml.safe_load(configuration.read_text(encoding="utf-8"))
            after = yaml.safe_dump(merged(before, yaml.safe_load(code)))
            configuration.write_text(after, encoding="utf-8")
            write_command(commands, (*SMALLER, *SMALLER_CHUNKS))
    texts = (tmp_path / "texts.txt").read_text(encoding="utf-8").splitlines()
    found = [line for line in printed.splitlines() if any(text in line for text in texts)]
    assert len(found) >= 3
    negatives = (tmp_path / "mined.jsonl").read_text(encoding="utf-8")
    assert '"negatives": ["' in negatives
    for run_folder in ("run", "second"):
        assert (tmp_path / "outputs" / run_folder / "report.html").exists()
    assert (tmp_path / "comparison.html").exists()
