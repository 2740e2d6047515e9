"""A function of Paddle's C++ that runs in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from paddle_recompute._paddle.native_calls import native_call

Result = TypeVar("Result")


class Run(threading.Thread, Generic[Result]):
    """``function()`` in a daemon thread; `result` or `error` is there when `ended` is set."""

    def __init__(self, function: Callable[[], Result]) -> None:
        super().__init__(name="collective", daemon=True)
        self._function = function
        self.ended = threading.Event()
        self.result: Result
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with native_call():
                self.result = self._function()
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()
