"""Which Layers of a model are the blocks that are planned, if nobody names them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import paddle

from paddle_recompute import _paddle
from paddle_recompute.config import AUTO
from paddle_recompute.errors import PlanError
from paddle_recompute.recompute import layers_matching

_CONTAINERS = (paddle.nn.LayerList, paddle.nn.Sequential)


def find_blocks(
    model: paddle.nn.Layer, checkpoints: Sequence[str] | None = None
) -> dict[str, paddle.nn.Layer]:
    """The blocks of `model` by name, in its order.

    Args:
        model: Any Layer.
        checkpoints: Patterns as in ``recompute.checkpoints``. None or ``auto``: the items of every
            LayerList, and of every Sequential of Layers that have sublayers; the outermost ones.
            Where there are none, the children that have parameters.

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
        names = list(_items(model, ""))
        if not names:
            names = [name for name, child in _paddle.children_of(model) if child.parameters()]
    if not names:
        raise PlanError("the model has no Layers that could be blocks; name them in checkpoints")
    # A Layer with several names is in the model once, under the first of them.
    return {name: layers[name] for name in names if name in layers}


def _items(layer: paddle.nn.Layer, name: str) -> Iterator[str]:
    children = [(f"{name}.{own}" if name else own, c) for own, c in _paddle.children_of(layer)]
    trained = [(own, child) for own, child in children if child.parameters()]
    is_list = type(layer) is paddle.nn.LayerList
    is_chain = type(layer) is paddle.nn.Sequential and all(
        child.sublayers() for _, child in trained
    )
    if len(trained) > 1 and (is_list or is_chain) and not _holds_lists(trained):
        yield from (own for own, _ in trained)
        return
    for own, child in children:
        yield from _items(child, own)


def _holds_lists(children: Sequence[tuple[str, paddle.nn.Layer]]) -> bool:
    """Whether the items are containers themselves, as the stages of a network are."""
    return all(
        type(child) in _CONTAINERS and any(one.sublayers() for _, one in _paddle.children_of(child))
        for _, child in children
    )
