"""The tutorial for PaddleNLP runs, where PaddleNLP is installed (`make test-nlp`)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import Page
from tests.ranks import ROOT

needs_paddlenlp = pytest.mark.skipif(
    importlib.util.find_spec("paddlenlp") is None, reason="PaddleNLP is not installed"
)


@needs_paddlenlp
def test_the_tutorial_trains(tmp_path: Path) -> None:
    (code,) = Page("docs/tutorial_paddlenlp.md").blocks("python")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "recompute: 4 parts" in run.stdout
