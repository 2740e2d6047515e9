"""Calls of one function, one right after another, and their repetition.

What a function reaches is searched and recorded for its first call. As long as the calls change
nothing of it, those after them use that record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle_recompute.replay.call import Call
from paddle_recompute.replay.writes import watch_writes


class Row:
    """Calls of `function`, whose arguments differ in their tensors alone.

    Args:
        function: A Layer or any callable.
        name: Its name in errors.
        before: The row right before.
    """

    def __init__(self, function: Callable[..., Any], name: str, before: Row | None = None) -> None:
        watch_writes()
        self._function = function
        self._name = name
        self._calls: list[Call] = []
        self._last: Call | None = None
        """The last call, if its record serves the next one."""
        if before is not None and before._function is function:
            self._last = before._last

    def first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function; a write into its arguments is refused in calls with a record only."""
        call = Call(self._function, self._name, preserve_rng_state=True, check=False)
        if self._last is None:
            outputs = call.first(args, kwargs)
        else:
            outputs = call.first_after(self._last, args, kwargs)
        self._calls.append(call)
        self._last = call if call.serves_the_next() else None
        return outputs

    def repeat(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The second forward of call `number`, counted from 0; see `Call.repeat`."""
        return self._calls[number].repeat(args, kwargs)
