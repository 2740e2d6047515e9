"""The matrix products of a loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import paddle


@contextmanager
def recorded_products() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what ``paddle.matmul`` gives inside."""
    shapes: list[tuple[int, ...]] = []
    matmul = paddle.matmul

    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = matmul(*args, **kwargs)
        shapes.append(tuple(result.shape))
        return result

    with mock.patch.object(paddle, "matmul", recorded):
        yield shapes
