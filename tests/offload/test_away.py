"""A parameter that is off the device is read and written as a whole; all else is refused."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import ContrastiveLoss, GradCache, OffloadSequential
from paddle_recompute._paddle.travelling import has_memory
from paddle_recompute.errors import OffloadError, RecomputeError
from paddle_recompute.offload import offload_layers
from paddle_recompute.options import RecomputeConfig
from tests.offload.chains import optimizer_of

WIDTH = 4


def layers() -> list[paddle.nn.Layer]:
    paddle.seed(1)
    return [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def pair(place: str = "disk") -> tuple[paddle.nn.Layer, OffloadSequential]:
    """The plain chain, and one of two shards, of which none is on the device."""
    return paddle.nn.Sequential(*layers()), OffloadSequential(layers(), num_shards=2, offload=place)


def momentum(parameters: Any) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.Momentum(0.1, parameters=parameters, weight_decay=0.1)


def loss_of(model: paddle.nn.Layer, number: int = 0) -> paddle.Tensor:
    x = np.random.default_rng(number).standard_normal([3, WIDTH]).astype("float32")
    return model(paddle.to_tensor(x)).square().mean()


def values(model: paddle.nn.Layer) -> list[np.ndarray]:
    return [parameter.numpy() for parameter in model.parameters()]


def assert_equal(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a, b)


@pytest.fixture(params=["here", "away"])
def weight(request: pytest.FixtureRequest) -> Iterator[paddle.Tensor]:
    """A parameter between steps: the rule is the same where its shard happens to be here still."""
    model = pair()[1]
    loss_of(model)
    weight = model[3 if request.param == "here" else 0].weight
    assert has_memory(weight) == (request.param == "here")
    yield weight


def test_its_values_are_read_and_written_as_a_whole(weight: paddle.Tensor) -> None:
    before = weight.numpy()
    assert np.array_equal(np.asarray(weight, "float64"), before.astype("float64"))
    weight.set_value(before + 1)
    assert np.array_equal(weight.numpy(), before + 1)
    weight.set_value(paddle.to_tensor(before))
    assert np.array_equal(weight.numpy(), before)
    with pytest.raises(OffloadError, match="scale_ of"), paddle.no_grad():
        weight.scale_(2.0)
    assert np.array_equal(weight.numpy(), before)


ONES = [WIDTH, WIDTH]
USES: dict[str, Callable[[Any], Any]] = {
    "tolist": lambda p: p.tolist(),
    "str": lambda p: str(p),
    "clone": lambda p: p.clone(),
    "method": lambda p: p.sum(),
    "operator": lambda p: paddle.sum(p),
    "list": lambda p: paddle.concat([paddle.ones(ONES), p]),
    "reflected": lambda p: paddle.ones([WIDTH]) - p,
    "matmul": lambda p: paddle.ones(ONES) @ p,
    "number": lambda p: 2.0 / p,
    "argument": lambda p: paddle.ones(ONES).lerp_(p, 0.1),
    "to_tensor": lambda p: paddle.to_tensor(p),
    "assign from": lambda p: paddle.assign(p, paddle.ones(ONES)),
    "set_value from": lambda p: paddle.ones(ONES).set_value(p),
    "norm": lambda p: paddle.linalg.norm(p),
    "compare": lambda p: p == p,
    "functional": lambda p: paddle.nn.functional.linear(paddle.ones([1, WIDTH]), p),
    "cast": lambda p: p.astype("float64"),
    "view": lambda p: p.detach(),
    "item": lambda p: p[0],
    "copy_": lambda p: p.copy_(paddle.ones(ONES), True),
    "in place": lambda p: p.add_(paddle.ones(ONES)),
    "fill_": lambda p: p.fill_(3.0),
    "uniform_": lambda p: p.uniform_(5, 6, 7),
    "assign to": lambda p: paddle.assign(paddle.ones(ONES), p),
    "initializer": lambda p: paddle.nn.initializer.Constant(4.0)(p),
    "set item": lambda p: p.__setitem__(0, 7.0),
    "gradient": lambda p: p.grad,
    "set gradient": lambda p: setattr(p, "grad", paddle.ones(ONES)),
    "gradient()": lambda p: p.gradient(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "save": lambda p: paddle.save(p, os.devnull),
}
"""All else that can be done with a parameter, reading and writing."""


@pytest.mark.parametrize("is_recorded", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("place", ["here", "away"])
def test_all_else_is_refused(place: str, is_recorded: bool) -> None:
    model = pair()[1]
    loss_of(model)
    weight = model[3 if place == "here" else 0].weight
    value, rest = weight.numpy(), [p.numpy() for p in model.parameters()]
    for name, use in USES.items():
        refused = pytest.raises(OffloadError, match=r"state_dict\(\)|TrainStep")
        with refused, paddle.set_grad_enabled(is_recorded):
            use(weight)
            pytest.fail(f"{name} was not refused")
    assert np.array_equal(weight.numpy(), value)
    assert_equal(values(model), rest)


def test_a_hook_on_a_parameter_in_a_gradient_cache_is_refused() -> None:
    model = pair()[1]
    cache = GradCache(model, ContrastiveLoss(0.1), chunk_size=2)
    pairs = [paddle.randn([4, WIDTH]) for _ in range(2)]
    cache.backward(*pairs)
    hook = model[1].weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(OffloadError, match="once per chunk and not once on the sum"):
        cache.backward(*pairs)
    hook.remove()
    GradCache(paddle.nn.Linear(WIDTH, 2), ContrastiveLoss(0.1), chunk_size=2).backward(*pairs)


def test_clip_grad_norm_is_refused() -> None:
    model = pair()[1]
    loss_of(model).backward()
    with pytest.raises(OffloadError, match=r"gradient of .* cannot be read"):
        paddle.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_what_was_written_is_what_the_chain_computes_with(place: str) -> None:
    plain, model = pair(place)
    for one in (plain, model):
        for parameter in one.parameters():
            parameter.set_value(parameter.numpy() * 0.5)
    assert np.array_equal(loss_of(plain).numpy(), loss_of(model).numpy())


def _cleared(clear: Callable[..., Any]) -> None:
    """A batch is dropped: what `clear` has cleared is not trained on."""
    plain, model = pair()
    for one in (plain, model):
        optimizer = optimizer_of(one, momentum)
        loss_of(one).backward()
        optimizer.step()
        optimizer.clear_grad()
        loss_of(one, 1).backward()
        clear(one)
        loss_of(one, 2).backward()
        optimizer.step()
    assert_equal(values(plain), values(model))


@pytest.mark.parametrize(
    "clear",
    [
        lambda model: model.clear_gradients(),
        lambda model: [p.clear_gradient() for p in model.parameters()],
        lambda model: [p.clear_gradient(False) for p in model.parameters()],
        lambda model: [p.clear_grad() for p in model.parameters()],
    ],
)
def test_a_batch_whose_gradients_are_cleared_is_dropped(clear: Callable[..., Any]) -> None:
    _cleared(clear)


def test_steps_without_clear_grad_add_up() -> None:
    plain, model = pair()
    for one in (plain, model):
        optimizer = optimizer_of(one, momentum)
        for number in range(3):
            loss_of(one, number).backward()
            optimizer.step()
    assert_equal(values(plain), values(model))


class Sometimes(paddle.nn.Layer):
    """Uses its second parameter if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = paddle.nn.Linear(WIDTH, WIDTH)
        self.second = paddle.nn.Linear(WIDTH, WIDTH)
        self.uses_second = True

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.second(self.first(x)) if self.uses_second else self.first(x)


