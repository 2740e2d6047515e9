"""What `minimize` appends to a Program of PIR (Paddle 3.3) with an optimizer of Paddle.

``Optimizer.minimize`` is made of ``backward``, with ``_parameter_list``, and ``_apply_optimize``;
between the two go the exchange of the ranks and the merge. Can go when Paddle lets something be
appended there.
"""

from __future__ import annotations

import paddle

from paddle_recompute._paddle.static.pir import Operation, Value


def append_backward(
    optimizer: paddle.optimizer.Optimizer, loss: Value, startup: paddle.static.Program
) -> list[tuple[Value, Value]]:
    """The first half of ``optimizer.minimize(loss)``: pairs of parameter and gradient.

    The parameters that the optimizer was made with are handed on, as its ``minimize`` does.
    """
    pairs = optimizer.backward(loss, startup_program=startup, parameters=optimizer._parameter_list)
    return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]


def create_learning_rate(optimizer: paddle.optimizer.Optimizer) -> None:
    """Add the learning rate of `optimizer` at the insertion point, after `append_backward`.

    An optimizer adds it with its first operator; in the body of a condition, the executor does
    not find the one that a scheduler writes to before every run (3.3.1: "The type of value is
    nullptr").
    """
    optimizer._create_global_learning_rate()


def append_update(
    optimizer: paddle.optimizer.Optimizer,
    loss: Value,
    startup: paddle.static.Program,
    params_grads: list[tuple[Value, Value]],
) -> list[Operation]:
    """The second half of ``optimizer.minimize(loss)``: clip, decay and update.

    ``apply_gradients`` (public) sorts the parameters by name, which sums the norm of a gradient
    clip in another order than ``minimize`` does.
    """
    operations: list[Operation] = optimizer._apply_optimize(loss, startup, params_grads)
    return operations


def count_up_in_place(counter: Value) -> None:
    """``counter += 1``, in its own memory."""
    paddle._C_ops.increment_(counter, 1.0)
