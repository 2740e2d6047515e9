"""`compile_model`: no number of a Program is wrong silently.

Each model here is one that Paddle converts wrongly, on some version, or did. Its Program is equal
to eager execution or refused; with ``or_eager=True`` the model trains on, with eager's numbers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import TrainStep, compile_model
from paddle_recompute._paddle.static.compiled import CompiledForward
from paddle_recompute.distributed import collective_fallback
from paddle_recompute.errors import StaticGraphError
from tests import planted_models as planted
from tests.bits import assert_same_bits, values_of
from tests.ranks import each_on_ranks

nn = paddle.nn
IS_26 = paddle.__version__.startswith("2.6")
SPEC = [paddle.static.InputSpec([-1, 4], "float32")]
ROUNDING = 2e-6 if IS_26 else 0.0
"""Paddle 2.6 adds the gradients of branches up in another order in a Program."""


class Base(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.n = nn.LayerNorm(4)


class Rebinding(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.register_buffer("count", paddle.zeros([1]))

    def forward(self, x: Any) -> Any:
        self.count = self.count + 1
        return self.l(x) / self.count


class BufferTwice(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Rebinding()

    def forward(self, x: Any) -> Any:
        return self.inner(self.inner(x))


ORDINARY = [
    planted.BatchNormed, planted.Dropped, planted.Mixed, planted.Convolved, planted.Recurrent,
    planted.BranchInProgram, planted.Constants, planted.Frozen, planted.Stopped, planted.Hooked,
]  # fmt: skip
"""Their Programs are right, so a comparison that refuses one raises a false alarm."""
MODELS: dict[str, Callable[[], nn.Layer]] = {
    **{
        kind.__name__: functools.partial(planted.Small, kind)
        for kind in (*planted.ODD, planted.Noting, *ORDINARY)
    },
    "BufferTwice": BufferTwice,
}
ALWAYS_COMPILED = {kind.__name__ for kind in ORDINARY}


def numbers(model: nn.Layer, steps: int = 3) -> list[Any]:
    """Loss, gradients and buffers of some steps of SGD, whose batches differ in their rows."""
    weights = paddle.arange(1.0, 5.0)
    optimizer = paddle.optimizer.SGD(0.05, parameters=model.parameters())
    seen = []
    for step in range(steps):
        x = paddle.to_tensor(np.random.RandomState(step).randn(3 + step % 2, 4).astype("float32"))
        paddle.seed(100 + step)
        loss = (model(x) * weights).square().mean()
        if hasattr(model, "block"):
            loss = loss + getattr(model.block, "note", 0.0)
        loss.backward()
        seen.append(loss.numpy())
        seen += [None if p.grad is None else p.grad.numpy() for p in model.parameters()]
        seen += [buffer.numpy() for _, buffer in model.named_buffers()]
        seen.append(paddle.rand([1]).numpy())
        optimizer.step()
        optimizer.clear_grad()
    return seen


def made(make: Callable[[], nn.Layer]) -> nn.Layer:
    paddle.seed(0)
    np.random.seed(0)
    random.seed(0)
    return make()


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if one is None and other is None:
            continue
        one = np.zeros_like(other) if one is None else one  # of a branch that was not taken
        other = np.zeros_like(one) if other is None else other
        np.testing.assert_allclose(one, other, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_numbers_of_eager_execution(name: str) -> None:
    expected = numbers(made(MODELS[name]))
    model = made(MODELS[name])
    state = random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile_model(model, SPEC, or_eager=name not in ALWAYS_COMPILED)
        assert random.getstate() == state
        found = numbers(model)
    assert_equal(found, expected)


class WithFlag(Base):
    def forward(self, x: Any, times: int = 1) -> Any:
        return self.n(self.l(x)) * times


def test_what_the_model_had_before_its_conversion_is_kept() -> None:
    model = made(Rebinding)
    model.note = paddle.ones([2])
    x, state = paddle.ones([2, 4]), paddle.get_rng_state()
    model(x).sum().backward()
    held = model.count, model.note, model.l.weight.grad.numpy()
    next_one = paddle.rand([1]).numpy()
    paddle.set_rng_state(state)
    compile_model(model, SPEC)
    assert model.count is held[0] and model.note is held[1]
    assert np.array_equal(model.l.weight.grad.numpy(), held[2])
    assert np.array_equal(paddle.rand([1]).numpy(), next_one)


class Times(nn.Layer):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x * self.factor


class TimesTwo(Times):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return super().forward(x) * 2


of_the_module = 1.0


class Settings:
    rate = 1.0

    def __init__(self) -> None:
        self.inner = types.SimpleNamespace(power=1.0)
        self.calls = 0


class Dropping(Base):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.25)
        self.times = Times(1.0)
        self.scale = 1.0
        self.nested = [[1.0]]
        self.settings = Settings()
        enclosed = 1.0

        def last(x: Any) -> Any:
            return x * enclosed

        def enclose(number: float) -> None:
            nonlocal enclosed
            enclosed = number

        self.last, self.enclose = last, enclose

    def forward(self, x: Any) -> Any:
        h = self.times(self.dropout(self.n(self.l(x))) * self.scale)
        h = h * self.nested[0][0] * of_the_module
        self.settings.calls += 1
        return self.last(h) * self.settings.rate * self.settings.inner.power


def add_a_hook(model: Any) -> None:
    model.l.register_forward_post_hook(lambda layer, inputs, output: output * 2)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "n": lambda model: model.__setattr__("n", nn.Tanh()),
    "dropout.p": lambda model: model.dropout.__setattr__("p", 0.75),
    "the hooks of l": add_a_hook,
    "scale": lambda model: model.__setattr__("scale", 3.0),
    "times.factor": lambda model: model.times.__setattr__("factor", 3.0),
    "an item of a list or dict": lambda model: model.nested[0].__setitem__(0, 3.0),
    "rate": lambda model: model.settings.__setattr__("rate", 3.0),
    "power": lambda model: model.settings.inner.__setattr__("power", 3.0),
    "of_the_module": lambda model: globals().update(of_the_module=3.0),
    "a variable of a closure": lambda model: model.enclose(3.0),
    "the class of times": lambda model: model.times.__setattr__("__class__", TimesTwo),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_model_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = paddle.randn([3, 4])
    results = []
    for compiled in (False, True):
        monkeypatch.setitem(globals(), "of_the_module", 1.0)
        model = made(Dropping)
        if compiled:
            compile_model(model, SPEC, or_eager=True)
        for number in range(3):
            if number == 1:
                model.times = Times(1.0)  # what comes later is watched as well
            model(x)
        CHANGES[what](model)
        paddle.seed(1)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            results.append(model(x).numpy())
    assert np.array_equal(*results)
    text = str([str(one.message) for one in found])
    assert f"after '{what}" in text or ("parameters were replaced" in text and what == "n"), text
    assert "Dropping goes on in eager execution" in text


def test_a_change_is_seen_by_each_program() -> None:
    """Also by a Program that is not the first one to be called after it."""
    x = paddle.randn([3, 4])
    model = made(Dropping)
    compile_model(model, SPEC)
    model(x)
    model.scale = 3.0
    model.eval()
    with paddle.no_grad():
        model(x)  # a Program of its own, made after the change
    model.train()
    with pytest.raises(StaticGraphError, match="after 'scale' was changed"):
        model(x)


@contextlib.contextmanager
def counted_comparisons() -> Iterator[list[str]]:
    """A list that gets an entry from each eager run of a compiled forward."""
    count: list[str] = []
    original = CompiledForward.eager

    def eager(*args: Any, **kwargs: Any) -> Any:
        count.append("")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledForward, "eager", eager)
        yield count


def test_when_a_program_is_compared() -> None:
    model = made(WithFlag)
    compile_model(model, SPEC)
    steps = []
    with counted_comparisons() as count:
        for step in range(1, 13):
            model(paddle.ones([3 if step != 5 else 2, 4]))
            if count:
                steps.append(step)
                count.clear()
        model.epoch = 1  # the forward does not read it
        model(paddle.ones([3, 4]))
        assert count == []
        model(paddle.ones([3, 4]), 2)  # another Program
        assert len(count) == 1
        model.eval()
        with paddle.no_grad():
            model(paddle.ones([3, 4]))
            model(paddle.ones([3, 4]))
        assert len(count) == 2
    assert steps == [1, 5, 10]
    trusted = made(WithFlag)
    report = compile_model(trusted, SPEC, verify=False)
    assert str(report).endswith("not compared with eager execution")
    with counted_comparisons() as count:
        trusted(paddle.ones([3, 4]))
    assert count == []


@pytest.mark.skipif(IS_26, reason="to_static of 2.6 is right")
def test_a_write_whose_gradient_is_lost_is_refused_whatever_the_data_show() -> None:
    hidden = functools.partial(planted.Small, planted.RowWrittenInABranch)
    with pytest.raises(StaticGraphError, match=r"'h\[0\] = 0.0' writes to a tensor"):
        compile_model(made(hidden), SPEC)
    half = functools.partial(planted.Small, planted.PartsWritten)
    model = made(half)  # Paddle converts a write of a tensor rightly
    compile_model(model, SPEC)
    assert_equal(numbers(model), numbers(made(half)))


def test_a_refused_program_stays_refused_and_says_where() -> None:
    model = made(BufferTwice)
    compile_model(model, SPEC)
    for _ in range(2):
        with pytest.raises(StaticGraphError, match=r"the parameter '.*' of the Layer '"):
            model(paddle.randn([3, 4]))
    model.forward.rollback()
    model(paddle.randn([3, 4])).sum().backward()


def test_a_comparison_touches_nothing_of_the_users() -> None:
    """Hooks of parameters run for the step alone; the run is that without a comparison."""

    def run(*, verify: bool) -> tuple[dict[str, Any], int]:
        paddle.seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1D(8), nn.Dropout(0.4), nn.Linear(8, 4))
        fired: list[int] = []
        for parameter in model.parameters():
            if not parameter.stop_gradient:
                parameter.register_hook(lambda gradient: fired.append(1))
                parameter._register_backward_hook(lambda *_: fired.append(1))
        compile_model(model, SPEC, verify=verify)
        optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
        for step in range(11):
            x = paddle.to_tensor(np.random.RandomState(step).randn(5, 4).astype("float32"))
            model(x).square().mean().backward()
            if step % 2:  # accumulated over two
                optimizer.step()
                optimizer.clear_grad()
        return values_of(model), len(fired)

    compared, plain = run(verify=True), run(verify=False)
    assert plain[1] > 0
    assert_same_bits(compared, plain)


def test_what_the_comparison_changes_makes_no_further_one() -> None:
    model = made(Dropping)  # whose forward counts in a plain object
    compile_model(model, SPEC)
    with counted_comparisons() as count:
        for _ in range(5):
            model(paddle.ones([3, 4]))
    assert len(count) == 1


settings: dict[str, float] = {"scale": 1.0, "step": 0}


class OfSettings(Base):
    def forward(self, x: Any) -> Any:
        return self.l(x) * settings["scale"]


def test_of_a_dict_of_the_module_the_keys_that_are_read_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made(OfSettings)
    compile_model(model, SPEC)
    with counted_comparisons() as count:
        for step in range(5):
            monkeypatch.setitem(settings, "step", step)
            model(paddle.ones([3, 4]))
    assert len(count) == 1
    monkeypatch.setitem(settings, "scale", 3.0)
    with pytest.raises(StaticGraphError, match="after 'scale' was changed"):
        model(paddle.ones([3, 4]))


def test_an_output_that_is_kept_keeps_no_input_after_the_backward() -> None:
    model = made(OfSettings)
    compile_model(model, SPEC)
    x = paddle.ones([3, 4])
    kept, reference = model(x), weakref.ref(x)
    kept.sum().backward()
    del x
    assert reference() is None


class Weighted(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", paddle.ones([4]))

    def forward(self, x: Any) -> Any:
        return self.l(x) if self.weights is None else self.l(x) * self.weights


OTHER_BUFFERS: dict[str, Callable[[Any], Any]] = {
    "another shape": lambda model: paddle.full([1, 4], 3.0),
    "another dtype": lambda model: paddle.full([4], 3.0, "float64"),
    "a gradient": lambda model: model.l.bias * 2,
    "none": lambda model: None,
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("other", OTHER_BUFFERS)
def test_a_buffer_of_another_kind_ends_the_use_of_the_program(other: str, verify: bool) -> None:
    x, gradients = paddle.randn([3, 4]), []
    for compiled in (False, True):
        model = made(Weighted)
        if compiled:
            compile_model(model, SPEC, or_eager=True, verify=verify)
        model(x)
        model.weights = OTHER_BUFFERS[other](model)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(x).square().mean().backward()
        gradients.append(model.l.bias.grad.numpy())
    assert np.array_equal(*gradients)
    assert "the buffer 'weights' was replaced by something else" in str([w.message for w in found])


def test_an_input_that_is_changed_before_the_backward_is_refused() -> None:
    """As in eager execution; the Program would read the new numbers."""
    model = made(Weighted)
    compile_model(model, SPEC)
    x = paddle.ones([3, 4])
    y = model(x)
    x.add_(paddle.full([4], 9.0))
    with pytest.raises(StaticGraphError, match="input of a compiled model was changed in place"):
        y.sum().backward()


class OfAFlag(Base):
    def forward(self, x: Any, flag: Any = 1) -> Any:
        return self.l(x) * (2.0 if flag is True else 1.0)


class Gated(Base):
    """As at the start of LoRA and ReZero: neither output nor gradients show the flag."""

    def __init__(self) -> None:
        super().__init__()
        zero = nn.initializer.Constant(0.0)
        self.gate, self.other = (
            self.create_parameter([4], default_initializer=zero) for _ in range(2)
        )

    def forward(self, x: Any, flag: Any = 1) -> Any:
        return x + self.l(x) * (2.0 if flag is True else 1.0) * self.gate * self.other


def test_parameters_that_are_zero_hide_nothing() -> None:
    model = made(Gated)
    compile_model(model, SPEC)
    model(paddle.ones([3, 4]), 1)
    with pytest.raises(StaticGraphError, match="output 0 differs"):
        model(paddle.ones([3, 4]), True)
    assert not model.gate.numpy().any()


def test_a_refusal_is_known_as_long_as_the_model_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_fallback, "_members", weakref.WeakKeyDictionary())
    model = made(OfAFlag)
    compile_model(model, SPEC, or_eager=True)
    assert not collective_fallback.has_fallen_back()
    model(paddle.ones([3, 4]), 1)
    with pytest.warns(UserWarning, match="goes on in eager execution"):
        model(paddle.ones([3, 4]), True)
    gc.collect()
    assert collective_fallback.has_fallen_back()
    compile_model(model, SPEC, or_eager=True)  # another Program, which nothing is known against
    assert not collective_fallback.has_fallen_back()


def with_a_refusal_on_one_rank(*, compiled: bool) -> list[Any]:
    """The parameters after four steps; a Program runs in the first one alone."""
    paddle.seed(0)
    model, rank = Dropping(), paddle.distributed.get_rank()
    if compiled:
        compile_model(model, SPEC, or_eager=True)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    step = TrainStep(model, optimizer, loss_fn=lambda model, batch: model(batch).square().mean())
    for number in range(4):
        paddle.seed(10 * number + rank)
        if number == 1 and rank == 1:
            model.scale = 3.0
        step([paddle.randn([3, 4])])
        assert isinstance(model.forward, CompiledForward) is (compiled and number == 0)
    return [parameter.numpy() for parameter in model.parameters()]


def check_a_refusal_on_one_rank_holds_on_all_ranks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = (with_a_refusal_on_one_rank(compiled=one) for one in (False, True))
    assert_equal(found, expected)


test_on_two_ranks = each_on_ranks(check_a_refusal_on_one_rank_holds_on_all_ranks)
