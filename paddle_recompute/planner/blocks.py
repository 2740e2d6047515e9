"""Which Layers of a model are the blocks that are planned, if nobody names them."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddle_recompute import _paddle
from paddle_recompute.errors import PlanError, SelectionError
from paddle_recompute.options import AUTO
from paddle_recompute.recompute import find_blocks, layers_matching


def planned_blocks(
    model: paddle.nn.Layer, checkpoints: Sequence[str] | None = None
) -> dict[str, paddle.nn.Layer]:
    """The blocks of `model` by name, in its order.

    Args:
        model: Any Layer.
        checkpoints: Patterns as in ``recompute.checkpoints``. None or ``auto``: the repeated
            blocks that `apply_recompute` finds; without any, the children with parameters.

    Raises:
        PlanError: There are none.
        SelectionError: A pattern matches nothing.
    """
    layers = dict(model.named_sublayers(include_self=True))
    if checkpoints is not None and list(checkpoints) != [AUTO]:
        names = layers_matching(model, list(checkpoints))
        if not names:
            raise PlanError(
                f"checkpoints {list(checkpoints)} select functions only; a plan is made for the "
                "calls of Layers: name the blocks, and their cheap parts are found"
            )
    else:
        try:
            names = [name for one in find_blocks(model) for name in one.names]
        except SelectionError:
            names = [name for name, child in _paddle.children_of(model) if child.parameters()]
    if not names:
        raise PlanError("the model has no Layers that could be blocks; name them in checkpoints")
    # A Layer with several names is in the model once, under the first of them.
    return {name: layers[name] for name in names if name in layers}
