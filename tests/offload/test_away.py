"""A parameter that is off the device: read and written as a whole, wrong in no other way."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn.utils import vector_to_parameters

from paddle_recompute import OffloadSequential, TrainStep
from paddle_recompute._paddle.released_memory import has_memory
from paddle_recompute.errors import OffloadError, RecomputeError
from paddle_recompute.offload import resident
from tests.bits import assert_same_bits
from tests.fake_device import selected
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


@pytest.fixture(params=["here", "away"])
def weight(request: pytest.FixtureRequest) -> Iterator[paddle.Tensor]:
    """A parameter between steps: the rule is the same where its shard happens to be here still."""
    model = pair()[1]
    loss_of(model)
    weight = model[3 if request.param == "here" else 0].weight
    assert has_memory(weight) == (request.param == "here")
    rest = [p for p in model.parameters() if p is not weight]
    before = [p.numpy() for p in rest]
    yield weight
    assert_same_bits([p.numpy() for p in rest], before)


def test_its_values_are_read_and_written_as_a_whole(weight: paddle.Tensor) -> None:
    before = weight.numpy()
    assert np.array_equal(np.asarray(weight, "float64"), before.astype("float64"))
    weight.set_value(before + 1)
    assert np.array_equal(weight.numpy(), before + 1)
    weight.set_value(paddle.to_tensor(before))
    assert np.array_equal(weight.numpy(), before)


ONES = [WIDTH, WIDTH]


READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda p: p.clone(),
    "method": lambda p: p.sum(),
    "operator": lambda p: paddle.sum(p),
    "list": lambda p: paddle.concat([paddle.ones(ONES), p]),
    "reflected": lambda p: paddle.ones([WIDTH]) - p,
    "matmul": lambda p: paddle.ones(ONES) @ p,
    "number": lambda p: 2.0 / p,
    "argument": lambda p: paddle.ones(ONES).lerp_(p, 0.1),
    "assign from": lambda p: paddle.assign(p, paddle.ones(ONES)),
    "norm": lambda p: paddle.linalg.norm(p),
    "compare": lambda p: p == p,
    "functional": lambda p: paddle.nn.functional.linear(paddle.ones([1, WIDTH]), p),
    "cast": lambda p: p.astype("float64"),
    "item": lambda p: p[0],
    "an operator by keyword": lambda p: paddle.exp(x=p),
}
"""What needs its memory: Paddle raises where it is away."""

WRITES: dict[str, Callable[[Any], Any]] = {
    "assign to": lambda p: paddle.assign(paddle.full(ONES, 4.0), p),
    "initializer": lambda p: paddle.nn.initializer.Constant(4.0)(p),
    "vector_to_parameters": lambda p: vector_to_parameters(paddle.full([WIDTH * WIDTH], 4.0), [p]),
    "set_value": lambda p: p.set_value(np.full(ONES, 4.0, "float32")),
    "data": lambda p: setattr(p, "data", paddle.full(ONES, 4.0)),
}
"""What gives it other values as a whole, which stay."""

REFUSED: dict[str, Callable[[Any], Any]] = {
    "to_tensor": lambda p: paddle.to_tensor(p),
    "view": lambda p: p.detach(),
    "cpu": lambda p: p.cpu(),
    "data_ptr": lambda p: p.data_ptr(),
    "copy_": lambda p: p.copy_(paddle.ones(ONES), True),
    "in place": lambda p: p.add_(paddle.ones(ONES)),
    "fill_": lambda p: p.fill_(3.0),
    "uniform_": lambda p: p.uniform_(5, 6, 7),
    "scale_": lambda p: p.scale_(2.0),
    "gradient": lambda p: p.grad,
    "set gradient": lambda p: setattr(p, "grad", paddle.ones(ONES)),
    "gradient()": lambda p: p.gradient(),
    "copy": lambda p: copy.copy(p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "save": lambda p: paddle.save(p, os.devnull),
    "clip_grad_norm_": lambda p: paddle.nn.utils.clip_grad_norm_([p], 0.01),
}
"""What would go wrong in silence."""


@paddle.no_grad()
def test_what_would_be_silent_is_refused(weight: paddle.Tensor) -> None:
    value = weight.numpy()
    for name, use in REFUSED.items():
        with pytest.raises(OffloadError, match=r"state_dict\(\)|resident"):
            use(weight)
            pytest.fail(f"{name} was not refused")
    assert np.array_equal(weight.numpy(), value)


@paddle.no_grad()
def test_an_operator_gets_its_values_or_raises(weight: paddle.Tensor) -> None:
    value, plain = weight.numpy(), paddle.nn.Linear(WIDTH, WIDTH).weight
    plain.set_value(value)
    for name, use in READS.items():
        if has_memory(weight):
            assert_same_bits(np.asarray(use(weight)), np.asarray(use(plain)), name)
        else:
            with pytest.raises((RuntimeError, ValueError)):
                use(weight)
                pytest.fail(f"{name} did not raise")
    assert np.array_equal(weight.numpy(), value)


@paddle.no_grad()
@pytest.mark.parametrize("write", WRITES)
def test_values_that_are_written_as_a_whole_stay(weight: paddle.Tensor, write: str) -> None:
    WRITES[write](weight)
    assert np.array_equal(weight.numpy(), np.full(ONES, 4.0))


PENALTIES: dict[str, Callable[[paddle.Tensor, paddle.Tensor], Any]] = {
    "with the loss": lambda loss, penalty: (loss + penalty).backward(),
    "before the loss": lambda loss, penalty: (penalty.backward(), loss.backward()),
    "after the loss": lambda loss, penalty: (loss.backward(), penalty.backward()),
}


@pytest.mark.parametrize("order", PENALTIES)
def test_a_penalty_outside_of_resident_has_its_gradient_or_raises(order: str) -> None:
    """Its graph has the parameter itself, which has no memory while its shard is away."""
    for number, is_exact in ((3, order != "after the loss"), (0, False)):  # here, and away
        sides, errors = pair(), []
        for model in sides:
            optimizer = optimizer_of(model, momentum)
            loss = loss_of(model)
            try:
                weight = model[number].weight
                PENALTIES[order](loss, (weight * weight.exp()).sum())
                optimizer.step()
            except (RuntimeError, NotImplementedError) as error:
                errors.append(error)
        assert bool(errors) != is_exact
        if is_exact:
            assert_same_bits(*map(values, sides))


def in_a_thread(act: Callable[[], Any]) -> Any:
    """What `act` returns, or the OffloadError that it raises, in a thread that then ends."""
    found = []

    def run() -> None:
        try:
            found.append(act())
        except OffloadError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_threads_may_train_in_turns() -> None:
    """One thread at a time; a step that is cleared has ended, so another thread may begin one."""
    plain, model = pair()
    sides = [(one, optimizer_of(one, momentum)) for one in (plain, model)]

    def train(number: int) -> None:
        for one, optimizer in sides:
            loss_of(one, number).backward()
            optimizer.step()
            optimizer.clear_grad()

    train(0)
    loss = loss_of(model)
    words = r"a step of the thread MainThread.*no_grad.*a step ends with step\(\) or clear_grad\(\)"
    with pytest.raises(OffloadError, match=words):
        raise in_a_thread(lambda: loss_of(model, 3))
    loss.backward()
    sides[1][1].clear_grad(set_to_zero=False)
    assert in_a_thread(lambda: train(1)) is None
    train(2)
    assert_same_bits(values(plain), values(model))


def test_a_backward_inside_of_the_step_of_another_thread_is_refused() -> None:
    """The other thread's update would have its gradients, or clear them."""
    model = pair()[1]
    optimizer = optimizer_of(model, momentum)
    loss = loss_of(model, 1)
    optimizer.clear_grad()
    begun, may_end = threading.Event(), threading.Event()

    def train() -> None:
        loss_of(model, 2).backward()
        begun.set()
        may_end.wait()
        optimizer.step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        begun.wait()
        with pytest.raises(OffloadError, match="is in a step of the thread"):
            loss.backward()
    finally:
        may_end.set()
        thread.join()


