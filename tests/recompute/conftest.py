"""What every test of recompute starts from, and what none may leave behind."""

from __future__ import annotations

from collections.abc import Iterator

import paddle
import pytest

from paddle_recompute.recompute import is_recomputing
from tests.recompute.contract import clean_streams


@pytest.fixture(autouse=True)
def _start_clean_and_leave_clean() -> Iterator[None]:
    with clean_streams():
        yield
    assert not is_recomputing()
    assert paddle.is_grad_enabled()
    # Paddle allows one pair at a time: this raises if a test, or recompute, left one behind.
    with paddle.autograd.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        pass
