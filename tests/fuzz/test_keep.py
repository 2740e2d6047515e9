"""Random blocks with kept parts: what they leave behind is that of plain Paddle, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.autograd import PyLayer
from paddle.nn import functional as F

from paddle_recompute import keep, recompute
from paddle_recompute.errors import RecomputeError
from tests.fuzz import budget
from tests.recompute.contract import Seen, clean_streams, differences, seen, state_of_the_process
from tests.recompute.contract import plain as plainly

WIDTH, ROWS = 8, 6
Call = Callable[..., Any]


class Twice(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        y = x.tanh()
        ctx.save_for_backward(x, y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        x, y = ctx.saved_tensor()
        return gradient * (1 - y * y) * 2 + 0 * x


class Counting(paddle.nn.Layer):
    """Reads and writes a buffer, and assigns a tensor to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", paddle.zeros([WIDTH]))
        self.last = None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        with paddle.no_grad():
            self.mean.set_value(self.mean * 0.5 + x.mean(0))
        self.last = x.detach() * 0.25
        return x * (1 + self.mean)


class Block(paddle.nn.Layer):
    """Has a Layer or function for each kind of step; `k` keeps or calls, `r` recomputes or not."""

    def __init__(self, steps: list[Any]) -> None:
        super().__init__()
        self.linears = paddle.nn.LayerList([paddle.nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.lstm = paddle.nn.LSTM(WIDTH, WIDTH)
        self.norm = paddle.nn.LayerNorm(WIDTH)
        self.batch_norm = paddle.nn.BatchNorm1D(WIDTH)
        self.spectral = paddle.nn.utils.spectral_norm(paddle.nn.Linear(WIDTH, WIDTH))
        self.counting = Counting()
        self.experts = self.create_parameter([3, WIDTH, WIDTH])
        self.gate = paddle.nn.Linear(WIDTH, 3)
        self.steps = steps

    def forward(self, x: paddle.Tensor, k: Call, r: Call) -> paddle.Tensor:
        for step in self.steps:
            x = self.run(step, x, k, r)
        return x

    def run(self, step: Any, x: paddle.Tensor, k: Call, r: Call) -> paddle.Tensor:
        kind, is_kept, inner = step
        call = k if is_kept else plainly
        if kind in ("inner", "inner without streams"):
            options = {} if kind == "inner" or r is plainly else {"preserve_rng_state": False}

            def nested(x: paddle.Tensor) -> paddle.Tensor:
                for one in inner:
                    x = self.run(one, x, k, r)
                return x

            return call(lambda x: r(nested, x, **options), x)
        if kind == "several":

            def several(x: paddle.Tensor) -> paddle.Tensor:
                for one in inner:
                    x = self.run(one, x, k, r)
                return x

            return call(several, x)
        return getattr(self, kind)(call, x)

    def linear(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return call(self.linears[0], x)

    def residual(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return x + call(self.linears[1], x.tanh())

    def weight_given(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return call(F.linear, x.tanh(), weight=self.linears[0].weight)

    def attention(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        q, key, v = (x * n for n in (1, 0.5, 2))
        return call(self.core, q, key, v)

    def core(self, q: paddle.Tensor, key: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        weights = F.softmax(paddle.matmul(q, key, transpose_y=True))
        return paddle.matmul(F.dropout(weights, 0.3), v)

    def heads(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        x = self.linears[0](x)
        q = x.reshape([ROWS, 2, WIDTH // 2]).transpose([1, 0, 2])
        mixed = call(self.core, q, q.tanh(), q)
        return mixed.transpose([1, 0, 2]).reshape([ROWS, WIDTH])

    def recurrent(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return call(self.lstm, x.unsqueeze(0))[0].squeeze(0)

    def normed(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return call(self.norm, x) + x

    def batch(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return call(self.batch_norm, x) * 0.5

    def powers(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return call(self.spectral, x).tanh()

    def counted(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return call(self.counting, x).tanh() * (1 + self.counting.last.tanh())

    def noise(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return F.dropout(call(lambda x: F.dropout(x.exp(), 0.4).tanh(), x), 0.1)

    def host_noise(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return (x * call(np.random.rand) + call(random.random)).tanh()

    def router(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        def choose(x: paddle.Tensor) -> Any:
            with paddle.no_grad():
                noise = paddle.rand([ROWS, 3])
            score = F.softmax(self.gate(x) + noise)
            return {"best": score.topk(2), "sample": paddle.multinomial(score.detach(), 1)}

        found = call(choose, x)
        weights, chosen = found["best"]
        expert = self.experts.index_select(chosen[:, 0])
        out = paddle.bmm(x.unsqueeze(1), expert).squeeze(1) * weights[:, :1]
        return out + self.experts.index_select(found["sample"][:, 0])[:, 0] * 0.1

    def no_gradient(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        with paddle.no_grad():
            scale = call(lambda x: (x.square().mean(), x.argmax(-1)), x)
        return x * scale[0] + scale[1].astype("float32").unsqueeze(-1) * x.tanh()

    def views(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        x = x * 1.5
        a, b, c = call(lambda x: (x[: ROWS // 2], x.transpose([1, 0]), x), x)
        return paddle.matmul(c, paddle.matmul(b, c)).tanh() + paddle.concat([a.exp(), a], 0) * 0.1

    def view_given(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        x = x.sin()
        return call(lambda a, b: paddle.matmul(a, b, True), x[1:, ::2], x[1:]).sum() * x

    def in_place(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        def part(x: paddle.Tensor) -> paddle.Tensor:
            y = x * 2
            y.add_(x.tanh())
            return F.relu_(y)

        return call(part, x) * x

    def own_function(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return call(Twice.apply, x * 0.5).cos()

    def captured(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        h = x.tanh()
        return call(lambda y: paddle.matmul(h * y, self.linears[1].weight), x) + h

    def raising(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        left: list[paddle.Tensor] = []

        def part(x: paddle.Tensor) -> paddle.Tensor:
            left.append(F.dropout(x.tanh() * x, 0.2))
            raise KeyError("on purpose")

        try:
            x = call(part, x)
        except KeyError:
            x = x + left[0]
        finally:
            x = x * 1.25
        return x

    def narrow(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        return call(lambda x: x.astype("float64").square(), x).astype("float32").tanh()

    def hooked(self, call: Call, x: paddle.Tensor) -> paddle.Tensor:
        y = call(self.linears[0], x)
        y.register_hook(lambda gradient: gradient * 2)
        return y.tanh()


TWICE = ("linear", "residual", "views", "no_gradient", "weight_given")
"""Steps through which Paddle has second derivatives."""
ONCE = (
    *TWICE, "attention", "noise", "heads", "recurrent", "normed", "batch", "powers", "counted",
    "host_noise", "router", "view_given", "in_place", "own_function", "captured", "raising",
    "narrow", "hooked",
)  # fmt: skip
RETAINED = tuple(kind for kind in ONCE if kind != "own_function")
"""Paddle ends the process where a PyLayer's backward runs again."""
QUIET = ("linear", "residual", "views", "no_gradient", "weight_given", "normed")
"""Steps that draw nothing."""


def steps_of(dice: random.Random, kinds: tuple[str, ...], depth: int) -> list[Any]:
    steps: list[Any] = []
    for _ in range(dice.randint(1, 4 if depth == 0 else 2)):
        is_kept = dice.random() < 0.6
        if depth < 2 and dice.random() < 0.25:
            kind = dice.choice(["inner", "several", "inner without streams"])
            quiet = kind == "inner without streams"
            inner = steps_of(dice, QUIET if quiet and kinds is not TWICE else kinds, depth + 1)
            steps.append((kind, is_kept, inner))
        else:
            steps.append((dice.choice(kinds), is_kept, None))
    return steps


def program_of(seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    ending = dice.choice(["backward"] * 4 + ["two backwards", "two calls", "twice", "grad"])
    options = dice.choice([{}, {}, {}, {"offload": "disk"}, {"determinism_check": "values"}])
    kinds = {"twice": TWICE, "two backwards": RETAINED}.get(ending, ONCE)
    steps = steps_of(dice, kinds, 0)
    return {"steps": steps, "ending": ending, "options": options, "times": dice.choice([1, 1, 2])}


def outcome(program: dict[str, Any], k: Call, r: Call) -> Seen:
    """What a user sees after training with the program's block."""
    options = {} if r is plainly else program["options"]
    with clean_streams():
        block, x = Block(program["steps"]), paddle.randn([ROWS, WIDTH])
        x.stop_gradient = False
        found: Seen = {}
        for time in range(program["times"]):
            y = r(block, x * 2, k, r, **options)
            if program["ending"] == "two calls":
                y = r(block, y, k, r, **options)
            loss = y.square().mean()
            if program["ending"] == "twice":
                (gradient,) = paddle.grad(loss, x, create_graph=True)
                (loss + gradient.square().sum()).backward()
            elif program["ending"] == "grad":
                found[f"grad {time}"] = paddle.grad(loss, x)
            else:
                loss.backward(retain_graph=program["ending"] == "two backwards")
                if program["ending"] == "two backwards":
                    y.sum().backward()
            found[f"y {time}"] = y
        found = dict(seen({**found, "x": x, "block": block}))
        found.update(state_of_the_process())
    return found


def check(seed: int) -> tuple[str, str | None]:
    program = program_of(seed)
    try:
        wanted = outcome(program, plainly, plainly)
    except (RuntimeError, ValueError, OSError) as error:
        return f"refused by Paddle: {type(error).__name__}", None
    try:
        found = outcome(program, keep, recompute)
    except RecomputeError as error:
        if "PyLayer in a recomputed function cannot be differentiated twice" in str(error):
            return "refused", None
        return "failed", f"{program}: {error}"
    lines = differences(found, wanted)
    if not lines:
        return "equal", None
    if differences(outcome(program, plainly, plainly), wanted):
        return "not deterministic in Paddle", None
    return "different", f"{program}: " + "; ".join(lines)


@pytest.mark.timeout(0)
def test_blocks_with_kept_parts() -> None:
    found = budget.every_number(check, 20)
    assert found["equal"] >= 0.8 * found.total()
