"""`compile_model`: the bits of eager execution, less memory with recompute, and refusals."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute as fleet_recompute

from paddle_recompute import (
    ContrastiveLoss,
    GradCache,
    RecomputeConfig,
    TrainStep,
    apply_recompute,
    compile_model,
    recompute_wrapper,
)
from paddle_recompute._paddle import memory as _memory
from paddle_recompute._paddle.static.compiled import tables_of_conversions
from paddle_recompute.comparison import runs
from paddle_recompute.errors import ConfigError, StaticGraphError
from tests.ranks import each_on_ranks
from tests.train_step.half_precision import auto_cast

IS_26 = paddle.__version__.startswith("2.6")
only_3 = pytest.mark.skipif(IS_26, reason="to_static of Paddle 2.6 takes no wrapped model")
SPEC = [paddle.static.InputSpec([-1, -1], "int64", "ids")]
# Paddle 2.6 adds the gradients of branches up in another order in a Program; 3.3: bit by bit.
ROUNDING = 2e-6 if IS_26 else 0.0


class Tower(paddle.nn.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = paddle.nn.Linear(width, 4 * width)
        self.down = paddle.nn.Linear(4 * width, width)
        self.dropout = paddle.nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        return x + self.dropout(self.down(paddle.nn.functional.gelu(self.up(x))))


class Model(paddle.nn.Layer):
    """Branches that draw masks each, a Layer that is called twice, others unused and frozen."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.words = paddle.nn.Embedding(50, width)
        self.left = paddle.nn.LayerList([Tower(width) for _ in range(depth)])
        self.right = Tower(width)
        self.unused = paddle.nn.Linear(2, 2)
        self.frozen = paddle.nn.Linear(width, width)
        for parameter in self.frozen.parameters():
            parameter.stop_gradient = True

    def forward(self, ids: Any) -> Any:
        x = self.words(ids)
        left = x
        for layer in self.left:
            left = layer(left)
        right = self.right(x)
        return self.frozen(left * right + self.right(left)).mean(axis=1)


def build(*, wrap: bool, compiled: bool, **size: int) -> Model:
    paddle.seed(3)
    model = Model(**size)
    if wrap:
        apply_recompute(model, RecomputeConfig(checkpoints=["left.*", "right"]))
    if compiled:
        assert compile_model(model, SPEC).compiled
    return model


def trained(*, wrap: bool, compiled: bool, cached: bool) -> dict[str, Any]:
    """Losses and norms of some steps with texts of different lengths, and the parameters."""
    import paddle.distributed as dist

    model = build(wrap=wrap, compiled=compiled)
    optimizer = paddle.optimizer.Momentum(1e-2, parameters=model.parameters())
    options: dict[str, Any] = {"loss_fn": lambda model, batch: model(batch[0]).square().mean()}
    if cached:
        loss = ContrastiveLoss(
            temperature=0.1, negatives="global" if dist.get_world_size() > 1 else "local"
        )
        options = {"grad_cache": GradCache(model, loss, chunk_size=2)}
    step = TrainStep(model, optimizer, accumulate_steps=2, clip_grad_norm=0.5, **options)
    ids = np.random.RandomState(dist.get_rank())
    figures = []
    for number in range(2):
        paddle.seed(100 * number + dist.get_rank())
        batch = [
            tuple(paddle.to_tensor(ids.randint(0, 50, (4, 5 + number))) for _ in range(2))
            for _ in range(2)
        ]
        result = step(batch)
        figures.append((result.loss, result.grad_norm))
    model.eval()
    with paddle.no_grad():
        vectors = model(batch[0][0]).numpy()
    return {
        "figures": figures,
        "vectors": vectors,
        "parameters": {name: p.numpy() for name, p in model.named_parameters()},
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["figures"], expected["figures"], rtol=ROUNDING)
    np.testing.assert_allclose(found["vectors"], expected["vectors"], rtol=0, atol=ROUNDING)
    for name, value in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], value, rtol=0, atol=ROUNDING)


