"""What people do with parameters between steps: an offloaded chain does what the plain one does.

Each chain is built twice, plain and offloaded, and both do the same random actions. An action on
the offloaded chain has the result of the plain one, to the bit, or is refused by an error of this
library and has changed nothing.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import OffloadSequential
from paddle_recompute.errors import PaddleRecomputeError
from paddle_recompute.offload._offloaded_tensor import offloaded_tensor_of
from tests.fuzz import budget

WIDTH = 4
MOST_REFUSED = 0.3
"""The share of actions that may be refused; more would mean that little is tested."""


class Block(paddle.nn.Layer):
    """Two Linears and a norm; the second Linear takes no part while `is_short`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = paddle.nn.Linear(WIDTH, WIDTH)
        self.second = paddle.nn.Linear(WIDTH, WIDTH, bias_attr=False)
        self.norm = paddle.nn.LayerNorm(WIDTH)
        self.dropout = paddle.nn.Dropout(0.1)
        self.is_short = False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = paddle.tanh(self.first(x))
        return self.norm(x + (y if self.is_short else self.dropout(self.second(y))))


class Side:
    """A chain with its optimizer and what the user keeps beside them."""

    def __init__(self, choices: dict[str, Any], is_offloaded: bool) -> None:
        paddle.seed(choices["seed"])
        self.is_offloaded = is_offloaded
        self.layers = [Block() for _ in range(choices["layers"])]
        for place in choices["frozen"]:
            for parameter in self.layers[place].parameters():
                parameter.stop_gradient = True
        if is_offloaded:
            self.model = OffloadSequential(self.layers, **choices["options"])
            self.optimizer = self.model.optimizer(choices["optimizer"])
        else:
            self.model = paddle.nn.Sequential(*self.layers)
            self.optimizer = choices["optimizer"](self.model.parameters())
        self.parameters = self.model.parameters()
        self.saved: Any = None
        self.hooks: list[Any] = []
        self.loss: Any = None

    def resident(
        self, places: Sequence[int], *, really: bool = True
    ) -> contextlib.AbstractContextManager[Any]:
        if not self.is_offloaded or not really:
            return contextlib.nullcontext()
        return self.model.resident(*(self.layers[place] for place in places))

    def forward(self, number: int) -> paddle.Tensor:
        paddle.seed(number)
        x = np.random.default_rng(number).standard_normal([3, WIDTH]).astype("float32")
        return self.model(paddle.to_tensor(x)).square().mean()

    def seen(self) -> list[Any]:
        """All that can be compared."""
        return [p.numpy() for p in self.parameters]


def _value(result: Any) -> Any:
    if isinstance(result, paddle.Tensor):
        return result.numpy()
    if isinstance(result, (list, tuple)):
        return [_value(one) for one in result]
    return result


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)
    return type(one) is type(other) and bool(one == other)


