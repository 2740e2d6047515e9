"""What is sound, and changes nothing in this run, is said: with its dotted path and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_recompute.app.config import load_config

SMALLEST = """\
model: {preset: tiny}
contrastive: {global_batch: 16}
train: {max_steps: 4, learning_rate: 1e-3}
"""
TWO = "launch.num_ranks=2"
PLAIN = "recompute.enable=false"
ALONE, IS_PLAIN = "there is one rank", "recompute.enable is false"
# (what has no effect, in which run, why, in which run it has one)
CASES = [
    ("sync.mode=fleet", "", ALONE, TWO),
    ("sync.compression=bf16", "", ALONE, TWO),
    ("strategy.fuse_grad_size_in_MB=8", "", ALONE, TWO),
    ("strategy.find_unused_parameters=true", "", ALONE, TWO),
    ("strategy.sharding=true", "", ALONE, TWO),
    ("contrastive.negatives=local", "", ALONE, TWO),
    ("strategy.fuse_grad_size_in_MB=8", f"{TWO} sync.mode=fleet", "sync.mode is fleet", TWO),
    ("strategy.find_unused_parameters=true", f"{TWO} sync.mode=fleet", "sync.mode is fleet", TWO),
    ("strategy.find_unused_parameters=true", f"{TWO} mode=static", "a Program has a", TWO),
    ("recompute.checkpoints=['encoder.nothing']", PLAIN, IS_PLAIN, ""),
    ("recompute.offload=host", PLAIN, IS_PLAIN, ""),
    ("train.measure_plain=false", PLAIN, IS_PLAIN, ""),
    ("train.verify=false", "", "mode is dygraph", "mode=static"),
    ("contrastive.chunk_size=16", "", "a rank has 16 pairs", "contrastive.global_batch=32"),
    (
        "data.on_bad_line=skip",
        "",
        "the file that is mined has none",
        "data.source=files data.train_file=a",
    ),
]


@pytest.mark.parametrize(("setting", "run", "reason", "elsewhere"), CASES)
def test_what_has_no_effect_is_said(
    setting: str, run: str, reason: str, elsewhere: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(SMALLEST)
    path, _, value = setting.partition("=")
    [said] = load_config(file, [setting, *run.split()]).without_effect()
    assert said.startswith(f"{path}: {value} has no effect here: {reason}")
    assert load_config(file, [setting, *elsewhere.split()]).without_effect() == []
    assert load_config(file, run.split()).without_effect() == []  # defaults are not spoken of
