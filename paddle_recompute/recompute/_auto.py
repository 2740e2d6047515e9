"""``recompute.checkpoints: auto``: the repeated blocks of a model, found by its structure.

A block is a Layer that has sublayers and a weight matrix, in a list of Layers of its class: the
items of a LayerList or Sequential, or attributes side by side. A Sequential is a block if another
one of Layers of the same classes is in its list. Of lists inside each other the longer one is
taken, and the inner one if each item of the outer has one: blocks rather than stages. The experts
of a mixture are no blocks: they are called beside each other, not in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import paddle

from paddle_recompute._paddle.layers import children_of
from paddle_recompute.errors import SelectionError

_SIDE_BY_SIDE = "expert"


@dataclass(frozen=True)
class Blocks:
    """A list of Layers of one class.

    Attributes:
        names: Their names, in the model's order.
        kind: The name of their class.
        in_list: Whether they are in a LayerList or Sequential, not attributes side by side.
    """

    names: tuple[str, ...]
    kind: str
    in_list: bool

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
            f"checkpoints: auto finds no repeated blocks in {type(model).__name__}: no "
            "list of Layers of one class that have sublayers and weights. Name the Layers: "
            'checkpoints=["*"] selects its direct sublayers'
        )
    return found


def _blocks_in(layer: paddle.nn.Layer, name: str, seen: set[int]) -> list[Blocks]:
    members = []
    for child_name, child in children_of(layer):
        if id(child) not in seen and _SIDE_BY_SIDE not in child_name.lower():
            seen.add(id(child))
            members.append((f"{name}.{child_name}" if name else child_name, child))
    is_list = isinstance(layer, (paddle.nn.LayerList, paddle.nn.Sequential))
    inside = {member_name: _blocks_in(member, member_name, seen) for member_name, member in members}
    lists: dict[object, list[str]] = {}
    for member_name, member in members:
        if _is_block(member, is_list):
            lists.setdefault(_kind(member), []).append(member_name)
    found: list[Blocks] = []
    for member_name, member in members:
        same = lists.get(_kind(member), [])
        inner = [blocks for path in same for blocks in inside[path]]
        is_chain = isinstance(member, paddle.nn.Sequential)
        fewest = 1 if is_list and not is_chain else 2
        if len(same) < fewest or (is_chain and inner) or _are_better(inner, len(same), is_list):
            found += inside[member_name]
        elif member_name == same[0]:
            found.append(Blocks(tuple(same), type(member).__name__, is_list))
    return found


def _are_better(inner: list[Blocks], length: int, is_list: bool) -> bool:
    """Whether to take lists inside the members of a list of `length` in place of these.

    Attributes side by side, such as two towers, are no match for a list; two of them inside a
    block, such as its two attentions, are no list.
    """
    lists = [len(blocks.names) for blocks in inner if blocks.in_list]
    pairs = [len(blocks.names) for blocks in inner if not blocks.in_list]
    if max(pairs, default=0) > max(length, 2) or sum(n > 1 for n in lists) >= length:
        return True
    return max(lists, default=0) > (length if is_list else 1)


def _kind(layer: paddle.nn.Layer) -> object:
    """Equal for Layers that may be blocks of one list."""
    if not isinstance(layer, paddle.nn.Sequential):
        return type(layer)
    return tuple(type(child) for _, child in children_of(layer))


def _is_block(layer: paddle.nn.Layer, in_list: bool) -> bool:
    if is_container(layer) or (isinstance(layer, paddle.nn.Sequential) and not in_list):
        return False
    has_sublayers = bool(children_of(layer))
    return has_sublayers and any(len(parameter.shape) > 1 for parameter in layer.parameters())
