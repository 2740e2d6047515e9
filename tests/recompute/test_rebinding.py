"""The second forward reads the Layer or parameter of the first one, although that rebinds it."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import paddle
import pytest

from paddle_recompute import recompute
from paddle_recompute.errors import RecomputeError
from tests.recompute.contract import Run, Seen, assert_as_plain, case, leaf

Get = Callable[[], Any]
Set = Callable[[Any], None]


class Slotted:
    __slots__ = ("held",)

    held: Any


class Plain:
    held: Any


held_in_module: Any = None


def in_object(holder: Any) -> tuple[Get, Set]:
    return lambda: holder.held, lambda value: setattr(holder, "held", value)


def in_items(items: Any, key: Any) -> tuple[Get, Set]:
    return lambda: items[key], lambda value: items.__setitem__(key, value)


def in_cell() -> tuple[Get, Set]:
    held = None

    def put(value: Any) -> None:
        nonlocal held
        held = value

    return lambda: held, put


def in_global() -> tuple[Get, Set]:
    def put(value: Any) -> None:
        global held_in_module
        held_in_module = value

    return lambda: held_in_module, put


def in_entries(name: str) -> tuple[Get, Set]:
    """An entry of the sublayers or parameters of a Layer, replaced past its ``__setattr__``."""
    layer = paddle.nn.Layer()
    return (
        lambda: getattr(layer, name).get("held"),
        lambda value: getattr(layer, name).__setitem__("held", value),
    )


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


class Pair(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4)


REPLACE: dict[str, Callable[[Pair], None]] = {
    "Layer": lambda pair: setattr(pair, "first", pair.second),
    "built Layer": lambda pair: setattr(pair, "first", paddle.nn.Linear(4, 4)),
    "parameter": lambda pair: setattr(pair.first, "weight", pair.second.weight),
}


class Swapping(paddle.nn.Layer):
    """Replaces a member of its pair once; a flag of itself, of the pair or of an object says so."""

    def __init__(self, what: str, flag: str) -> None:
        super().__init__()
        self.pair, self.what, self.flag, self.is_done = Pair(), what, flag, False
        self.object, self.pair.is_done = types.SimpleNamespace(is_done=False), False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        holder = {"of the pair": self.pair, "of an object": self.object}.get(self.flag, self)
        if not holder.is_done:
            REPLACE[self.what](self.pair)
            holder.is_done = True
        return self.pair.first(x).tanh() + self.pair.second(x)


@pytest.mark.parametrize("what", REPLACE)
@pytest.mark.parametrize("flag", ["its own", "of the pair", "of an object"])
def test_a_flag_says_that_a_member_is_replaced(what: str, flag: str) -> None:
    def outcome(run: Run) -> Seen:
        model, x = Swapping(what, flag), leaf(2, 4)
        for _ in range(2):
            run(model, x * 2).square().sum().backward()
        return {"model": model, "x": x}

    assert_as_plain(outcome)


class Tanh(paddle.nn.Layer):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.tanh(x)


class Lazy(Tanh):
    """Another class from its first forward on."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.__class__ = Exp  # type: ignore[assignment]
        return paddle.exp(x)


class Exp(paddle.nn.Layer):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.exp(x)


@case(
    "a {first.__name__} in a recomputed block that becomes an Exp {when}",
    first=[Tanh, Lazy],
    when=["before the backward", "between two steps"],
    or_error=True,
    num_listed=0,
)
def test_another_class(run: Run, first: type[paddle.nn.Layer], when: str) -> Seen:
    block, x = paddle.nn.Sequential(first(), paddle.nn.Tanh()), leaf(2, 4)
    loss = run(block, x * 2).square().sum()
    if when == "before the backward":
        block[0].__class__ = Exp
    loss.backward()
    block[0].__class__ = Exp
    run(block, x * 2).square().sum().backward()
    return {"x": x}


def test_another_class_before_the_backward_is_refused() -> None:
    layer, x = Tanh(), leaf(2, 4)
    loss = recompute(layer, x).sum()
    layer.__class__ = Exp
    with pytest.raises(RecomputeError, match="was a Tanh in the forward and is a Exp in the backw"):
        loss.backward()