@pytest.mark.parametrize("set_to_zero", [True, False])
@pytest.mark.parametrize(
    "make",
    [momentum, lambda parameters: paddle.optimizer.AdamW(0.1, parameters=parameters)],
    ids=["Momentum", "AdamW"],
)
def test_a_parameter_without_gradient_in_a_step(
    make: Callable[..., Any], set_to_zero: bool
) -> None:
    found = []
    for is_offloaded in (False, True):
        paddle.seed(1)
        parts = [Sometimes() for _ in range(3)]
        model = (
            OffloadSequential(parts, num_shards=3, offload="disk")
            if is_offloaded
            else paddle.nn.Sequential(*parts)
        )
        optimizer = optimizer_of(model, make)
        for number in range(4):
            parts[1].uses_second = number in (1, 3)
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.clear_grad(set_to_zero)
        found.append(values(model))
    assert_equal(*found)


def test_named_layers_follow_the_rule() -> None:
    paddle.seed(1)
    block = paddle.nn.TransformerEncoderLayer(WIDTH, 2, WIDTH)
    model = paddle.nn.TransformerEncoder(block, 2)
    offload_layers(
        model, RecomputeConfig(checkpoints=["layers.*"], offload_parameters="disk", num_shards=2)
    )
    weight = model.layers[0].linear1.weight
    with pytest.raises(OffloadError, match="weight_decay"):
        weight.sum()
    weight.set_value(2 * weight.numpy())
    assert np.array_equal(weight.numpy(), model.state_dict()["layers.0.linear1.weight"].numpy())


def test_a_second_backward_is_refused() -> None:
    plain, model = pair()
    for one in (plain, model):
        loss = loss_of(one)
        loss.backward(retain_graph=True)
    with pytest.raises(RecomputeError, match=r"has run already.*sum of the losses"):
        loss.backward()
    for one in (plain, model):
        optimizer_of(one, momentum).step()
    assert_equal(values(plain), values(model))


@pytest.mark.parametrize("how", ["Layer", "function"])
def test_a_layer_of_two_chains_is_refused(how: str) -> None:
    shared, alone = paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.Linear(WIDTH, WIDTH)
    first = OffloadSequential([shared], num_shards=1, offload="disk")
    value = alone.weight.numpy()
    entry = shared if how == "Layer" else lambda: shared
    with pytest.raises(OffloadError, match=f"{shared.weight.name} of Linear is offloaded already"):
        OffloadSequential([alone, entry], num_shards=1, offload="disk")
    assert np.array_equal((alone.weight * 1).numpy(), value)  # the other Layer is as it was
    loss_of(first).backward()
    del first
    OffloadSequential([alone, shared], num_shards=2, offload="disk")  # the first chain is gone


def test_a_plain_optimizer_of_paddle_is_refused() -> None:
    model = pair()[1]
    loss_of(model).backward()
    with pytest.raises(OffloadError, match="gradient of"):
        momentum(model.parameters()).step()