def check_the_numbers_of_eager_execution() -> None:
    """Without recompute; the compiled model is recomputed where Paddle can do that."""
    for cached in (False, True):
        plain = trained(wrap=False, compiled=False, cached=cached)
        assert_same(trained(wrap=not IS_26, compiled=True, cached=cached), plain)


test_on_two_ranks = each_on_ranks(check_the_numbers_of_eager_execution)


def peak_of(model: paddle.nn.Layer, step: Callable[[], Any]) -> int:
    """Bytes of a step above what was there before, the least of several steps.

    A thread of Paddle's executor frees tensors; on a busy machine it is late.
    """
    peaks = []
    for _ in range(6):
        gc.collect()
        before = _memory.current_bytes()
        _memory.reset_peak()
        step()
        peaks.append(_memory.peak_bytes() - before)
        model.clear_gradients()
    return min(peaks[1:])


@only_3
def test_recompute_saves_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """While each step is compared with eager execution, which is recomputed as well."""
    peaks = []
    for wrap in (False, True):
        monkeypatch.setattr(runs, "STEPS", range(1, 7) if wrap else ())
        model = build(wrap=wrap, compiled=True, width=32, depth=6)
        ids = paddle.ones([32, 64], "int64")
        peaks.append(peak_of(model, lambda m=model, x=ids: m(x).square().mean().backward()))
    assert peaks[1] < 0.65 * peaks[0]


# --------------------------------------------------------------------------------------- refusals


