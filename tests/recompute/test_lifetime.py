"""Layers and activations go away as soon as nobody needs them, without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import paddle
import pytest

from paddle_recompute import RecomputeConfig, apply_recompute, is_recomputing, recompute
from paddle_recompute._paddle import memory as _memory
from paddle_recompute._paddle.layers import watch_layers
from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import recompute_wrapper
from paddle_recompute.recompute._frames import Frame
from paddle_recompute.recompute._hooks import SavedHandle
from tests.processes import python
from tests.recompute.contract import Run, Seen, case, leaf, plain
from tests.recompute.test_engine import OneByOne, cus_tanh

IS_26 = paddle_version() < (3, 0, 0)
BATCH, WIDTH = 256, 64
ACTIVATION = 4 * BATCH * WIDTH  # bytes of one float32 tensor


@pytest.fixture(autouse=True)
def _without_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def block() -> paddle.nn.Layer:
    return paddle.nn.Sequential(
        paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.GELU(), paddle.nn.Dropout(0.1)
    )


def input_tensor() -> paddle.Tensor:
    return leaf(BATCH, WIDTH)


Way = Callable[[paddle.nn.Layer, paddle.Tensor], paddle.Tensor]


WAYS: dict[str, Way] = {
    "recompute": recompute,
    "nested": lambda layer, x: recompute(lambda x: recompute(layer, x).tanh(), x),
    "twice": lambda layer, x: recompute(layer, recompute(layer, x)),
    "wrapped": lambda layer, x: recompute_wrapper(layer)(x),
    "on disk": lambda layer, x: recompute(layer, x, offload="disk"),
    "with values": lambda layer, x: recompute(layer, x, determinism_check="values"),
}
all_ways = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def references(layer: paddle.nn.Layer, *others: Any) -> list[weakref.ref[Any]]:
    return [weakref.ref(thing) for thing in (layer, layer[0], *others)]


@pytest.mark.parametrize("has_backward", [True, False])
@all_ways
def test_after_a_step_everything_is_gone(way: Way, has_backward: bool) -> None:
    before = _memory.current_bytes()
    layer, x = block(), input_tensor()
    y = way(layer, x * 2)
    gone = references(layer, x, y)
    if has_backward:
        y.sum().backward()
    del layer, x, y
    assert [ref() for ref in gone] == [None] * len(gone)
    assert _memory.current_bytes() == before


def held_after_a_backward(run: Run, function: Any, retain_graph: bool = False) -> int:
    """The bytes that a call keeps for its first output, when its backward is over."""
    x = input_tensor()
    before = _memory.current_bytes()
    y = run(function, x * 2)
    first, *others = y if isinstance(y, tuple) else (y,)
    first.sum().backward(retain_graph=retain_graph)
    del y, others
    if retain_graph:
        first.sum().backward()
    for one in function.parameters() if isinstance(function, paddle.nn.Layer) else ():
        one.clear_gradient(False)
    return _memory.current_bytes() - before


def entropy(h: paddle.Tensor) -> paddle.Tensor:
    p = paddle.nn.functional.softmax(h)
    return -(p * p.log()).sum()


def logging(log: Callable[[paddle.Tensor], Any]) -> Callable[[paddle.Tensor], Any]:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        h = x.tanh().exp()
        log(h)
        return h

    return function


LOGGED: dict[str, Callable[[paddle.Tensor], Any]] = {
    "max": lambda h: float(h.abs().max()),
    "std": lambda h: float(h.std()),
    "entropy": lambda h: float(entropy(h)),
    "dropped": lambda h: h.exp(),
    "einsum": lambda h: float(paddle.einsum("ij,ij->", h, h)),
}
HELD: dict[str, Any] = {
    "two outputs": lambda h: (h.exp().exp(), h.tanh().tanh().tanh()),
    "a PyLayer": lambda x: OneByOne.apply(x.exp(), x.tanh()),
    **{f"logs {name}": logging(log) for name, log in LOGGED.items() if name != "einsum"},
}


@pytest.mark.parametrize("what", HELD)
def test_after_a_backward_nothing_is_kept_for_an_output(what: str) -> None:
    for retain_graph in (False, True) if what == "two outputs" else (False,):
        plainly, ours = (
            held_after_a_backward(run, HELD[what], retain_graph) for run in (plain, recompute)
        )
        assert ours <= plainly


@all_ways
def test_after_a_backward_nothing_is_kept_for_the_output(way: Way) -> None:
    plainly, ours = (held_after_a_backward(run, block()) for run in (plain, way))
    assert ours <= plainly


def test_between_forward_and_backward_only_the_input_and_the_output_are_there() -> None:
    layer, x = block(), input_tensor()
    before = _memory.current_bytes()
    y = recompute(layer, x * 2)
    kept = _memory.current_bytes() - before
    assert 2 * ACTIVATION <= kept <= 2.1 * ACTIVATION
    assert y.shape == [BATCH, WIDTH]


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_failed_call_leaves_nothing(failing_call: int) -> None:
    layer, x = block(), input_tensor()
    before = _memory.current_bytes()
    calls = []

    def fails(x: paddle.Tensor) -> paddle.Tensor:
        calls.append(1)
        y = layer(x).tanh()
        if len(calls) == failing_call:
            raise KeyError("broken")
        return y

    y = None
    # pytest.raises would keep the traceback, and with it all local variables
    with contextlib.suppress(KeyError):
        y = recompute(fails, x * 2)
        y.sum().backward()
    del y
    assert len(calls) == failing_call
    assert _memory.current_bytes() == before
    # Paddle keeps the argument of a hook that raises, which holds nothing else.
    assert not any(isinstance(one, Frame) and one.handles for one in gc.get_objects())


def test_peaks_of_a_step() -> None:
    said = python("-m", "tests.recompute.peaks").stdout
    peaks: dict[str, int] = json.loads(said.splitlines()[-1])
    assert peaks["each block"] < 0.5 * peaks["plain"]
    assert peaks["each block"] <= 1.01 * peaks["Paddle's own"]
    assert peaks["wrapped blocks"] == peaks["each block"]
    assert peaks["each block"] < peaks["every second block"] < peaks["plain"]
    # Without inner recompute, the activations of a half come back at once; with it, one block's.
    assert peaks["halves of blocks"] < 0.7 * peaks["halves"] < 0.7 * peaks["plain"]


# ------------------------------------------------------- a block that stores a tensor on itself


class Router(paddle.nn.Layer):
    """A block with an auxiliary loss, and what an interested user looks at."""

    def __init__(self, stored: str) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)
        self.router = paddle.nn.Linear(WIDTH, 4)
        self.stored = stored
        self.kept: Any = None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        weights = paddle.nn.functional.softmax(self.router(x))
        loss = weights.mean(0).square().sum()
        self.kept = {"tensor": loss, "tuple": (weights, loss), "list": [weights, loss]}[self.stored]
        return x + self.linear(x) * weights[:, :1]

    def loss(self) -> paddle.Tensor:
        return self.kept if self.stored == "tensor" else self.kept[1]


def router_steps(
    way: str, stored: str, *, uses_loss: bool, num_steps: int = 3
) -> tuple[list[int], paddle.nn.Layer, weakref.ref[Any], int]:
    """The bytes in use after each step; the model, one of its blocks, and the bytes before it."""
    before = _memory.current_bytes()
    paddle.seed(7)
    model = paddle.nn.Sequential(*(Router(stored) for _ in range(3)))
    if way == "wrapped":
        for one in model:
            recompute_wrapper(one)
    x, in_use = input_tensor(), []
    for _ in range(num_steps):
        y = recompute(lambda x: model(x), x) if way == "nested" else model(x)
        loss = y.square().mean()
        if uses_loss:
            loss = loss + paddle.add_n([one.loss() for one in model])
        loss.backward()
        model.clear_gradients()
        del y, loss
        in_use.append(_memory.current_bytes() - before)
    return in_use, model, weakref.ref(model[1]), before


@pytest.mark.parametrize("uses_loss", [False, True], ids=["looked at", "trained on"])
@pytest.mark.parametrize("stored", ["tensor", "tuple", "list"])
@pytest.mark.parametrize("way", ["wrapped", "nested"])
def test_a_block_that_stores_a_tensor_holds_what_it_holds_without_recompute(
    way: str, stored: str, uses_loss: bool
) -> None:
    plainly, model, *_ = router_steps("plain", stored, uses_loss=uses_loss)
    del model
    in_use, model, one, before = router_steps(way, stored, uses_loss=uses_loss)
    assert len(set(in_use)) == 1
    assert in_use <= plainly
    del model
    assert one() is None
    assert _memory.current_bytes() == before


@pytest.mark.parametrize("stored", ["tensor", "tuple"])
def test_forwards_without_a_backward_do_not_add_up(stored: str) -> None:
    model = recompute_wrapper(Router(stored))
    in_use = []
    for _ in range(4):
        model(input_tensor())
        in_use.append(_memory.current_bytes())
    assert in_use[1] == in_use[-1]


# ---------------------------------------------------------------- what the loss does not depend on


def handles_left() -> int:
    """The saved-tensor handles in this process, which the garbage collector would not find."""
    return sum(isinstance(one, SavedHandle) for one in gc.get_objects())


def second_order(y: paddle.Tensor, x: paddle.Tensor) -> paddle.Tensor:
    (gradient,) = paddle.grad(y.square().sum(), [x], create_graph=True)
    return gradient.square().sum()


def first_and_backward(y: paddle.Tensor, x: paddle.Tensor) -> None:
    loss = y.square().sum()
    paddle.grad(loss, [x], retain_graph=True)
    loss.backward()


def grad_after_the_call(y: paddle.Tensor, x: paddle.Tensor) -> None:
    h = y * 1
    paddle.grad(h.square().sum(), [h])


Ask = Callable[[paddle.Tensor, paddle.Tensor], Any]
ASKS: dict[str, Ask] = {
    "backward": lambda y, x: y.sum().backward(),
    "no backward": lambda y, x: None,
    "grad": lambda y, x: paddle.grad(y.sum(), [x]),
    "grad, then backward": first_and_backward,
    "a second derivative": lambda y, x: second_order(y, x).backward(),
    "create_graph alone": second_order,
    "grad of what follows": grad_after_the_call,
}
Made = Callable[[], tuple[Any, paddle.nn.Layer]]


def recurrent(kind: type) -> Made:
    def make() -> tuple[Any, paddle.nn.Layer]:
        layer = kind(16, 16, num_layers=2)
        return (lambda x: layer(x.reshape([4, -1, 16]))[0]), layer

    return make


def with_linear(function: Any) -> Made:
    def make() -> tuple[Any, paddle.nn.Layer]:
        linear = paddle.nn.Linear(WIDTH, WIDTH)
        return (lambda x: function(linear(x))), linear

    return make


CALLS: dict[str, tuple[Made, Ask]] = {
    **{
        f"logs {name}": (with_linear(logging(log)), ASKS["backward"])
        for name, log in LOGGED.items()
    },
    **{name: (with_linear(paddle.tanh), ask) for name, ask in ASKS.items()},
    **{
        f"{kind.__name__}, {ask}": (recurrent(kind), ASKS[ask])
        for kind in (paddle.nn.LSTM, paddle.nn.GRU)
        for ask in ("backward", "no backward")
    },
}


@pytest.mark.parametrize("what", CALLS)
def test_steps_leave_no_handle_and_do_not_add_up(what: str) -> None:
    make, ask = CALLS[what]
    (function, layer), in_use = make(), []
    before = handles_left()
    for _ in range(4):
        x = input_tensor()
        ask(recompute(function, x * 2), x)
        layer.clear_gradients()
        del x
        in_use.append(_memory.current_bytes())
    assert len(set(in_use[1:])) == 1
    # Paddle 2.6 keeps those of lists, which hold nothing any more.
    assert (IS_26 and ("einsum" in what or "," in what)) or handles_left() == before


def test_an_error_that_holds_handles_is_no_copy_of_them() -> None:
    """Otherwise its references would be dropped twice, and the collector would end the process."""
    errors = []

    def function(x: paddle.Tensor) -> paddle.Tensor:
        h = x.tanh()
        try:
            paddle.grad(h.exp().sum(), [h])
        except RecomputeError as error:
            errors.append(error)
        return h

    x = input_tensor()
    for _ in range(3):
        recompute(function, x).sum().backward()
        gc.collect()
    assert len(errors) >= 3
    errors.clear()
    gc.collect()


def test_what_was_saved_under_the_hooks_of_another_thread_stays() -> None:
    """Also after hooks of the user, and after the graph of the next recompute has gone."""
    records, goes_on = threading.Event(), threading.Event()

    def function(x: paddle.Tensor) -> paddle.Tensor:
        records.set()
        goes_on.wait()
        return x.tanh()

    thread = threading.Thread(target=lambda: recompute(function, input_tensor()))
    thread.start()
    records.wait()
    x = input_tensor()
    y = x.exp()
    goes_on.set()
    thread.join()
    with paddle.autograd.saved_tensors_hooks(lambda one: one.detach(), lambda one: one):
        pass
    recompute(lambda x: x.tanh(), input_tensor())
    y.sum().backward()
    assert x.grad.numpy().tobytes() == y.numpy().tobytes()


@pytest.mark.parametrize("steps", [1, 0])
def test_unwrapping_leaves_nothing_at_the_model(steps: int) -> None:
    model = paddle.nn.Sequential(block(), block())
    num_left = []
    for _ in range(3):
        apply_recompute(model, RecomputeConfig(checkpoints=["*"]))
        for _ in range(steps):
            model(input_tensor()).mean().backward()
        for one in model:
            one.unwrap()
        num_left.append((weakref.getweakrefcount(model), len(watch_layers().everywhere)))
    assert len(set(num_left)) == 1


# ------------------------------------------------------------------ beside Paddle's own recompute


STAYS = {
    "after a backward nothing stays, without the garbage collector": (True, False),
    "without a backward nothing stays, without the garbage collector": (False, False),
    "after a backward nothing is kept for an output that stays": (True, True),
}


@case("{what}", what=list(STAYS), has_gradients=False)
def test_what_stays(run: Run, what: str) -> Seen:
    """Whether layer and input are still there, and how much memory is in use."""
    backward, keep_the_output = STAYS[what]
    gc.disable()
    before = _memory.current_bytes()
    layer, x = block(), input_tensor()
    y = run(layer, x * 2)
    references_left = references(layer, x)
    if backward:
        y.sum().backward()
    if not keep_the_output:
        del y
    del layer, x
    gone = all(reference() is None for reference in references_left)
    kept = (_memory.current_bytes() - before) / ACTIVATION
    gc.enable()
    return {"layer and input are gone": gone, "activations kept": round(kept, 1)}


def test_the_input_of_a_block_goes_when_its_backward_is_over() -> None:
    """Not at the end of the whole backward: the gradients of earlier blocks need the room."""
    width = 64  # parameters of whole units of 256 bytes: a device's allocator rounds up to them
    blocks = [
        recompute_wrapper(paddle.nn.Sequential(paddle.nn.Linear(width, width), paddle.nn.GELU()))
        for _ in range(6)
    ]
    hidden = paddle.randn([512, width])
    hidden.stop_gradient = False
    levels: list[int] = []
    for block in blocks:
        hidden = block(hidden)
        hidden.register_hook(lambda gradient: levels.append(_memory.current_bytes()))
    hidden.sum().backward()
    boundary = 512 * width * 4
    gradients = (width * width + width) * 4
    assert [a - b for a, b in itertools.pairwise(levels[1:])] == [boundary - gradients] * 4


def test_what_only_a_freed_output_needs_is_not_kept_in_the_backward() -> None:
    levels: list[int] = []

    def function(x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        first, other = x * 1, x * 1
        if not is_recomputing():
            first.register_hook(lambda gradient: levels.append(_memory.current_bytes()))
        for _ in range(20):
            other = other.tanh()
        return first.tanh(), other

    used, freed = recompute(function, input_tensor() * 2)
    del freed
    before = _memory.current_bytes()
    used.sum().backward()
    assert len(levels) == 1 and levels[0] - before <= 8 * ACTIVATION


def test_what_a_py_layer_got_is_gone_when_the_next_function_runs_again() -> None:
    held: list[int] = []

    def first(x: paddle.Tensor) -> paddle.Tensor:
        held.append(_memory.current_bytes())
        return x.exp()

    for second in (paddle.tanh, cus_tanh.apply):
        x = input_tensor()
        y = recompute(lambda x, tanh=second: tanh(x.exp()), recompute(first, x))
        y.sum().backward()
        del y
    assert held[3] - held[2] <= held[1] - held[0]


def test_a_saved_tensor_costs_the_collector_two_objects() -> None:
    """A handle and a weak reference. The more objects live from forward to backward, the more often
    the collector looks through the whole heap: 0.1 s each time, in a process with Paddle.
    """

    def added(call: Way, depth: int) -> int:
        """The objects that the collector counts after a forward through `depth` operators."""

        def function(x: paddle.Tensor) -> paddle.Tensor:
            for _ in range(depth):
                x = paddle.tanh(x)
            return x

        x = input_tensor()
        call(function, x).sum().backward()
        gc.collect()
        before = gc.get_count()[0]
        y = call(function, x)
        count = gc.get_count()[0] - before
        del y
        return count

    ways: list[Any] = [recompute, lambda function, x: function(x)]
    ours, bare = (added(way, 60) - added(way, 10) for way in ways)
    assert ours - bare <= 2 * 50
