"""use_reentrant=True, Paddle's PyLayer form: right but for what `recompute` says about it.

Every case of the contract goes through it too. `DIFFERENT` lists all that may differ from the plain
call, each with the reason; a case that is right after all must leave the list.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import recompute, recompute_wrapper
from paddle_recompute.errors import ConfigError, RecomputeError
from tests.recompute import (  # noqa: F401  (they fill CASES)
    test_amp,
    test_determinism_check,
    test_engine,
    test_inputs,
    test_large_buffers,
    test_lifetime,
    test_nesting,
    test_outputs,
    test_randomness,
    test_reach,
    test_side_effects,
    test_writes,
)
from tests.recompute.contract import CASES, Case, differences, is_rounding, leaf, plain

IS_26 = paddle.__version__.startswith("2.6")


def reentrant(function: Any, *args: Any, **kwargs: Any) -> Any:
    return recompute(function, *args, use_reentrant=True, **kwargs)


FLAGS = "kind of "  # "outputs always need a gradient"
UNUSED = "instead of None"  # "an unused output leaves zeros instead of None"
GRAD = "RecomputeError: .*paddle.grad"  # "paddle.grad and retain_graph=True are refused"
RETAIN = r"RecomputeError: .*retain_graph=True"
NOT_IN_THE_GRAPH = "ValueError: .*does not appear in the backward graph"
NO_GRADIENT_IN_FIRST = "RuntimeError: Cannot register hook on a tensor that stop gradient"
ENGINE_OF_26 = "SystemError: .*Unable to find next node in the GradTensorHolder"

DIFFERENT: dict[str, str] = {
    "nothing needs a gradient": FLAGS,
    "integer tensors returned": FLAGS,
    "a detached tensor returned": FLAGS,
    "a tensor that was made with stop_gradient returned": FLAGS,
    "retain_grads on a tensor inside the function": FLAGS,
    "the power iteration of nn.utils.spectral_norm": FLAGS,  # of the weight that it computes
    "an output that the loss does not use": UNUSED,
    "the inputs' container returned": "is it the same object: False instead of True",
    "paddle.grad of the input: the parameters' .grad stays None": GRAD,
    "paddle.grad of the parameters": NOT_IN_THE_GRAPH,
    "paddle.grad inside the function": NOT_IN_THE_GRAPH,
    "paddle.grad of an input that is not used": GRAD,
    "paddle.grad with gradients of the outputs and inputs that are left out": GRAD,
    "paddle.grad first, then backward": RETAIN,
    "backward(retain_graph=True), then backward": RETAIN,
    "backward(retain_graph=True) three times, nested blocks": RETAIN,
    "two losses, one after the other, with retain_graph=True": RETAIN,
    # Random numbers that a hook of the output draws come before the second forward, or after it.
    "random numbers drawn by a hook in the backward": "grad of x",
    # Paddle calls a hook on a PyLayer's output, and drops the gradient that it returns.
    "hooks on input, output and parameters": "grad of x",
    "hooks on tensors inside the function": NO_GRADIENT_IN_FIRST,
    "a saved tensor changed in place inside the function is refused, as in the plain call": (
        "OSError"
    ),
    # The second forward's own backward goes through the graph of a tensor that is captured.
    "blocks in a loop, reached by a captured activation": "grad of x",
    # Paddle's node refuses a tensor twice, and takes a parameter that it returns for its own.
    "the same tensor twice returned": "OSError.*contains duplicate",
    "a parameter returned": "OSError",
    # Only what is returned is compared: the first forward saves nothing.
    "a function that takes another branch in its second call": "grad of x",
}
CRASHES = ("only tensors without gradient returned",)
if IS_26:
    DIFFERENT["an LSTM with dropout"] = ENGINE_OF_26
    DIFFERENT["a PyLayer with two tensors in and out inside"] = ENGINE_OF_26


SURVIVED = [one for one in CASES if one.title not in CRASHES]


@pytest.mark.parametrize("one", SURVIVED, ids=[f"{one.section}: {one.title}" for one in SURVIVED])
def test_every_case(one: Case) -> None:
    wanted = one.wanted()
    try:
        found = one.observe(reentrant)
    except Exception as error:
        if one.or_error and isinstance(error, RecomputeError):
            return
        if one.title not in DIFFERENT:
            raise
        what = f"{type(error).__name__}: {error}"
        assert re.search(DIFFERENT[one.title], what, re.DOTALL), what
        return
    lines = differences(found, wanted)
    if one.title in DIFFERENT:
        assert lines, f"'{one.title}' is right now: take it off the list"
        assert any(re.search(DIFFERENT[one.title], line) for line in lines), "\n".join(lines)
    else:
        assert not lines or is_rounding(found, wanted), "\n".join([one.title, *lines])


def test_differences_are_of_cases_that_exist() -> None:
    assert set(DIFFERENT) <= {one.title for one in CASES}


# ------------------------------------------------------------------------------------ refusals


def test_paddle_grad_is_refused() -> None:
    x = leaf(3)
    y = reentrant(paddle.tanh, x * 2)
    with pytest.raises(RecomputeError, match=r"cannot serve paddle.grad.*use_reentrant=None"):
        paddle.grad(y, [x])


def test_retain_graph_is_refused() -> None:
    layer = recompute_wrapper(paddle.nn.Linear(4, 4), name="head", use_reentrant=True)
    y = layer(leaf(3, 4) * 2).sum()
    with pytest.raises(RecomputeError, match=r"Linear 'head'.*backward\(retain_graph=True\)"):
        y.backward(retain_graph=True)


def test_a_second_backward_is_refused() -> None:
    y = reentrant(paddle.tanh, leaf(3) * 2)
    y.sum().backward()
    with pytest.raises(RecomputeError, match="use_reentrant=True, which cannot serve a second"):
        y.sum().backward()


@pytest.mark.parametrize(
    "options", [{"offload": "disk"}, {"offload": "host"}, {"determinism_check": "values"}], ids=str
)
def test_options_that_need_the_hooks_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="need the saved-tensor hooks of the default form"):
        reentrant(paddle.tanh, leaf(3), **options)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda y, call: y.reshape([[3, 4], [4, 3]][call]), r"float32\[3, 4\] became .*\[4, 3\]"),
        (lambda y, call: (y, [1, None][call]), r"output\[1\] int became output\[1\] NoneType"),
        (lambda y, call: [y] * (call + 1), "1 values became 2 values"),
    ],
)
def test_another_result_is_refused(returned: Any, message: str) -> None:
    calls = []

    def block(x: paddle.Tensor) -> Any:
        calls.append(1)
        return returned(x.tanh(), len(calls) - 1)

    outputs = reentrant(block, leaf(3, 4) * 2)
    first = outputs if isinstance(outputs, paddle.Tensor) else outputs[0]
    with pytest.raises(RecomputeError, match=message):
        first.sum().backward()


# --------------------------------------------------------------------------- what it is there for


def test_the_graph_hides_the_parameters() -> None:
    """One node for the whole function: what tools that walk the graph get to see."""
    layer = paddle.nn.Linear(4, 4)
    y = reentrant(layer, leaf(3, 4) * 2)
    assert "RecomputeFunction" in y.grad_fn.name() or "PyLayer" in y.grad_fn.name()


def test_both_forms_in_one_model() -> None:
    gradients = []
    for forms in ((plain, plain, plain), (reentrant, recompute, reentrant)):
        paddle.seed(1)
        layers = [
            paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Dropout(0.5)) for _ in forms
        ]
        x = leaf(3, 4)
        y = x * 2
        for form, layer in zip(forms, layers, strict=True):
            y = form(layer, y)
        y.square().sum().backward()
        gradients.append([x.grad.numpy(), *(layer[0].weight.grad.numpy() for layer in layers)])
    for one, other in zip(*gradients, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(("outer", "inner"), [(reentrant, recompute), (recompute, reentrant)])
def test_one_form_inside_the_other(outer: Any, inner: Any) -> None:
    gradients = []
    for forms in ((plain, plain), (outer, inner)):
        paddle.seed(1)
        layer, x = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Dropout(0.5)), leaf(3, 4)
        y = forms[0](lambda x: forms[1](layer, x).tanh(), x * 2)  # noqa: B023
        y.square().sum().backward()
        gradients.append([x.grad.numpy(), layer[0].weight.grad.numpy()])
    for one, other in zip(*gradients, strict=True):
        assert np.array_equal(one, other)


def test_it_says_nothing_when_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        reentrant(paddle.tanh, leaf(3)).sum().backward()
    assert not caplog.records