class Unconvertible(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.linear(x) * max(x.flatten().tolist())


class CallingFleet(Unconvertible):
    def forward(self, x: Any) -> Any:
        return fleet_recompute(self.linear, x)


class Two(Unconvertible):
    def forward(self, x: Any) -> Any:
        h = self.linear(x) * 2
        return h, h * 3


class InPlaceBuffer(Unconvertible):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", paddle.zeros([1]))

    def forward(self, x: Any) -> Any:
        self.calls.add_(paddle.ones([1]))
        return self.linear(x) * self.calls


class WhileLoop(Unconvertible):
    def forward(self, x: Any) -> Any:
        number = paddle.zeros([], "int32")
        while number < paddle.shape(x)[0]:
            x = self.linear(x)
            number = number + 1
        return x


class OverSize(Unconvertible):
    def forward(self, x: Any) -> Any:
        for _ in range(x.shape[0]):
            x = self.linear(x)
        return x


class OverRows(Unconvertible):
    """A sum: with rows that are put into a list, Paddle 3.3.1 gives no gradient, says nothing, and
    crashes at times while it converts them (SIGSEGV in ``paddle.stack``).
    """

    def forward(self, x: Any) -> Any:
        total = self.linear(x[0])
        for row in x:
            total = total + self.linear(row)
        return total


ROWS = [paddle.static.InputSpec([-1, 4], "float32")]
IN_PLACE = r"its forward calls add_\(\), which changes nothing in a Program"
LOOP = "has a loop over tensors.*compile: auto"  # Paddle's own error comes in the backward, if ever
REFUSED = {
    Unconvertible: "cannot convert Unconvertible: ",
    Two: "returns 2 tensors",
    InPlaceBuffer: IN_PLACE,
    WhileLoop: LOOP,
    OverSize: LOOP,
    OverRows: LOOP,
}
if not IS_26:  # which takes no wrapped model at all
    REFUSED[CallingFleet] = "calls fleet's recompute"


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_a_model_that_cannot_be_converted_goes_on_in_eager_execution(
    make: type[Unconvertible],
) -> None:
    paddle.seed(0)
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Paddle's, of operators in place
        with pytest.raises(StaticGraphError, match=REFUSED[make]):
            compile_model(model, ROWS)
        report = compile_model(model, ROWS, or_eager=True)
    assert not report.compiled and "eager execution goes on" in str(report)
    paddle.seed(0)
    plain = make()
    for one in (model, plain):
        x = paddle.ones([3, 4])
        x.stop_gradient = False  # or fleet's recompute loses the gradients of the weights
        found = one(x)
        (found[1] if isinstance(found, tuple) else found).sum().backward()
    assert np.array_equal(model.linear.weight.grad.numpy(), plain.linear.weight.grad.numpy())


@pytest.mark.skipif(IS_26, reason="2.6 has no such tables")
def test_a_conversion_that_fails_leaves_nothing_for_a_program_at_its_address() -> None:
    class Fails(paddle.nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            y[0] = 0.0
            raise ValueError("no Program")

    before = [{*table} for table in tables_of_conversions()]
    for _ in range(3):
        with pytest.raises(StaticGraphError, match="no Program"):
            compile_model(Fails(4, 4), ROWS)
    assert [{*table} for table in tables_of_conversions()] == before


@pytest.mark.skipif(not IS_26, reason="Paddle 3.3 recomputes in the Program")
def test_a_wrapped_model_on_2_6_is_not_converted() -> None:
    model = build(wrap=True, compiled=False)
    assert "Paddle 2.6 cannot recompute there" in compile_model(model, SPEC, or_eager=True).reason
    assert model(paddle.ones([2, 3], "int64")).shape == [2, 16]


def test_a_program_that_no_longer_fits_its_model_is_refused() -> None:
    model = build(wrap=False, compiled=True)
    ids = paddle.ones([2, 3], "int64")
    model(ids)
    model.right.up.weight.stop_gradient = True
    with pytest.raises(StaticGraphError, match="replaced, frozen or unfrozen"):
        model(ids)
    model.eval()
    with paddle.no_grad():
        model(ids)
    model.train()
    model.forward.rollback()
    compile_model(model, SPEC)
    model(ids).sum().backward()
    assert model.right.up.weight.grad is None and model.right.down.weight.grad is not None


def test_a_mode_that_the_program_does_not_know_is_refused() -> None:
    """The Program for evaluation has no backward, and no Program looks at the flags again."""
    model = build(wrap=False, compiled=True)
    ids = paddle.ones([2, 3], "int64")
    model(ids)
    model.right.dropout.eval()
    with pytest.raises(StaticGraphError, match="a sublayer of it was put into"):
        model(ids)
    model.eval()
    with pytest.raises(StaticGraphError, match=r"called in eval\(\) with gradients on"):
        model(ids)
    model.right.dropout.train()
    with paddle.no_grad(), pytest.raises(StaticGraphError, match="a sublayer of it was put into"):
        model(ids)
    model.train()
    model(ids).sum().backward()
    evaluated = build(wrap=False, compiled=False)
    evaluated.eval()
    with pytest.raises(ConfigError, match=r"the model is in eval\(\)"):
        compile_model(evaluated, SPEC)


def test_another_precision_than_that_of_the_program_is_refused() -> None:
    model = build(wrap=False, compiled=True)
    with auto_cast(dtype="bfloat16"), pytest.raises(StaticGraphError, match="another mixed prec"):
        model(paddle.ones([2, 3], "int64"))
    with auto_cast(dtype="bfloat16", custom_black_list={"matmul", "matmul_v2"}):
        model = build(wrap=False, compiled=True)
        model(paddle.ones([2, 3], "int64"))
    with auto_cast(dtype="bfloat16"), pytest.raises(StaticGraphError, match="another mixed prec"):
        model(paddle.ones([2, 3], "int64"))


def test_a_copy_is_refused() -> None:
    """Paddle's own runs the Program of the original."""
    model = build(wrap=False, compiled=True)
    with pytest.raises(StaticGraphError, match="a compiled model cannot be copied"):
        copy.deepcopy(model)
    model.forward.rollback()
    other = copy.deepcopy(model)
    for one in (model, other):
        compile_model(one, SPEC)
        one(paddle.ones([2, 3], "int64")).sum().backward()
    for one, its_copy in zip(model.parameters(), other.parameters(), strict=True):
        assert one is not its_copy
        assert (one.grad is None) == (its_copy.grad is None)


def test_models_that_are_not_compiled_as_they_are() -> None:
    model = build(wrap=False, compiled=True)
    model(paddle.ones([2, 3], "int64"))
    assert model.forward.get_traced_count() == 1
    with pytest.raises(ConfigError, match="compiled already"):
        compile_model(model, SPEC)
    with pytest.raises(ConfigError, match="recomputed as a whole"):
        compile_model(recompute_wrapper(Tower(4)), ROWS)
