"""`recompute` as a decorator, and with contexts for its two forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import is_recomputing, recompute
from paddle_recompute.errors import ConfigError
from tests.recompute.contract import Run, Seen, case, leaf, plain, step

FORMS = {
    "recompute()(function)": {},
    "recompute(offload=...)(function)": {"offload": "disk"},
    "recompute(determinism_check=...)(function)": {"determinism_check": "values"},
    "recompute(debug=...)(function)": {"debug": True},
}


@case("{form}", form=list(FORMS))
def test_decorators(run: Run, form: str) -> Seen:
    linear = paddle.nn.Linear(4, 4)

    def function(x: paddle.Tensor, *, scale: float, offload: int = 2) -> paddle.Tensor:
        return F.dropout(linear(x).tanh() * scale * offload, 0.2)

    call = function if run is plain else recompute(**FORMS[form])(function)
    return step(plain, call, leaf(3, 4), scale=0.5, offload=3)


def test_a_decorated_method_runs_twice_and_keeps_its_name() -> None:
    class Block(paddle.nn.Layer):
        runs = 0

        @recompute()
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            """Words."""
            type(self).runs += 1
            return x.exp().tanh()

    block, x = Block(), leaf(3, 4)
    block(x * 2).sum().backward()
    assert Block.runs == 2 and block.forward.__name__ == "forward"
    assert block.forward.__doc__ == "Words."


@pytest.mark.parametrize("given", [{"scale": 2}, {"offload_indices": [0]}])
def test_a_decorator_takes_options_alone(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="returns a decorator"):
        recompute(**given)


@contextlib.contextmanager
def noting(name: str, notes: list[str]) -> Iterator[None]:
    notes.append(name)
    yield
    notes.append(f"end of {name}")


def test_each_forward_runs_in_its_context() -> None:
    notes: list[str] = []

    fails = iter([True, False])

    def function(x: paddle.Tensor) -> paddle.Tensor:
        notes.append("again" if is_recomputing() else "run")
        if is_recomputing() and next(fails):
            raise LookupError
        return x.exp().tanh()

    def contexts() -> Any:
        notes.append("made")
        return noting("first", notes), noting("second", notes)

    x = leaf(3)
    y = recompute(function, x * 2, context_fn=contexts)
    assert notes == ["made", "first", "run", "end of first"]
    notes.clear()
    with pytest.raises(LookupError):
        y.sum().backward(retain_graph=True)
    assert notes == ["second", "again"]
    notes.clear()
    y.sum().backward()
    assert notes == ["made", "second", "again", "end of second"]
    notes.clear()
    with paddle.no_grad():
        recompute(function, x, context_fn=contexts)
    assert notes == ["made", "first", "run", "end of first"]


def test_nested_calls_have_contexts_of_their_own() -> None:
    notes: list[str] = []

    def named(name: str) -> Any:
        return lambda: (noting(f"{name} 1", notes), noting(f"{name} 2", notes))

    def outer(x: paddle.Tensor) -> paddle.Tensor:
        return recompute(lambda x: x.exp().tanh(), x.tanh(), context_fn=named("inner"))

    y = recompute(outer, leaf(3) * 2, context_fn=named("outer"))
    assert notes[:2] == ["outer 1", "inner 1"]
    notes.clear()
    y.sum().backward()
    # The second forward of the outer function calls the inner one, whose own follows.
    assert [one for one in notes if "end" not in one] == ["outer 2", "inner 1", "inner 2"]


def test_a_program_has_no_contexts() -> None:
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            x = paddle.static.data("x", [3, 4])
            with pytest.raises(ConfigError, match="context_fn works in dygraph only"):
                recompute(paddle.tanh, x, context_fn=lambda: (None, None))
    finally:
        paddle.disable_static()