@pytest.mark.skipif(
    selected.is_selected(),
    reason="a plain model that two threads use at once fails in Paddle there, too (2.6, 3.3)",
)
@pytest.mark.parametrize("place", ["host", "disk"])
def test_another_thread_reads_and_computes_during_steps(place: str) -> None:
    model = pair(place)[1]
    optimizer = optimizer_of(model, lambda p: paddle.optimizer.SGD(0.0, parameters=p))
    want, loss = values(model), loss_of(model).numpy()
    is_over, wrong, num_done = threading.Event(), [], [0]

    def read() -> None:
        try:
            while not is_over.is_set() or not num_done[0]:
                assert_same_bits(values(model), want)
                assert np.array_equal(model.state_dict()["0.weight"].numpy(), want[0])
                with paddle.no_grad():
                    assert np.array_equal(loss_of(model).numpy(), loss)
                num_done[0] += 1
        except BaseException as error:
            wrong.append(error)

    reader = threading.Thread(target=read)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    reader.start()
    try:
        for number in range(6):
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.clear_grad()
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        reader.join()
    assert wrong == [] and num_done[0]


def test_resident_brings_its_shards_and_takes_them_back() -> None:
    """What is done inside of it is compared by tests/fuzz/test_absent_parameters.py."""
    model = pair()[1]
    shard, rest = (model[first].parameters() + model[first + 1].parameters() for first in (0, 2))
    for _ in range(2):
        with model.resident(model[1]):
            assert all(map(has_memory, shard)) and not any(map(has_memory, rest))
        assert not any(map(has_memory, shard))


def test_a_train_step_inside_of_resident_is_refused() -> None:
    model = pair()[1]
    nothing = pytest.raises(OffloadError, match="nothing of this Linear is offloaded")
    with nothing, resident(paddle.nn.Linear(2, 2)):
        pass
    step = TrainStep(model, model.optimizer(momentum), loss_fn=lambda model, _: loss_of(model))
    with model.resident(), pytest.raises(OffloadError, match="call it outside"):
        step([paddle.ones([3, WIDTH])])
    loss_of(model).backward()
    with pytest.raises(OffloadError, match="resident"):
        momentum(model.parameters()).step()  # of the bare optimizer


def test_a_second_backward_is_refused() -> None:
    plain, model = pair()
    for one in (plain, model):
        loss = loss_of(one)
        loss.backward(retain_graph=True)
    with pytest.raises(RecomputeError, match=r"has run already.*sum of the losses"):
        loss.backward()
    for one in (plain, model):
        optimizer_of(one, momentum).step()
    assert_same_bits(values(plain), values(model))


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
