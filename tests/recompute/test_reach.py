"""What a function reaches besides its arguments is the same in both of its forwards."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import gc
import operator
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle
import pytest

from paddle_recompute import recompute
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.captured_state.captured_state import MAX_CONTAINER_ITEMS, layers_of
from tests.recompute.contract import Run, Seen, Using, case, leaf

Tensor = paddle.Tensor


def linear() -> paddle.nn.Layer:
    return paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Tanh())


def backward(y: Tensor, x: Tensor, *layers: Any) -> Seen:
    y.square().sum().backward()
    return {"y": y, "x": x, "layers": layers}


# ---------------------------------------------------------------------------------- rebound names

LOOPS = [
    "a lambda that reads the loop's variable", "a lambda that reads the loop's index",
    "a closure of a closure", "a function defined once", "a partial of such a function",
    "a parameter of the loop's variable", "a captured activation",
]  # fmt: skip


@case("blocks in a loop, reached by {how}", how=LOOPS)
def test_blocks_in_a_loop(run: Run, how: str) -> Seen:
    blocks, x = [linear() for _ in range(3)], leaf(3, 4)

    def once(h: Tensor, scale: float = 1.0) -> Tensor:
        return b(h) * scale

    h = x * 2
    for i, b in enumerate(blocks):
        weight, activation = b[0].weight, h
        functions: list[Any] = [
            lambda h: b(h),  # noqa: B023
            lambda h: blocks[i](h),  # noqa: B023
            lambda h: once(h).tanh(),
            once,
            functools.partial(once, scale=0.5),
            lambda h: (h @ weight).tanh(),  # noqa: B023
            lambda h: b(activation) + h,  # noqa: B023
        ]
        h = run(functions[LOOPS.index(how)], h * 2)
    return backward(h, x, *blocks)


global_block: Any = None


class Child(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = paddle.nn.Linear(4, 4), 2.0

    def forward(self, h: Tensor) -> Tensor:
        return (self.linear(h) * self.scale).tanh()

    def project(self, h: Tensor) -> Tensor:
        return self.forward(h)


def doubled(layer: Any, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def another_weight(net: Any) -> None:
    net[0].weight = paddle.create_parameter([4, 4], "float32")


Change = Callable[[Any], object]
CHANGED: dict[str, tuple[Callable[[Any], Any], Change]] = {
    "a sublayer that is replaced": (
        lambda net: lambda h: net[1](net[0](h)),
        lambda net: net.__setitem__(0, paddle.nn.Linear(4, 4)),
    ),
    "a sublayer that is appended": (
        lambda net: lambda h: functools.reduce(lambda h, layer: layer(h), net, h),
        lambda net: net.append(paddle.nn.Linear(4, 4)),
    ),
    "a sublayer that is removed": (
        lambda net: lambda h: functools.reduce(lambda h, layer: layer(h), net, h),
        lambda net: net.__delitem__(1),
    ),
    "a parameter that is replaced": (lambda net: lambda h: net[1](net[0](h)), another_weight),
    "a number in a Layer that is changed": (
        lambda net: net[2], lambda net: setattr(net[2], "scale", 3.0),
    ),
}  # fmt: skip
"""What a function of a LayerList reads, and what changes it."""


@case("{what} between forward and backward", what=list(CHANGED))
def test_changed(run: Run, what: str) -> Seen:
    make, change = CHANGED[what]
    net, x = paddle.nn.LayerList([paddle.nn.Linear(4, 4), paddle.nn.Tanh(), Child()]), leaf(3, 4)
    before = list(net)
    y = run(make(net), x * 2)
    weight = net[0].weight
    change(net)
    return {**backward(y, x, *before, net), "weight": weight, "scale": before[2].scale}


READERS: dict[str, Callable[[Child, Tensor], Tensor]] = {
    "a function": lambda child, h: (child.linear(h) * child.scale).tanh(),
    "a method beside forward": lambda child, h: child.project(h),
}


@case("a number in a sublayer that {who} reads", who=list(READERS), num_listed=0)
def test_number_read_by_others(run: Run, who: str) -> Seen:
    net, x = Using(Child(), READERS[who]), leaf(3, 4)
    y = run(net, x * 2)
    net.child.scale = 3.0
    return {**backward(y, x, net), "scale": net.child.scale}


SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


@contextlib.contextmanager
def adapter(scale: float) -> Any:
    token = SCALE.set(scale)
    try:
        yield
    finally:
        SCALE.reset(token)


@case(
    "a context variable that is set around the forward; {backward}",
    backward=["backward outside", "backward in another context", "backward in another thread"],
    num_listed=2,
)
def test_context_variable(run: Run, backward: str) -> Seen:
    layer, x, seen = paddle.nn.Linear(4, 4), leaf(3, 4), []

    def block(x: paddle.Tensor) -> paddle.Tensor:
        with adapter(SCALE.get() * 2):  # a change of its own, for its inside
            return (layer(x) * SCALE.get()).tanh()

    with adapter(0.1):
        y = run(block, run(block, x * 2))
    if backward == "backward in another thread":
        thread = threading.Thread(target=y.sum().backward)
        thread.start()
        thread.join()
    else:
        with adapter(5.0) if backward == "backward in another context" else adapter(1.0):
            y.sum().backward()
            seen.append(SCALE.get())
    return {"x": x, "layer": layer, "seen": seen, "now": SCALE.get()}


def test_what_the_second_forward_sets_in_a_context_variable_is_gone() -> None:
    x, calls = leaf(3, 4), []

    def block(x: paddle.Tensor) -> paddle.Tensor:
        calls.append(SCALE.get())
        SCALE.set(SCALE.get() + 1)
        return x.tanh()

    def step() -> float:
        loss = recompute(block, x).sum()
        SCALE.set(7.0)
        loss.backward()
        return SCALE.get()

    assert contextvars.copy_context().run(step) == 7.0
    assert calls == [1.0, 1.0]


@case("a number in an attribute of the function that is changed between forward and backward")
def test_attribute_of_a_function(run: Run) -> Seen:
    def scaled(h: Tensor) -> Tensor:
        return (h * scaled.scale).tanh()  # type: ignore[attr-defined]

    x = leaf(3, 4)
    scaled.scale = 2.0  # type: ignore[attr-defined]
    y = run(scaled, x * 2)
    scaled.scale = 3.0  # type: ignore[attr-defined]
    return {**backward(y, x), "scale": scaled.scale}  # type: ignore[attr-defined]


@case("a forward hook that is {change} before the backward", change=["removed", "registered"])
def test_hook(run: Run, change: str) -> Seen:
    net, x = linear(), leaf(3, 4)
    hook = net[0].register_forward_post_hook(doubled) if change == "removed" else None
    y = run(lambda h: net(h).tanh(), x * 2)
    if hook is None:
        net[0].register_forward_post_hook(doubled)
    else:
        hook.remove()
    return backward(y, x, net)


class Wheel:
    """A callable object whose method calls another."""

    block: Any

    def __call__(self, h: Tensor) -> Tensor:
        return self.step(h)

    def step(self, h: Tensor) -> Tensor:
        return self.block(h)


@case("Layers that are replaced in all kinds of places before the backward", num_listed=0)
def test_all_kinds_of_places(run: Run) -> Seen:
    holder, items, entries, wheel = types.SimpleNamespace(), [None], {}, Wheel()
    shell, variable = paddle.nn.LayerList([linear()]), None

    def with_defaults(h: Tensor, one: Any = None, *, other: Any = None) -> Tensor:
        return other(one(h))

    def function(h: Tensor) -> Tensor:
        h = wheel(shell[0](entries["block"](items[0](holder.block(h)))))
        return with_defaults(global_block(variable(h)))

    def fill(blocks: list[Any]) -> None:
        global global_block
        nonlocal variable
        holder.block, items[0], entries["block"], shell[0], wheel.block = blocks[:5]
        global_block, variable = blocks[5:7]
        with_defaults.__defaults__ = (blocks[7],)
        with_defaults.__kwdefaults__ = {"other": blocks[8]}

    x, old, new = leaf(3, 4), [linear() for _ in range(9)], [linear() for _ in range(9)]
    fill(old)
    y = run(function, x * 2)
    fill(new)
    found = backward(y, x, *old, *new)
    now = [holder.block, items[0], entries["block"], shell[0], wheel.block, global_block, variable]
    defaults = [*with_defaults.__defaults__, with_defaults.__kwdefaults__["other"]]
    assert all(map(operator.is_, [*now, *defaults], new))
    return found


def test_a_failed_second_forward_puts_the_new_content_back() -> None:
    calls = []

    def fails(h: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("broken")
        return b(h)

    b = first = linear()
    y = recompute(fails, leaf(3, 4) * 2)
    b = second = linear()
    with pytest.raises(KeyError):
        y.sum().backward()
    assert b is second is not first


class Tokens(list[Tensor]):
    """A cache whose length is not its number of items."""

    def __len__(self) -> int:
        return 1


def test_a_list_with_a_length_of_its_own_does_not_shift_what_others_get_back() -> None:
    cache, weights = Tokens([paddle.full([2], 2.0), paddle.full([2], 7.0)]), [paddle.full([2], 3.0)]
    x = leaf(2)
    y = recompute(lambda x: x * x * weights[0] + 0 * sum(cache), x)
    weights[0] = new = paddle.full([2], 100.0)
    y.sum().backward()
    assert (x.grad == 6 * x).all() and weights[0] is new


class Toggling(paddle.nn.Layer):
    """Its forward exchanges two sublayers, an attribute, and the items of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4)
        self.signs = [paddle.to_tensor(1.0), paddle.to_tensor(-2.0)]
        self.scale, self.other = paddle.to_tensor(3.0), paddle.to_tensor(4.0)

    def toggle(self) -> None:
        self.first, self.second = self.second, self.first
        self.signs.reverse()
        self.scale, self.other = self.other, self.scale

    def forward(self, x: Tensor) -> Tensor:
        self.toggle()
        return self.first(x) * self.signs[0] * self.scale

    def state(self) -> list[Any]:
        return [self.first, self.second, *self.signs, self.scale, self.other]


