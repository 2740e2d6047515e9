"""Writes into tensors that ``inplace_version`` does not count."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle


def address_of(tensor: paddle.Tensor) -> int | None:
    """Where the memory of `tensor` begins; None if it has none, or is sparse.

    ``data_ptr`` is public; what it says of tensors without memory differs: None, 0 or, for the
    placeholder buffers of ``nn.LSTM`` on 3.x, a RuntimeError.
    """
    try:
        return paddle.Tensor.data_ptr(tensor) or None
    except RuntimeError:
        return None


def addresses_of(tensors: list[paddle.Tensor]) -> list[int | None]:
    """`address_of` each of them; 0 may stand for None."""
    try:
        return [*map(paddle.Tensor.data_ptr, tensors)]
    except RuntimeError:
        return [*map(address_of, tensors)]


@functools.cache
def watch_writes(written: Callable[[paddle.Tensor], None]) -> None:
    """From now on, call ``written(tensor)`` for each write that no ``inplace_version`` counts.

    These are (2.6, 3.x) the update of every optimizer, whose subclasses all come through
    ``Optimizer._create_optimization_pass``; ``Tensor.set_value``, through which ``set_state_dict``
    goes; ``Tensor.copy_``; ``_C_ops.assign_value_`` (``paddle.assign`` of an array into a tensor);
    and the classes of ``nn.initializer``, which people call inside of `resident`. Paddle offers no
    callback for any of them. Callers see no change. Can go when Paddle raises ``inplace_version``
    there.

    Not watched: ``Tensor.exponential_``, and statistics of ``functional.batch_norm`` in plain
    tensors, which real code does not write between a forward and its backward.
    """
    update = paddle.optimizer.Optimizer._create_optimization_pass

    @functools.wraps(update)
    def reported_update(self: Any, parameters_and_grads: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(self, parameters_and_grads, *args, **kwargs)
        if isinstance(parameters_and_grads, dict):
            parameters_and_grads = parameters_and_grads["params"]
        for parameter, gradient in parameters_and_grads:
            if gradient is not None and isinstance(parameter, paddle.Tensor):
                written(parameter)
        return result

    def reported(
        write: Callable[..., Any], place: int = 0, name: str = "self"
    ) -> Callable[..., Any]:
        """`place` and `name` are those of the tensor among the arguments."""

        @functools.wraps(write)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = write(*args, **kwargs)
            tensor = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(tensor, paddle.Tensor):
                written(tensor)
            return result

        return call

    initializer = paddle.nn.initializer.Initializer
    initializer.__call__ = reported(initializer.__call__, place=1, name="param")

    paddle.optimizer.Optimizer._create_optimization_pass = reported_update
    for owner, name in _UNCOUNTED_WRITES:
        setattr(owner, name, reported(getattr(owner, name)))


_UNCOUNTED_WRITES = (
    (paddle.Tensor, "set_value"),
    (paddle.Tensor, "copy_"),
    (paddle._C_ops, "assign_value_"),
)
