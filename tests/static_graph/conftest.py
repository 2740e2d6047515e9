"""The default Program of a test."""

from __future__ import annotations

from collections.abc import Iterator

import paddle
import pytest

from tests.static_graph.models import building


@pytest.fixture
def program() -> Iterator[paddle.static.Program]:
    """Empty, in static mode."""
    with building() as main:
        yield main
