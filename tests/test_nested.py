"""Walking nested values: what is a container, what stays as it is, and what paths are called."""

from __future__ import annotations

import collections
import dataclasses
import os
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import _nested

Pair = collections.namedtuple("Pair", ["left", "right"])


class Items(list):
    """A list of a type of its own, with an attribute."""

    note = ""


class Sizes(tuple):
    """A tuple of a type of its own, such as ``torch.Size``."""


class Weighted(Pair):
    """Is made of other arguments than its items, and has an attribute."""

    def __new__(cls, both: Any, weight: int) -> Any:
        self = super().__new__(cls, both, both)
        self.weight = weight
        return self


class Backwards(list):
    """Iterates in another order than its items have."""

    def __iter__(self) -> Any:
        return reversed(self)


@dataclasses.dataclass
class Batch:
    x: Any
    mask: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    rest: tuple[Any, ...] = ()


@dataclasses.dataclass
class Unfinished:
    x: Any
    later: Any = dataclasses.field(init=False)


@dataclasses.dataclass
class Slots:
    __slots__ = ("x", "y")
    x: Any
    y: Any


def t(value: float) -> paddle.Tensor:
    return paddle.full([2], value)


def doubled(value: Any) -> Any:
    return _nested.map_tensors(lambda tensor: tensor * 2, value)


def plain(value: Any) -> list[tuple[str, Any]]:
    """Path and value of each leaf."""
    leaves = _nested.named_leaves(value)
    return [(name, one.tolist() if _nested.is_tensor(one) else one) for name, one in leaves]


@pytest.mark.parametrize(
    "value",
    [
        *(None, 3, "text", np.ones(2), {1, 2}, range(3), len, Batch, paddle.Tensor, object()),
        os.stat("."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_container_is_passed_on_as_it_is(value: Any) -> None:
    assert _nested.map_leaves(lambda leaf: leaf, value) is value
    assert doubled([value])[0] is value


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a,
        lambda a: (a, 1),
        lambda a: [a, None],
        lambda a: {"a": a, 2: "two"},
        lambda a: Pair(a, "right"),
        lambda a: Sizes([a, 4]),
        lambda a: Items([a]),
        lambda a: Weighted(a, 3),
        lambda a: Backwards([a, 1]),
        lambda a: Unfinished(a),
        lambda a: collections.OrderedDict(z=a, a=1),
        lambda a: collections.defaultdict(list, k=a),
        lambda a: collections.UserDict(z=a, a=[a]),
        lambda a: Batch(a),
        lambda a: Frozen(1, (a, {"deep": [a]})),
        lambda a: Slots(a, 5),
        lambda a: ([{"x": (a,)}], Batch([a], {"m": a})),
        lambda a: ((), [], {}),
    ],
)
def test_containers_keep_type_order_and_everything_else(make: Any) -> None:
    value = make(t(1))
    found = doubled(value)
    assert type(found) is type(value)
    assert plain(found) == plain(make(t(2)))
    assert plain(value) == plain(make(t(1)))  # the original does not change


def test_the_result_does_not_change_with_the_original() -> None:
    items, table, batch = [t(1)], {"a": t(1)}, Batch([t(1)])
    found = doubled((items, table, batch))
    items.append(t(9))
    table["b"] = t(9)
    batch.mask = t(9)
    batch.x.append(t(9))
    assert [name for name, _ in plain(found)] == ["[0][0]", "[1]['a']", "[2].x[0]", "[2].mask"]
    assert found[2].mask is None


def test_subclasses_keep_their_attributes() -> None:
    items = Items([t(1)])
    items.note = "kept"
    found_items, found_default, found_weighted = doubled(
        [items, collections.defaultdict(list, k=t(1)), Weighted(t(1), 3)]
    )
    assert found_items.note == "kept"
    assert found_weighted.weight == 3
    assert found_default["missing"] == []


def test_names_are_those_that_one_would_write() -> None:
    value = [(t(1), {"mask": t(2), 3: Batch(t(3))}), Pair(t(4), t(5))]
    assert [name for name, _ in _nested.named_leaves(value, "args")] == [
        *("args[0][0]", "args[0][1]['mask']", "args[0][1][3].x", "args[0][1][3].mask"),
        *("args[1][0]", "args[1][1]"),
    ]


def test_tensors_come_in_the_order_of_map_tensors_with_repeats() -> None:
    a, b = t(1), paddle.nn.Linear(2, 2).weight
    mapped: list[int] = []
    value = {"z": [a, b], "a": (a, Batch(b, a))}
    _nested.map_tensors(lambda tensor: mapped.append(id(tensor)), value)
    assert mapped == [id(tensor) for tensor in _nested.tensors_in(value)]
    assert mapped == [id(a), id(b), id(a), id(b), id(a)]
