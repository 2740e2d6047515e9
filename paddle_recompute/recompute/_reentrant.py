"""The PyLayer form of recompute: Paddle's own, with its inputs and outputs put in order.

Paddle's ``fleet.utils.recompute(use_reentrant=True)`` (2.6, 3.x) is one node of the graph that runs
the function under ``no_grad``, and in the backward runs it again and calls the engine from inside
the engine ("reentrant"). It takes plain tensors as arguments and results only, and gives no
gradient at all when no argument needs one. Here the function is handed to it as a function of
tensors alone: the arguments are taken apart before and put together inside, and a scalar that
needs a gradient comes along, so that the node is always differentiated.

What this form cannot do is refused: see `recompute`.
"""

from __future__ import annotations

from typing import Any

import paddle

from paddle_recompute import _nested, _paddle
from paddle_recompute.errors import RecomputeError
from paddle_recompute.replay import Call


class _Result:
    """Marks the place of result tensor number `index` of the PyLayer among the outputs."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Argument:
    """Marks the place of argument tensor number `index` of the PyLayer."""

    def __init__(self, index: int) -> None:
        self.index = index


def run(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `call` as one node of the graph; one extra forward in the backward."""
    leaves: dict[int, paddle.Tensor] = {}
    order: dict[int, int] = {}

    def take_out(tensor: paddle.Tensor) -> Any:
        # Parameters stay with the function: as arguments of a PyLayer they would be copied.
        if _paddle.is_parameter(tensor):
            return tensor
        order.setdefault(id(tensor), len(order))
        leaves[id(tensor)] = tensor
        return _Argument(order[id(tensor)])

    inputs = _nested.map_tensors(take_out, (args, kwargs))
    anchor = paddle.zeros([1])
    anchor.stop_gradient = False
    outputs: list[Any] = []

    def of_tensors(anchor: paddle.Tensor, *tensors: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        again_args, again_kwargs = _nested.map_leaves(
            lambda leaf: tensors[leaf.index] if isinstance(leaf, _Argument) else leaf, inputs
        )
        if not outputs:
            result = call.first(again_args, again_kwargs)
        else:
            result = _repeat(call, again_args, again_kwargs)
        given = {id(tensor): tensor for tensor in tensors}
        # One result always needs a gradient: Paddle refuses to go on where none does.
        differentiable = [anchor + 0]

        def mark(tensor: paddle.Tensor) -> Any:
            passed_through = given.get(id(tensor))
            if passed_through is not None and passed_through.stop_gradient:
                index = next(i for i, t in enumerate(tensors) if t is passed_through)
                return _Argument(index)
            if not tensor.is_floating_point():
                return tensor
            differentiable.append(tensor)
            return _Result(len(differentiable) - 1)

        marked = _nested.map_tensors(mark, result)
        if not outputs:
            outputs.append(marked)
        return tuple(differentiable)

    tensors = list(leaves.values())
    results = _paddle.reentrant_recompute(of_tensors, [anchor, *tensors])
    guard = _Guard(call.name)
    for result in results:
        if not result.stop_gradient:
            result.register_hook(guard)
    (marked,) = outputs

    def put_back(leaf: Any) -> Any:
        if isinstance(leaf, _Result):
            return results[leaf.index]
        return tensors[leaf.index] if isinstance(leaf, _Argument) else leaf

    return _nested.map_leaves(put_back, marked)


def _repeat(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return call.repeat(args, kwargs)
    except BaseException as error:
        _paddle.hand_on(error)
        raise


class _Guard:
    """A hook on the node's results, called before the node: refuses what would crash or be wrong.

    Paddle's node ends the interpreter when it is run a second time (2.6.2, 3.3.1), or by
    ``paddle.grad`` with ``create_graph`` (2.6.2).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._backward: _paddle.Backward | None = None

    def __call__(self, gradient: paddle.Tensor) -> None:
        backward = _paddle.current_backward()
        if backward is None:
            return
        problem = None
        if backward.retain_graph:
            problem = "backward(retain_graph=True): a second backward would crash the interpreter"
        elif backward.partial:
            problem = "paddle.grad: it would also fill .grad of the parameters"
        elif self._backward is not None and self._backward is not backward:
            problem = "a second backward through it"
        self._backward = backward
        if problem is not None:
            error = RecomputeError(
                f"{self._name} was recomputed with use_reentrant=True, which cannot serve "
                f"{problem}. Use the default, use_reentrant=None."
            )
            _paddle.hand_on(error)
            raise error
