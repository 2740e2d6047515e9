"""The optimizer state of a `TrainStep` is whole, or it is refused and the parameter is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.errors import CheckpointError
from paddle_recompute.train_step import NOT_UPDATED, TrainStep
from tests.bits import assert_same_bits, values_of

WIDTH = 4
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda given: paddle.optimizer.AdamW(0.1, parameters=given),
    "named": lambda given: paddle.optimizer.Momentum(0.1, parameters=given, name="my"),
    "SGD": lambda given: paddle.optimizer.SGD(0.1, parameters=given),
}
STATEFUL = ["AdamW", "named"]


class Routed(paddle.nn.Layer):
    """Each batch says which of the experts it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = paddle.nn.Linear(WIDTH, WIDTH)
        self.experts = paddle.nn.LayerList([paddle.nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: paddle.Tensor, chosen: tuple[int, ...]) -> paddle.Tensor:
        x = self.first(x)
        for number in chosen:
            x = self.experts[number](x).tanh()
        return x


def loss_of(model: Any, batch: Any) -> paddle.Tensor:
    return model(*batch).square().mean()


def make(name: str, model: Any = None) -> tuple[Any, TrainStep]:
    paddle.seed(1)
    model = model or Routed()
    return model, TrainStep(model, OPTIMIZERS[name](model.parameters()), loss_fn=loss_of)


def batch(*chosen: int) -> list[Any]:
    return [(paddle.to_tensor(np.random.default_rng(0).normal(size=(3, WIDTH))).astype("float32"),
             chosen)]  # fmt: skip


def on_disk(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint keeps it: arrays, and nothing shared with the step."""
    return {**state, "optimizer": {k: np.array(v) for k, v in state["optimizer"].items()}}


def resumed(name: str, state: Any, values: Any) -> tuple[Any, TrainStep]:
    model, step = make(name)
    model.set_state_dict(values)
    step.set_state_dict(state)
    return model, step


@pytest.mark.parametrize("saved_twice", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_that_never_had_a_gradient_has_no_moments(name: str, saved_twice: bool) -> None:
    """It is marked, and the run goes on to the bit; also if another has no gradient since then."""
    model, step = make(name)
    for chosen in ((0,), (0, 1)):
        step(batch(*chosen))
    state, values = on_disk(step.state_dict()), values_of(model)
    marked = {key for key in state["optimizer"] if key.endswith(f":{NOT_UPDATED}")}
    unused = {f"experts.2.{one}:{NOT_UPDATED}" for one in ("weight", "bias")}
    assert marked == (unused if name != "SGD" else set())
    other, again = resumed(name, state, values)
    if saved_twice:  # with and without a step in between, in which experts 1 and 2 are idle
        assert_same_bits(on_disk(again.state_dict())["optimizer"], state["optimizer"])
        for one in (step, again):
            one(batch(0))
        state, values = on_disk(again.state_dict()), values_of(other)
        assert_same_bits(state["optimizer"], on_disk(step.state_dict())["optimizer"])
        other, again = resumed(name, state, values)
    for chosen in ((0, 1), (0,), (0, 1)):
        for one in (step, again):
            one(batch(*chosen))
    assert_same_bits(values_of(model), values_of(other))
    assert_same_bits(
        on_disk(step.state_dict())["optimizer"], on_disk(again.state_dict())["optimizer"]
    )


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_without_the_moments_of_a_parameter_is_refused(name: str) -> None:
    model, step = make(name)
    step(batch(0, 1, 2))
    state, values = on_disk(step.state_dict()), values_of(model)
    for lost in ("first.weight", "experts.1.bias"):
        half = {k: v for k, v in state["optimizer"].items() if not k.startswith(f"{lost}:")}
        assert len(half) < len(state["optimizer"])
        with pytest.raises(CheckpointError, match=rf"the optimizer state lacks {lost}:"):
            resumed(name, {**state, "optimizer": half}, values)


def test_frozen_and_unfrozen_parameters_need_no_moments() -> None:
    model, step = make("AdamW")
    for parameter in model.experts[2].parameters():
        parameter.stop_gradient = True
    step(batch(0, 1, 2))
    state, values = on_disk(step.state_dict()), values_of(model)
    _, again = resumed("AdamW", state, values)  # where they are trained
    again(batch(0, 1, 2))
    assert not any(NOT_UPDATED in key for key in again.state_dict()["optimizer"])
    whole = {k: v for k, v in state["optimizer"].items() if NOT_UPDATED not in k}
    model, step = make("AdamW")
    with pytest.raises(CheckpointError, match=r"lacks experts\.2\.weight:"):
        step.set_state_dict({"optimizer": whole})
    for parameter in model.experts[2].parameters():
        parameter.stop_gradient = True
    step.set_state_dict({"optimizer": whole})  # a state of before, without marks


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("chosen", [((1,), (0, 1)), ((2, 1), (1, 0))])
def test_a_parameter_gets_moments_while_those_of_others_wait(name: str, chosen: Any) -> None:
    """Its first gradient comes after the resumption: alone, or beside those that had one before."""
    model, step = make(name)
    step(batch(0))
    other, again = resumed(name, on_disk(step.state_dict()), values_of(model))
    for one in chosen:
        step(batch(*one))
        again(batch(*one))
    assert_same_bits(values_of(model), values_of(other))
    assert_same_bits(
        on_disk(step.state_dict())["optimizer"], on_disk(again.state_dict())["optimizer"]
    )


def test_a_state_goes_back_into_the_same_model() -> None:
    """Paddle numbers the moments of the second optimizer of a parameter otherwise."""
    model, step = make("AdamW")
    step(batch(0))
    state, values = on_disk(step.state_dict()), values_of(model)
    step(batch(0, 1))
    expected = values_of(model)
    _, again = make("AdamW", model)
    model.set_state_dict(values)
    again.set_state_dict(state)
    again(batch(0, 1))
    assert_same_bits(values_of(model), expected)


def test_moments_under_the_name_of_the_optimizer_are_taken() -> None:
    """As checkpoints of earlier versions have them."""
    model, step = make("named")
    step(batch(0))
    state = on_disk(step.state_dict())
    named = {k.replace(":velocity", ":my_velocity"): v for k, v in state["optimizer"].items()}
    assert named.keys() != state["optimizer"].keys()
    other, again = resumed("named", {**state, "optimizer": named}, values_of(model))
    for one in (step, again):
        one(batch(0))
    assert_same_bits(values_of(model), values_of(other))


KINDS = [
    kind
    for kind in vars(paddle.optimizer).values()
    if isinstance(kind, type)
    and issubclass(kind, paddle.optimizer.Optimizer)
    and kind not in (paddle.optimizer.Optimizer, paddle.optimizer.LBFGS)  # LBFGS is refused
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda one: one.__name__)
def test_the_state_of_every_optimizer_goes_out_and_in(kind: Any) -> None:
    options = {"batch_num": 3} if kind.__name__ == "ASGD" else {}

    def trained_as(values: Any = None, state: Any = None) -> tuple[Any, TrainStep]:
        paddle.seed(1)
        model = Routed()
        optimizer = kind(learning_rate=0.01, parameters=model.parameters(), **options)
        step = TrainStep(model, optimizer, loss_fn=loss_of)
        if state is not None:
            model.set_state_dict(values)
            step.set_state_dict(state)
        return model, step

    model, step = trained_as()
    for chosen in ((0,), (0, 1)):
        step(batch(*chosen))
    state = on_disk(step.state_dict())
    other, again = trained_as(values_of(model), state)
    assert_same_bits(on_disk(again.state_dict())["optimizer"], state["optimizer"])
    for chosen in ((0, 1), (2,)):
        for one in (step, again):
            one(batch(*chosen))
    assert_same_bits(values_of(model), values_of(other))
    assert_same_bits(
        on_disk(step.state_dict())["optimizer"], on_disk(again.state_dict())["optimizer"]
    )


class Forgetful(paddle.optimizer.AdamW):
    """Shows the moments of its first parameters only, as one rank of fleet's sharding does."""

    def state_dict(self) -> Any:
        kept = [one.name for one in self._parameter_list][:3]
        found = super().state_dict()
        return {k: v for k, v in found.items() if k.startswith(tuple(f"{n}_" for n in kept))}


def test_an_optimizer_that_shows_a_part_of_its_state_is_refused() -> None:
    model = Routed()
    optimizer = Forgetful(0.1, parameters=model.parameters())
    step = TrainStep(model, optimizer, loss_fn=loss_of)
    assert step.state_dict()["optimizer"] == {}
    step(batch(0))
    with pytest.raises(CheckpointError, match=r"has updated experts\.0\.bias and has no"):
        step.state_dict()
