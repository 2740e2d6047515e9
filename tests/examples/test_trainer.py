"""The examples with other libraries run and learn, where these are installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT


def run(script: str, *arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


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
def test_clip_learns() -> None:
    out = run("clip.py", "--steps", "4", "--pairs", "32", "--chunk-size", "16")
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss (\S+)", out)]
    assert losses and all(loss > 0 for loss in losses)
    assert re.search(r"after:   image to word R@1 \d\.\d+  word to image R@1 \d\.\d+", out)
    assert "image.backbone.layer4.* (2 x BasicBlock)" in out
    assert "text.blocks.layers.* (2 x TransformerEncoderLayer)" in out


@pytest.mark.parametrize("script", ["trainer.py", "clip.py"])
def test_it_is_short_enough_to_copy(script: str) -> None:
    assert len((ROOT / "examples" / script).read_text(encoding="utf-8").splitlines()) < 150