Action = Callable[[Side], Any]
WEIGHTS = {  # all others are refused: tests/offload/test_away.py
    "numpy": lambda p: p.numpy(),
    "set_value": lambda p: p.set_value(np.full(p.shape, 0.125, "float32")),
    "square sum": lambda p: p.square().sum(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "scale_": lambda p: p.scale_(0.5),
    "initializer": lambda p: paddle.nn.initializer.Constant(0.3)(p),
    "through detach": lambda p: p.detach().zero_(),
    "reshape_": lambda p: p.reshape_([-1]),
}


def _set_gradient(p: paddle.Tensor) -> None:
    """Plain Paddle (2.6, 3.3) marks a gradient that ``clear_grad()`` made zero: the next backward
    takes its place, and what was written to it meanwhile is lost. An offloaded chain adds to it.
    """
    if p.grad is not None:
        p.grad.set_value(paddle.ones(p.shape))
        if offloaded_tensor_of(p) is None:
            p._unset_fake_empty()  # takes the mark away


GRADIENTS = {
    "grad": lambda p: None if p.grad is None else p.grad.numpy(),
    "gradient": lambda p: p.gradient(),
    "scale": lambda p: p.grad is not None and p.grad.scale_(0.5),
    "replace": lambda p: p.grad is not None and setattr(p, "grad", p.grad * 2),
    "set_value": _set_gradient,
    "clear": lambda p: p.clear_gradient(),
    "clear for good": lambda p: p.clear_gradient(False),
    "clear_grad": lambda p: p.clear_grad(),
}


def _gradient(side: Side, what: str, place: int, inside: bool) -> Any:
    with side.resident(range(len(side.layers)), really=inside):
        return _value(GRADIENTS[what](_parameter(side, place)))


def _step(side: Side, number: int, clear: bool | None, times: int) -> Any:
    losses = []
    for part in range(times):
        loss = side.forward(number + part)
        loss.backward()
        losses.append(loss)
    side.optimizer.step()
    if clear is not None:
        side.optimizer.clear_grad(clear)
    return losses


def _penalized(side: Side, number: int, places: list[int], inside: bool) -> Any:
    def penalty_of(p: paddle.Tensor) -> paddle.Tensor:
        # Where other shards are away, the chain's gradient may arrive before that of the penalty or
        # after it: two numbers have the same sum, three need not.
        several = len(places) == len(side.layers)
        return (p * p).sum() + p.abs().mean() if several else p.square().sum()

    with side.resident(places):
        penalty = sum(penalty_of(p) for x in places for p in side.layers[x].parameters())
        loss = side.forward(number) + 0.1 * penalty
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return loss


def _reload(side: Side) -> None:
    if side.saved is None:
        stream = io.BytesIO()
        paddle.save(side.model.state_dict(), stream)
        side.saved = stream.getvalue()
    else:
        side.model.set_state_dict(paddle.load(io.BytesIO(side.saved)))


def _hook(side: Side, place: int) -> None:
    if side.parameters[place].stop_gradient:
        return
    side.hooks.append(side.parameters[place].register_hook(lambda g: g * 0.5))


def _two_backwards(side: Side, number: int) -> Any:
    loss = side.forward(number)
    loss.backward(retain_graph=True)
    return loss


def _freeze(side: Side, place: int, whole: bool) -> None:
    chosen = side.layers[place].parameters() if whole else [side.layers[place].first.weight]
    for parameter in chosen:
        parameter.stop_gradient = not parameter.stop_gradient


def _shorten(side: Side, place: int) -> None:
    side.layers[place].is_short = not side.layers[place].is_short


def _parameter(side: Side, place: int) -> paddle.Tensor:
    return side.parameters[place % len(side.parameters)]


def _with_grad_mode(act: Action, enabled: bool) -> Action:
    def run(side: Side) -> Any:
        with paddle.set_grad_enabled(enabled):
            return act(side)

    return run


def action(rng: random.Random, num_layers: int) -> tuple[str, Action]:
    """A random one, with its name."""
    number, layer = rng.randrange(10**6), rng.randrange(num_layers)
    place = rng.randrange(5 * num_layers)
    places = sorted(rng.sample(range(num_layers), rng.randint(1, num_layers)))
    grad, flag, times = rng.random() < 0.25, rng.random() < 0.5, rng.choice([1, 1, 2, 3])
    clear = rng.choice([True, True, False, None])
    weight, gradient = rng.choice(list(WEIGHTS)), rng.choice(list(GRADIENTS))

    def without_gradients(act: Action) -> Action:
        return _with_grad_mode(act, False)

    kinds: dict[str, Action] = {
        f"step {clear} {times}": lambda s: _step(s, number, clear, times),
        "backward": lambda s: s.forward(number).backward(),
        "retain_graph": lambda s: _two_backwards(s, number),
        "optimizer.step": lambda s: s.optimizer.step(),
        f"clear_grad {flag}": lambda s: s.optimizer.clear_grad(flag),
        "clear_gradients": lambda s: s.model.clear_gradients(),
        f"{weight} of {place}, gradient mode {grad}": _with_grad_mode(
            lambda s: WEIGHTS[weight](_parameter(s, place)), grad
        ),
        f"resident: {weight} of {layer}": without_gradients(lambda s: _resident(s, weight, layer)),
        f"gradient {gradient} of {place}, {flag}": without_gradients(
            lambda s: _gradient(s, gradient, place, flag)
        ),
        f"penalty resident {places} {flag}": lambda s: _penalized(s, number, places, flag),
        "penalty": lambda s: [(p * p).sum() for p in s.parameters],
        "clip": without_gradients(_clip),
        "save or load": _reload,
        "hook": lambda s: _hook(s, place % len(s.parameters)),
        "hooks away": lambda s: [s.hooks.pop().remove() for _ in list(s.hooks)] and None,
        f"freeze {layer} {flag}": lambda s: _freeze(s, layer, flag),
        f"shorten {layer}": lambda s: _shorten(s, layer),
        "evaluate": without_gradients(lambda s: s.forward(number)),
    }
    is_step = rng.random() < 0.35
    return next(iter(kinds.items())) if is_step else rng.choice(list(kinds.items()))


def _clip(side: Side) -> Any:
    with side.resident(range(len(side.layers))):
        return _value(paddle.nn.utils.clip_grad_norm_(side.parameters, 0.05))


def _resident(side: Side, what: str, place: int) -> Any:
    with side.resident([place]):
        return _value(WEIGHTS[what](side.layers[place].second.weight))


OPTIMIZERS: list[Callable[[Any], Any]] = [
    lambda parameters: paddle.optimizer.SGD(0.1, parameters=parameters),
    lambda parameters: paddle.optimizer.Momentum(0.1, parameters=parameters, weight_decay=0.1),
    lambda parameters: paddle.optimizer.AdamW(0.05, parameters=parameters),
]


NO_MEMORY = ("holds no memory", "not initialized", "holder_ should not be null")
"""What Paddle says of an operator on a parameter without memory."""


def verdict(seed: int, seen: Counter[str]) -> None:
    """Run one chain; raises AssertionError where it is wrong."""
    rng = random.Random(seed)
    num_layers = rng.randint(1, 4)
    choices = {
        "seed": seed,
        "layers": num_layers,
        "frozen": [p for p in range(num_layers) if rng.random() < 0.1],
        "optimizer": rng.choice(OPTIMIZERS),
        "options": {
            "num_shards": rng.randint(1, num_layers),
            "offload": rng.choice(["disk", "disk", "host"]),
            "prefetch": rng.choice([0, 1, 2]),
            "checkpoint_activations": rng.random() < 0.8,
        },
    }
    chosen = [action(rng, num_layers) for _ in range(rng.randint(4, 9))]
    story = f"FUZZ chain {seed}: {choices['options']}, {[name for name, _ in chosen]}"
    plain, offloaded = Side(choices, False), Side(choices, True)
    last = [("last step", lambda s: _step(s, 7, True, 1))]
    for number, (name, act) in enumerate([*chosen, *last]):
        where = f"action {number}, {name!r}, of {story}"
        paddle.seed(number)
        try:
            found = _value(act(offloaded))
        except PaddleRecomputeError:
            seen["refused"] += 1
            continue
        except Exception as error:
            if isinstance(error, RuntimeError) and any(one in str(error) for one in NO_MEMORY):
                seen["refused"] += 1  # by Paddle: the parameter is off the device
                continue
            # What the plain chain does, decides.
            with pytest.raises(type(error)):
                paddle.seed(number)
                act(plain)
                raise AssertionError(f"a foreign error: {where}") from error
            seen["error of Paddle"] += 1
            if name == "optimizer.step":  # some are updated, in the order of the one or the other
                return
            continue
        paddle.seed(number)
        wanted = _value(act(plain))
        assert _same(found, wanted), f"{found} is not {wanted}: {where}"
        assert _same(offloaded.seen(), plain.seen()), f"another value after {where}"
        seen["equal"] += 1
    gradients = []
    for side in (offloaded, plain):
        with side.resident(range(num_layers)):
            # A gradient of zeros keeps its shape in Paddle where its parameter gets another one.
            gradients.append(
                [None if p.grad is None else p.grad.numpy().ravel() for p in side.parameters]
            )
    assert _same(*gradients), f"another gradient at the end of {story}"


@pytest.mark.timeout(0)
def test_chains() -> None:
    seen: Counter[str] = Counter()
    first = budget.seed() * 1_000_000
    count = budget.examples(11)
    print(f"Paddle {paddle.__version__}, offloaded chains, FUZZ_SEED={budget.seed()}", flush=True)
    try:
        for seed in range(first, first + count):
            verdict(seed, seen)
            if (seed + 1 - first) % 100 == 0:
                print(seed + 1 - first, "chains", dict(seen), flush=True)
    finally:
        print(", ".join(f"{n} {what}" for what, n in seen.most_common()), flush=True)
    assert seen["refused"] <= MOST_REFUSED * seen.total()
