"""The second forward runs under the AMP state of the first.

On a CPU ``paddle.amp.auto_cast`` does nothing in dygraph, so the state is put on the tracer as
``auto_cast`` would, and the function itself notes what it sees there.
"""

from __future__ import annotations

import contextlib
from typing import Any

import paddle
from paddle.base import core

from paddle_recompute._paddle.amp import AmpState, amp_state, amp_state_of
from tests.recompute.contract import Run, Seen, case, leaf

O1, O2 = core.AmpLevel.O1, core.AmpLevel.O2


def amp(level: Any, dtype: str = "bfloat16", white: tuple[str, ...] = ("matmul",)) -> Any:
    promote = level == O1
    return amp_state_of(AmpState(level, dtype, (set(white), {"exp"}), promote))


def state() -> tuple[Any, ...]:
    now = amp_state()
    white, black = now.lists or ((), ())
    return str(now.level), now.dtype, sorted(white), sorted(black), now.use_promote


class Watching(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.states: list[tuple[Any, ...]] = []

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.states.append(state())
        return self.linear(x).tanh()


BF16_O1 = {"level": O1, "dtype": "bfloat16"}
STATES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "AMP O1 in float16": ({"level": O1, "dtype": "float16"}, None),
    "AMP O1 in bfloat16": (BF16_O1, None),
    "AMP O2 in float16": ({"level": O2, "dtype": "float16"}, None),
    "AMP O2 in bfloat16": ({"level": O2, "dtype": "bfloat16"}, None),
    "AMP lists of the user's own": ({"level": O1, "white": ("tanh", "softmax")}, None),
    "one AMP state in the forward, another in the backward": (
        BF16_O1, {"level": O2, "dtype": "float16"},
    ),
}  # fmt: skip
"""That of the forward, and that of the backward: None is none."""


@case("{what}", what=list(STATES))
def test_amp(run: Run, what: str) -> Seen:
    forward, backward = STATES[what]
    block, x = Watching(), leaf(3, 4)
    with amp(**forward):
        y = run(block, x * 2)
    with amp(**backward) if backward else contextlib.nullcontext():
        y.square().sum().backward()
        during = state()
    states = [block.states[0], block.states[-1]]
    return {"x": x, "block": block, "states": states, "state in the backward": during}


@case("two blocks under different AMP states")
def test_two_states(run: Run) -> Seen:
    blocks, x = [Watching(), Watching()], leaf(3, 4)
    with amp(O1):
        y = run(blocks[0], x * 2)
    with amp(O2, "float16"):
        y = run(blocks[1], y)
    y.sum().backward()
    return {"x": x, "states": [(b.states[0], b.states[-1]) for b in blocks]}


@case("AMP switched on inside the function")
def test_switched_inside(run: Run) -> Seen:
    block, x = Watching(), leaf(3, 4)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        with amp(O1):
            return block(x)

    run(function, x * 2).sum().backward()
    return {"x": x, "block": block, "states": [block.states[0], block.states[-1]]}
