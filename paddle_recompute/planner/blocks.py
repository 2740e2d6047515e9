"""Which Layers of a model are the blocks that are planned, if the configuration names none."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddle_recompute._paddle.layers import children_of
from paddle_recompute.errors import PlanError, SelectionError
from paddle_recompute.options import AUTO
from paddle_recompute.recompute import layers_matching


def planned_blocks(
    model: paddle.nn.Layer, checkpoints: Sequence[str] | None = None
) -> dict[str, paddle.nn.Layer]:
    """The blocks of `model` by name, in its order.

    Args:
        model: Any Layer.
        checkpoints: Patterns as in ``recompute.checkpoints``; ``auto``: the repeated blocks that
            `apply_recompute` finds. None: those, or without any the direct sublayers with
            parameters.

    Raises:
        PlanError: The patterns select no Layer.
        SelectionError: A pattern matches nothing, or ``auto`` finds no repeated blocks.
    """
    layers = dict(model.named_sublayers(include_self=True))
    try:
        names = layers_matching(model, [AUTO] if checkpoints is None else list(checkpoints))
    except SelectionError:
        if checkpoints is not None:
            raise
        names = [name for name, child in children_of(model) if child.parameters()]
    if not names:
        raise PlanError(
            "the model has no Layers that could be blocks; name them in checkpoints"
            if checkpoints is None
            else f"checkpoints {checkpoints} select functions only; a plan is made for the calls "
            "of Layers: name the blocks, and their cheap parts are found"
        )
    # A Layer with several names is in the model once, under the first of them.
    return {name: layers[name] for name in names if name in layers}
