"""``recompute.checkpoints: auto``: the repeated blocks of a model, found by its structure.

A block is a Layer that has sublayers and a weight matrix, in a list of Layers of its class: the
items of a LayerList or Sequential, or attributes side by side. Of lists inside each other the
longer one is taken, blocks rather than stages. The experts of a mixture are no blocks: they are
called beside each other, not in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import paddle

from paddle_recompute import _paddle
from paddle_recompute.errors import SelectionError

_SIDE_BY_SIDE = "expert"


@dataclass(frozen=True)
class Blocks:
    """A list of Layers of one class.

    Attributes:
        names: Their names, in the model's order.
        kind: The name of their class.
    """

    names: tuple[str, ...]
    kind: str

    def __str__(self) -> str:
        parents = {name.rpartition(".")[0] for name in self.names}
        is_list = len(parents) == 1 and "" not in parents
        shown = f"{parents.pop()}.*" if is_list else ", ".join(self.names)
        return f"{shown} ({len(self.names)} x {self.kind})"


def is_container(part: object) -> bool:
    """Whether `part` is a Layer that cannot be called, such as a LayerList: it has no forward."""
    return isinstance(part, paddle.nn.Layer) and type(part).forward is paddle.nn.Layer.forward


def find_blocks(model: paddle.nn.Layer) -> list[Blocks]:
    """The repeated blocks of `model`, in its order.

    Raises:
        SelectionError: It has none.
    """
    found = _blocks_in(model, "", {id(model)})
    if not found:
        raise SelectionError(
            f"recompute.checkpoints: auto finds no repeated blocks in {type(model).__name__}: no "
            "list of Layers of one class that have sublayers and weights. Name the Layers: "
            'checkpoints=["*"] selects its direct sublayers'
        )
    return found


def _blocks_in(layer: paddle.nn.Layer, name: str, seen: set[int]) -> list[Blocks]:
    members = []
    for child_name, child in _paddle.children_of(layer):
        if id(child) not in seen and _SIDE_BY_SIDE not in child_name.lower():
            seen.add(id(child))
            members.append((f"{name}.{child_name}" if name else child_name, child))
    is_list = is_container(layer) or isinstance(layer, paddle.nn.Sequential)
    inside = {member_name: _blocks_in(member, member_name, seen) for member_name, member in members}
    lists: dict[type, list[str]] = {}
    for member_name, member in members:
        if _is_block(member):
            lists.setdefault(type(member), []).append(member_name)
    found: list[Blocks] = []
    for member_name, member in members:
        same = lists.get(type(member), []) if _is_block(member) else []
        longest = max((len(blocks.names) for one in same for blocks in inside[one]), default=0)
        if len(same) < (1 if is_list else 2) or longest > max(len(same), 2):
            found += inside[member_name]
        elif member_name == same[0]:
            found.append(Blocks(tuple(same), type(member).__name__))
    return found


def _is_block(layer: paddle.nn.Layer) -> bool:
    if is_container(layer) or isinstance(layer, paddle.nn.Sequential):
        return False
    has_sublayers = bool(_paddle.children_of(layer))
    return has_sublayers and any(len(parameter.shape) > 1 for parameter in layer.parameters())
