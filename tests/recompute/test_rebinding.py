"""The second forward reads the Layer or parameter of the first one, although that rebinds it."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import paddle
import pytest

from paddle_recompute import recompute
from tests.bits import assert_same_bits
from tests.recompute.contract import Run, Seen, case, leaf

Get = Callable[[], Any]
Set = Callable[[Any], None]


class Slotted:
    __slots__ = ("held",)

    held: Any


class Plain:
    held: Any
    number: int


held_in_module: Any = None


def in_object(holder: Any) -> tuple[Get, Set]:
    def get() -> Any:
        return holder.held

    def put(value: Any) -> None:
        holder.held = value

    return get, put


def in_items(items: Any, key: Any) -> tuple[Get, Set]:
    def get() -> Any:
        return items[key]

    def put(value: Any) -> None:
        items[key] = value

    return get, put


def in_cell() -> tuple[Get, Set]:
    held = None

    def get() -> Any:
        return held

    def put(value: Any) -> None:
        nonlocal held
        held = value

    return get, put


def in_global() -> tuple[Get, Set]:
    def get() -> Any:
        return held_in_module

    def put(value: Any) -> None:
        global held_in_module
        held_in_module = value

    return get, put


def in_entries(name: str) -> tuple[Get, Set]:
    """An entry of the sublayers or parameters of a Layer, replaced past its ``__setattr__``."""
    layer = paddle.nn.Layer()

    def get() -> Any:
        return getattr(layer, name).get("held")

    def put(value: Any) -> None:
        getattr(layer, name)["held"] = value

    return get, put


HOLDERS: dict[str, Callable[[], tuple[Get, Set]]] = {
    "an attribute of an object": lambda: in_object(Plain()),
    "a slot": lambda: in_object(Slotted()),
    "an attribute of a Layer": lambda: in_object(paddle.nn.Layer()),
    "a list": lambda: in_items([None], 0),
    "a deque": lambda: in_items(collections.deque([None]), 0),
    "a dict": lambda: in_items({"held": None}, "held"),
    "a variable of the closure": in_cell,
    "a global": in_global,
    "the sublayers of a Layer": lambda: in_entries("_sub_layers"),
    "the parameters of a Layer": lambda: in_entries("_parameters"),
}


def make(kind: str) -> Any:
    layer = paddle.nn.Linear(4, 4)
    return layer if kind == "Layer" else layer.weight


def apply(held: Any, x: paddle.Tensor) -> paddle.Tensor:
    return (held(x) if isinstance(held, paddle.nn.Layer) else x @ held).tanh()


PLACES = [
    (kind, holder)
    for kind in ("Layer", "parameter")
    for holder in HOLDERS
    if kind != {"the sublayers of a Layer": "parameter"}.get(holder)
    if kind != {"the parameters of a Layer": "Layer"}.get(holder)
]


@case(
    "a {place[0]} in {place[1]} that the forward exchanges after its use, at first {first}",
    place=PLACES,
    first=["another one", "None"],
    num_listed=1,
)
def test_exchange(run: Run, place: tuple[str, str], first: str) -> Seen:
    kind, holder = place
    get, put = HOLDERS[holder]()
    made = [make(kind) for _ in range(3)]
    put(made[0] if first == "another one" else None)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        held = get()
        y = apply(made[1] if held is None else held, x)
        put(made[2])
        return y

    x = leaf(2, 4)
    outputs = [run(function, x * 2) for _ in range(2)]
    sum(y.sum() for y in outputs).backward()
    return {"outputs": outputs, "x": x, "made": made, "is last": get() is made[2]}


@case(
    "a {place[0]} in {place[1]} that the first forward builds, {how}",
    place=PLACES,
    how=["where None was", "with a flag", "in place of another one"],
    num_listed=0,
)
def test_building(run: Run, place: tuple[str, str], how: str) -> Seen:
    kind, holder = place
    get, put = HOLDERS[holder]()
    old = make(kind) if how == "in place of another one" else None
    put(old)
    is_built = False

    def function(x: paddle.Tensor) -> paddle.Tensor:
        nonlocal is_built
        if not is_built if how == "with a flag" else get() is old:
            put(make(kind))
            is_built = True
        return apply(get(), x)

    x = leaf(2, 4)
    outputs = [run(function, x * 2) for _ in range(2)]
    sum(y.sum() for y in outputs).backward()
    return {"outputs": outputs, "x": x, "made": get(), "is built": is_built}


@case(
    "a {kind} that the forward rebinds to the next one of a list, counted by the same object",
    kind=["Layer", "parameter"],
    num_listed=0,
)
def test_turns(run: Run, kind: str) -> Seen:
    holder, made = Plain(), [make(kind) for _ in range(3)]
    holder.held, holder.number = made[0], 0

    def function(x: paddle.Tensor) -> paddle.Tensor:
        y = apply(holder.held, x)
        holder.number += 1
        holder.held = made[holder.number % 3]
        return y * (holder.number + 1)

    x = leaf(2, 4)
    outputs = [run(function, x * 2) for _ in range(4)]
    sum(y.sum() for y in outputs).backward()
    return {"outputs": outputs, "x": x, "made": made, "number": holder.number}


@case(
    "a {kind} that the first forward builds in {owner}, with a flag there, tied: {is_tied}",
    kind=["Layer", "parameter"],
    owner=["an object", "a Layer"],
    is_tied=[False, True],
    num_listed=0,
)
def test_building_with_a_flag(run: Run, kind: str, owner: str, is_tied: bool) -> Seen:
    """Tied: the forward also assigns a parameter that existed before."""
    holder: Any = Plain() if owner == "an object" else paddle.nn.Layer()
    holder.held, holder.tied, holder.is_built = None, None, False
    old, made = make("parameter"), []

    def function(x: paddle.Tensor) -> paddle.Tensor:
        if not holder.is_built:
            holder.held, holder.is_built = make(kind), True
            holder.tied = old if is_tied else None
            made.append(holder.held)
        y = apply(holder.held, x)
        return apply(holder.tied, y) if is_tied else y

    x = leaf(2, 4)
    y = run(function, x * 2)
    y.sum().backward()
    return {"y": y, "x": x, "old": old, "made": made, "is kept": holder.held is made[0]}


class Swapped(paddle.nn.Layer):
    """Replaces its first Layer, or that one's weight, once; a flag of its own says so."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4)
        self.what, self.is_done = what, False

    def replace(self) -> None:
        if self.what == "Layer":
            self.first = self.second
        elif self.what == "built Layer":
            self.first = paddle.nn.Linear(4, 4)
        else:
            self.first.weight = self.second.weight

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if not self.is_done:
            self.replace()
            self.is_done = True
        return self.first(x).tanh() + self.second(x)


