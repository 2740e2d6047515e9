"""Runs of the trainer in these tests draw no pictures, unless a test asks for them."""

from __future__ import annotations

import pytest

from paddle_recompute.app.trainer import report


@pytest.fixture
def pictures() -> None:
    """For a test that looks at the pictures of the report."""


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three pictures take 0.4 s, a third of a run; ``test_report.py`` draws them."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(report, "_png", lambda figure: b"not drawn")
