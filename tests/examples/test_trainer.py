"""The examples with other libraries run and learn, where these are installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, free_ports, rank_environment


def run(script: str, *arguments: str, ranks: int = 1) -> str:
    """The output of rank 0."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    environments = [env]
    if ranks > 1:
        ports = free_ports(ranks + 1)
        environments = [rank_environment(rank, ports) for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / script), *arguments],
            env={**one, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for one in environments
    ]
    try:
        outputs = [process.communicate(timeout=110)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return outputs[0]


@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("paddlenlp", "paddleformers")),
    reason="neither PaddleNLP nor PaddleFormers is installed (make venv-nlp, make venv-formers)",
)
def test_the_trainer_learns(tmp_path: Path) -> None:
    out = run("trainer.py", "--steps", "20", "--output-dir", str(tmp_path))
    (first, last) = re.findall(r"first loss (\S+), last loss (\S+)", out)[0]
    assert float(last) < 0.9 * float(first)


@pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"
)
def test_clip_learns_on_two_ranks() -> None:
    out = run("clip.py", "--steps", "10", "--pairs", "16", "--chunk-size", "4", ranks=2)
    first, last = (float(loss) for loss in re.findall(r"step +\d+  loss (\S+)", out))
    assert last < first
    assert re.search(r"after:   image to word R@1 \d\.\d+  word to image R@1 \d\.\d+", out)
    assert "image.backbone.layer4.* (2 x BasicBlock)" in out
    assert "text.blocks.layers.* (2 x TransformerEncoderLayer)" in out


@pytest.mark.parametrize("script", ["trainer.py", "clip.py"])
def test_it_is_short_enough_to_copy(script: str) -> None:
    assert len((ROOT / "examples" / script).read_text(encoding="utf-8").splitlines()) < 150
