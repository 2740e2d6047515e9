"""The tutorial for PaddleNLP runs, where PaddleNLP is installed (`make test-nlp`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.docs.pages import Page
from tests.processes import python

needs_paddlenlp = pytest.mark.skipif(
    importlib.util.find_spec("paddlenlp") is None, reason="PaddleNLP is not installed"
)


@needs_paddlenlp
def test_the_tutorial_trains(tmp_path: Path) -> None:
    (code,) = Page("docs/tutorial_paddlenlp.md").blocks("python")
    assert "recompute: 4 parts" in python("-c", code, folder=tmp_path).stdout
