"""Single calls of Layers, timed as Programs: what such a Program has, and what stays as it is."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_recompute import load_config
from paddle_recompute._paddle.static import native
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute import Unit, treat_calls
from paddle_recompute.static_graph import ProgramCalls, call_times

CONFIG = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"


class Block(paddle.nn.Layer):
    """Takes a mask by name; its second output needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)

    def forward(self, x: Any, *, mask: Any) -> Any:
        return paddle.nn.functional.dropout(self.linear(x), 0.5) * mask, mask


class Model(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = paddle.nn.LayerList([Block(), Block()])


def whole(block: paddle.nn.Layer) -> None:
    treat_calls(block, [Unit(("",), (0,))], {"": 1}, preserve_rng_state=True)


def nothing(block: paddle.nn.Layer) -> None:
    pass


def calls_of(model_fn: Any) -> ProgramCalls:
    return ProgramCalls(load_config(CONFIG, ["mode=static", "launch.num_ranks=1"]), model_fn)


def inputs(*, needs_gradients: bool = True) -> Any:
    x = paddle.ones([3, 4])
    x.stop_gradient = not needs_gradients
    return (x,), {"mask": paddle.ones([3, 4])}


@pytest.fixture
def multiplications(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many matrices the Program of each run multiplies."""
    found = []
    run = ProgramCalls._run

    def counted(self: ProgramCalls, program: Any) -> None:
        kinds = [native().kind(one) for one in native().operations(program.main)]
        found.append(sum("matmul" in kind for kind in kinds))
        run(self, program)

    monkeypatch.setattr(ProgramCalls, "_run", counted)
    monkeypatch.setattr(call_times, "AFFORDABLE", 0.0)
    return found


def test_a_recomputed_call_has_one_more_forward(multiplications: list[int]) -> None:
    found = calls_of(Model).seconds("blocks.1", inputs(), {"plain": nothing, "whole": whole})
    assert sorted(found) == ["plain", "whole"]
    assert min(found.values()) > 0
    forward, backward = 1, 1  # the operator of the gradient makes that of weight and input
    each = [forward + backward, 2 * forward + backward]
    assert multiplications == each * (1 + call_times.LEAST_ROUNDS)


def test_streams_and_gradients_stay_as_they_are(multiplications: list[int]) -> None:
    given = inputs()
    paddle.seed(3)
    streams = paddle.get_rng_state()
    calls_of(Model).seconds("blocks.0", given, {"whole": whole})
    drawn = paddle.rand([3]).tolist()
    paddle.set_rng_state(streams)
    assert drawn == paddle.rand([3]).tolist()
    assert paddle.in_dynamic_mode()
    assert given[0][0].grad is None


def test_a_call_without_a_backward_is_refused(multiplications: list[int]) -> None:
    class Frozen(Model):
        def __init__(self) -> None:
            super().__init__()
            for one in self.parameters():
                one.stop_gradient = True

    with pytest.raises(StaticGraphError, match=r"no output of 'blocks.0' needs a gradient"):
        calls_of(Frozen).seconds("blocks.0", inputs(needs_gradients=False), {"plain": nothing})
    assert not multiplications
