"""The examples with other libraries run and learn, where these are installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.examples.test_examples import run
from tests.processes import outside_of_ranks, python
from tests.ranks import ROOT, run_ranks

EXAMPLES = ROOT / "examples"


@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("paddlenlp", "paddleformers")),
    reason="neither PaddleNLP nor PaddleFormers is installed (make venv-nlp, make venv-formers)",
)
def test_the_trainer_learns(tmp_path: Path) -> None:
    arguments = ("--steps", "20", "--output-dir", tmp_path)
    done = python(EXAMPLES / "trainer.py", *arguments, folder=tmp_path, env=outside_of_ranks())
    said = done.stdout + done.stderr
    (first, last) = re.findall(r"first loss (\S+), last loss (\S+)", said)[0]
    assert float(last) < 0.9 * float(first)


def run_clip() -> str:
    return run("clip", "--steps", "10", "--pairs", "16", "--chunk-size", "4")


@pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"
)
def test_clip_learns_on_two_ranks() -> None:
    out, _ = run_ranks(run_clip, 2)
    first, last = (float(loss) for loss in re.findall(r"step +\d+  loss (\S+)", out))
    assert last < first
    assert re.search(r"after:   image to word R@1 \d\.\d+  word to image R@1 \d\.\d+", out)
    assert "image.backbone.layer4.* (2 x BasicBlock)" in out
    assert "text.blocks.layers.* (2 x TransformerEncoderLayer)" in out