@pytest.mark.parametrize("times", [0, 1])
def test_what_the_second_forward_exchanges_is_put_back(times: int) -> None:
    """Also where the caller has put it back before, so that the second forward changes nothing
    that it would have to restore first.
    """
    model = Toggling()
    y = recompute(model, paddle.ones([2, 4]))
    for _ in range(times):
        model.toggle()
    before = model.state()
    y.sum().backward()
    assert all(map(operator.is_, model.state(), before))


@case("sublayers whose order the forward changes", num_listed=0)
def test_order_of_sublayers(run: Run) -> Seen:
    class Turning(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (paddle.nn.Linear(4, 4) for _ in range(3))

        def forward(self, h: Tensor) -> Tensor:
            self._sub_layers.move_to_end(next(iter(self._sub_layers)))
            for layer in self._sub_layers.values():
                h = layer(h).tanh()
            return h

    net, x = Turning(), leaf(3, 4)
    for _ in range(3):
        found = backward(run(net, x * 2), x, net)
    return found


# -------------------------------------------------------------------- what the function changes


@case("a counter that the function counts up", has_gradients=True)
def test_state_of_its_own(run: Run) -> Seen:
    """After the forward all is as in the plain call; second forwards count, too."""
    net, x, n = linear(), leaf(3, 4), 0
    seen: list[int] = []
    holder = types.SimpleNamespace(n=0)

    def block(h: Tensor) -> Tensor:
        nonlocal n
        n += 1
        holder.n += 1
        seen.append(n)
        return net(h)

    y = run(block, x * 2)
    counted = [n, holder.n, list(seen)]
    return {**backward(y, x, net), "counted": counted}


@case("a cache in {place} that the first forward fills", place=["a Layer", "an object"])
def test_cache(run: Run, place: str) -> Seen:
    class Cached:
        def rotated(self, h: Tensor) -> Tensor:
            if self.table is None:
                self.table = paddle.arange(4).astype("float32").cos()
            return (h * self.table).tanh()

    class CachedLayer(Cached, paddle.nn.Layer):
        def forward(self, h: Tensor) -> Tensor:
            return self.rotated(h)

    owner, x = CachedLayer() if place == "a Layer" else Cached(), leaf(3, 4)
    owner.table = None
    y = run(owner.rotated, x * 2)
    table = owner.table
    found = backward(y, x)
    return {**found, "table": table, "is the same": owner.table is table}


class Slots:
    __slots__ = ("state",)


class OneSlot:
    __slots__ = "state"  # a single name, not the names of five slots


class PrivateSlot:
    __slots__ = ("__state",)
    state = property(lambda self: self.__state, lambda self, value: self.set(value))

    def set(self, value: Any) -> None:
        self.__state = value


class FrozenSlot(Slots):
    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")


HOLDERS: dict[str, Callable[[], Any]] = {
    "a closure": types.SimpleNamespace,  # stands for a variable
    "a Layer": paddle.nn.Layer,
    "an object": types.SimpleNamespace,
    "slots": Slots,
    "a deque": types.SimpleNamespace,  # which has one
    "a single slot": OneSlot,
    "a private slot": PrivateSlot,
    "a frozen slot": FrozenSlot,
}


@case("a state that goes from call to call, in {place}", place=list(HOLDERS), num_listed=5)
def test_recurrent_state(run: Run, place: str) -> Seen:
    net, x, state = paddle.nn.Linear(4, 4), leaf(3, 4), paddle.zeros([3, 4])
    memory, holder = collections.deque([paddle.ones([3, 4])] * 2, maxlen=2), HOLDERS[place]()
    put = object.__setattr__ if place == "a frozen slot" else setattr
    put(holder, "state", state)

    def in_a_closure(h: Tensor) -> Tensor:
        nonlocal state
        state = (net(h) + state).tanh().detach()
        return net(h) * state

    def in_a_deque(h: Tensor) -> Tensor:
        memory.append((net(h) + memory[0]).tanh().detach())
        return net(h) * memory[0]

    def in_a_holder(h: Tensor) -> Tensor:
        put(holder, "state", (net(h) + holder.state).tanh().detach())
        return net(h) * holder.state

    function: Any = {"a closure": in_a_closure, "a deque": in_a_deque}.get(place, in_a_holder)
    if place == "a Layer":
        holder.forward = in_a_holder
        function = holder
    y = x * 2
    for _ in range(3):
        y = run(function, y)
    return {**backward(y, x, net), "state": [state, holder.state, *memory]}


@case("a state of which the user resets {reset} before the backward", reset=["state", "length"])
def test_state_reset_before_the_backward(run: Run, reset: str) -> Seen:
    holder, net, found = types.SimpleNamespace(state=None, length=0), linear(), []

    def block(h: Tensor) -> Tensor:
        if holder.length and holder.state is not None:
            h = h + holder.state
        holder.state, holder.length = net(h).detach(), holder.length + 1
        return net(h).tanh()

    for _ in range(2):
        x = leaf(3, 4)
        y = run(block, x * 2)
        setattr(holder, reset, None if reset == "state" else 0)
        found.append({**backward(y, x, net), "state": holder.state, "length": holder.length})
    return {"step": found}


@case("a Layer that the first forward builds")
def test_built_in_the_forward(run: Run) -> Seen:
    class Late(paddle.nn.Layer):
        def forward(self, h: Tensor) -> Tensor:
            if not hasattr(self, "linear"):
                self.linear = paddle.nn.Linear(h.shape[-1], 4)
            return self.linear(h).tanh()

    net, x = Late(), leaf(3, 4)
    return backward(run(net, x * 2), x, net)


# ------------------------------------------------------------------------------ deep BatchNorms


class Trainer:
    """A plain object with a Layer, as in a script that knows no framework."""

    def __init__(self, m: Any) -> None:
        self.m = m

    @property
    def net(self) -> Any:
        return self.m


@dataclass
class Parts:
    norm: Any


class Holding(paddle.nn.Layer):
    """Has `held`, which is no sublayer, and calls what ``get(held)`` returns."""

    def __init__(self, held: Any, get: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.get = held, get

    def forward(self, x: Tensor) -> Tensor:
        return self.get(self.held)(x).tanh()


def behind(holder: Any, get: Callable[[Any], Any]) -> Any:
    return lambda x: get(holder)(x).tanh()


def in_a_hook(norm: Any) -> Any:
    net = paddle.nn.Linear(4, 4)
    net.register_forward_post_hook(lambda layer, inputs, output: norm(output))
    return net


def in_an_object(norm: Any) -> Any:
    self = Trainer(norm)
    return lambda x: self.m(x).tanh()


def in_slots(norm: Any) -> Any:
    slots = Slots()
    slots.state = norm
    return behind(slots, lambda one: one.state)


NS = types.SimpleNamespace
DEEP: dict[str, Callable[[Any], Any]] = {
    "an attribute of an object in the closure": in_an_object,
    "a Python list of a Layer": lambda norm: Holding([norm], lambda parts: parts[0]),
    "attributes three deep": lambda norm: behind(
        Trainer(Trainer(Parts(norm))), lambda one: one.m.m.norm
    ),
    "an object in a Layer": lambda norm: Holding(NS(deep=NS(norm=norm)), lambda one: one.deep.norm),
    "getattr with a computed name": lambda norm: behind(
        Trainer(norm), lambda one: getattr(one, "".join(["m"]))
    ),
    "a property": lambda norm: behind(NS(hidden=Trainer(norm)), lambda one: one.hidden.net),
    "a module of the user's": lambda norm: behind(module_of(norm), lambda one: one.norm),
    "a slot": in_slots,
    "a hook of a Layer": in_a_hook,
    "a weak proxy beside it": lambda norm: Holding(
        [norm, weakref.proxy(norm)], lambda parts: parts[1]
    ),
}


def module_of(norm: Any) -> Any:
    module = types.ModuleType("a_users_module")
    module.norm = norm
    return module


@case("BatchNorm behind {way}", way=list(DEEP), num_listed=4)
def test_deep_batch_norm(run: Run, way: str) -> Seen:
    norm, x = paddle.nn.BatchNorm1D(4), leaf(6, 4)
    function = DEEP[way](norm)
    for _ in range(2):
        y = run(function, x * 2)
        y.square().sum().backward()
    return {"y": y, "x": x, "norm": norm}


def test_the_search_ends() -> None:
    """In a ring of objects, and in one that holds more than any model."""
    ring = types.SimpleNamespace(norm=paddle.nn.BatchNorm1D(4))
    ring.ring = ring
    ring.data = [types.SimpleNamespace(ring=ring) for _ in range(MAX_CONTAINER_ITEMS + 1)]
    assert layers_of(lambda x: ring.ring.norm(ring.data), ()) == [ring.norm]


# ------------------------------------------------------------------------------ objects with ideas


class NoAttribute:
    """Raises KeyError for an attribute that is not there; `state` is not."""

    __slots__ = ("scale", "state")

    def __getattribute__(self, name: str) -> Any:
        if name in ("scale", "state"):
            return object.__getattribute__(self, name)
        raise KeyError(name)


class Oracle:
    """Raises for whatever is asked of it but its attributes."""

    def __len__(self) -> int:
        raise KeyError

    __bool__ = __iter__ = __contains__ = __eq__ = __hash__ = __repr__ = __len__  # type: ignore


def posing_as(pretended: Any) -> Any:
    class Posing:
        @property
        def __class__(self) -> Any:
            return pretended()

    return Posing()


def gone() -> Any:
    holder = types.SimpleNamespace()
    holder.state = weakref.proxy(Oracle())
    return holder


ODD: dict[str, Callable[[], Any]] = {
    "raises KeyError for all but its slots": NoAttribute,
    "has no truth, length, items, equality, hash or name": Oracle,
    "poses as a Layer": lambda: posing_as(lambda: paddle.nn.Layer),
    "raises KeyError for its class": lambda: posing_as({}.popitem),
    "has a weak proxy of what is gone": gone,
    "has attributes of its thread": threading.local,
}


@case("an object that {what}, {place}", num_listed=0, what=list(ODD), place=["reached", "given"])
def test_odd_object(run: Run, what: str, place: str) -> Seen:
    net, odd, x = linear(), ODD[what](), leaf(3, 4)
    put = setattr if type(odd) is threading.local else object.__setattr__
    put(odd, "scale", 2.0)

    def function(h: Tensor, *rest: Any) -> Tensor:
        for one in (*rest, odd):
            with contextlib.suppress(KeyError, AttributeError, ReferenceError):
                one.state.name  # noqa: B018
        return net(h) * odd.scale

    y = run(function, x * 2, *[odd] * (place == "given"))
    put(odd, "scale", 3.0)
    return backward(y, x, net)


# --------------------------------------------------------------------------------------- lifetime


def test_places_keep_no_graph() -> None:
    """Calls whose output an attribute holds, without a backward: no chain of graphs."""
    gc.disable()
    try:
        self = types.SimpleNamespace(net=linear(), last=None)

        def block(x: Tensor) -> Tensor:
            y = self.net(x)
            if self.last is not None:
                y = y + self.last.detach().sum()
            return y

        held, outputs = [], []
        for _ in range(4):
            self.last = recompute(block, leaf(256, 4) * 2)
            outputs.append(weakref.ref(self.last))
            held.append(_memory.current_bytes())
        assert [output() is None for output in outputs] == [True, True, True, False]
        assert held[1:] == [held[1]] * 3
    finally:
        gc.enable()


def test_locks_and_barriers_are_left_alone() -> None:
    """A second forward must not give a barrier the state of the first: a thread may wait at it."""
    event = threading.Event()

    def block(x: paddle.Tensor) -> paddle.Tensor:
        return x.tanh() if event is not None else x

    x = leaf(3, 4)
    y = recompute(block, x).sum()
    flag_of = vars(event)
    event.set()
    before = dict(flag_of)
    seen = []
    x.register_hook(lambda _: seen.append(dict(flag_of)))
    y.backward()
    assert seen == [before] and event.is_set()
