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

OFF, O1, O2 = core.AmpLevel.O0, core.AmpLevel.O1, core.AmpLevel.O2


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


def step(run: Run, forward: Any, backward: Any) -> Seen:
    block, x = Watching(), leaf(3, 4)
    with forward:
        y = run(block, x * 2)
    with backward:
        y.square().sum().backward()
        during = state()
    return {
        "x": x,
        "block": block,
        "states": [block.states[0], block.states[-1]],
        "state in the backward": during,
    }


@case("AMP {level} in {dtype}", level=["O1", "O2"], dtype=["float16", "bfloat16"])
def test_amp(run: Run, level: str, dtype: str) -> Seen:
    return step(run, amp(getattr(core.AmpLevel, level), dtype), contextlib.nullcontext())


@case("AMP lists of the user's own")
def test_lists(run: Run) -> Seen:
    return step(run, amp(O1, white=("tanh", "softmax")), contextlib.nullcontext())


@case("one AMP state in the forward, another in the backward")
def test_another_in_the_backward(run: Run) -> Seen:
    return step(run, amp(O1, "bfloat16"), amp(O2, "float16"))


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