class Outer(paddle.nn.Layer):
    """Has the flag of the `Swapped` below it, as an attribute or in a plain object."""

    def __init__(self, what: str, holder: Any) -> None:
        super().__init__()
        self.inner, self.object, self.is_done = Swapped(what), holder, False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        holder = self if self.object is None else self.object
        if not holder.is_done:
            self.inner.replace()
            holder.is_done = True
        return self.inner.first(x).tanh() + self.inner.second(x)


@pytest.mark.parametrize("what", ["Layer", "built Layer", "parameter"])
@pytest.mark.parametrize("flag", ["its own", "of an outer Layer", "of an object"])
def test_a_flag_says_that_a_member_is_replaced(what: str, flag: str) -> None:
    found = []
    for is_recomputed in (False, True):
        paddle.seed(3)
        holder = types.SimpleNamespace(is_done=False) if flag == "of an object" else None
        model = Swapped(what) if flag == "its own" else Outer(what, holder)
        gradients = []
        for _ in range(2):
            x = paddle.ones([2, 4])
            x.stop_gradient = False
            loss = (recompute(model, x) if is_recomputed else model(x)).square().sum()
            loss.backward()
            of = [x, *model.parameters()]
            gradients += [one.grad.numpy() for one in of if one.grad is not None]
        found.append(gradients)
    assert_same_bits(*found)
