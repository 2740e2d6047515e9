"""A Program of `StaticTrainStep(model=...)` is compared with dygraph before it is trusted."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional

from paddle_recompute._paddle import memory
from paddle_recompute.app.config import Config
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute import wrapped_layers
from paddle_recompute.static_graph import ProgramCache, StaticTrainStep
from tests import planted_models as planted
from tests.bfloat16 import needs_bfloat16
from tests.distributed.mortal_ranks import results_of
from tests.static_graph.models import IS_26
from tests.static_graph.test_train_step import BFLOAT16_ON, MERGE_TWO, config_of

ROWS, FEATURES, HIDDEN = 3, planted.WIDTH, 8
OTHERS = "does not compute what .* computes in dygraph: "
CANNOT = "cannot be built as a Program: "


def data(seed: int, rows: int = ROWS) -> paddle.Tensor:
    numbers = np.random.RandomState(seed).standard_normal([rows, FEATURES])
    return paddle.to_tensor(numbers.astype("float32"))


def loss_of(model: Any, x: Any) -> Any:
    return (model(x) * (x.sum(axis=1, keepdim=True) + 2.0)).square().mean()


def config(*overrides: str) -> Config:
    return config_of(*overrides, recompute=False)


def small(kind: type[planted.Block]) -> Callable[[], nn.Layer]:
    return functools.partial(planted.Small, kind)


def step_of(
    make: Callable[[], nn.Layer], *overrides: str, **options: Any
) -> tuple[nn.Layer, StaticTrainStep]:
    paddle.seed(0)
    model = make()
    options.setdefault("loss_fn", loss_of)
    return model, StaticTrainStep(config(*overrides), make, model=model, **options)


# ------------------------------------------------------------------------------ wrong Programs


LOST = "writes to a tensor whose gradient is needed.*where, paddle.concat"


def written(line: str) -> str:
    """The words of the refusal of a write."""
    return CANNOT + (".*setitem" if IS_26 else f"'{re.escape(line)}' {LOST}")


WRONG: dict[type[planted.Block], str] = {
    planted.ColumnWritten: written("h[:, :1] = self.number"),
    planted.RowWritten: written("h[0] = 0.0"),
    planted.RowWrittenInABranch: written("h[0] = 0.0"),
    planted.WrittenIntoZeros: written("fixed[:, 0] = h[:, 1]"),
    planted.Assigned: OTHERS if IS_26 else written("paddle.assign(paddle.tanh(h), y)"),
    planted.AddInPlace: f"{OTHERS}the loss differs by .*' of the Layer '",
    planted.ScaleInPlace: f"{OTHERS}the loss differs",
    planted.EarlyReturn: f"{CANNOT}.*bool",
    planted.WeightNormed: f"{OTHERS}the loss differs",
    planted.SpectralNormed: OTHERS,
    planted.Counting: f"{OTHERS}dygraph changes 'block.calls' in every step",
    planted.Remembering: f"{OTHERS}the loss in the step after it differs",
    planted.PlainTensor: f"{OTHERS}the buffer block.mean|{OTHERS}the loss",
    planted.DrawsFromNumPy: f"{OTHERS}its forward draws from Python's random or from NumPy",
    planted.SetsSeed: f"{OTHERS}it draws other random numbers",
    planted.WithPyLayer: f"{CANNOT}.*PyLayer",
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda one: one.__name__)
def test_a_program_that_is_wrong_is_refused_and_nothing_trained(kind: type[planted.Block]) -> None:
    model, step = step_of(small(kind))
    with refused(step, WRONG[kind]):
        step([data(0)])
    assert model.entry.weight.grad is None


@contextlib.contextmanager
def refused(step: StaticTrainStep, words: str) -> Iterator[None]:
    """Inside is a step that is refused; it changes nothing, and so does the next one."""
    before = step.state_dict() if step._built is not None else None
    streams = paddle.get_rng_state()
    with pytest.raises(StaticGraphError, match=words):
        yield
    assert paddle.in_dynamic_mode()
    assert [one.current_seed() for one in streams] == [
        one.current_seed() for one in paddle.get_rng_state()
    ]
    if before is not None:
        assert_equal(step.state_dict(), before)
    with pytest.raises(StaticGraphError):
        step([data(0)])


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for section, arrays in one.items():
        assert arrays.keys() == other[section].keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, other[section][name], err_msg=name)


def test_what_zeros_hide_in_the_first_step_is_found_there() -> None:
    """With a gate of zero the loss does not depend on what is wrong."""

    class Gated(planted.AddInPlace):
        def prepare(self) -> None:
            self.gate = self.create_parameter([1], default_initializer=nn.initializer.Constant(0.0))

        def forward(self, h: Any, x: Any) -> Any:
            return x.sum(axis=1, keepdim=True) + self.gate * super().forward(h, x)

    _, step = step_of(small(Gated))
    with refused(step, f"{OTHERS}the loss"):
        step([data(0)])


def test_without_verify_it_trains_with_the_numbers_of_the_program() -> None:
    _, step = step_of(small(planted.ScaleInPlace), verify=False)
    losses = [step([data(0)]).loss for _ in range(2)]
    assert losses[0] != losses[1]


# ----------------------------------------------------------------------------- right Programs


class Running(planted.Block):
    def prepare(self) -> None:
        self.register_buffer("mean", paddle.zeros([FEATURES]))
        self.register_buffer("hidden", paddle.zeros([FEATURES]), persistable=False)

    def forward(self, h: Any, x: Any) -> Any:
        self.mean = self.mean * 0.9 + h.detach().mean(axis=0)
        self.hidden = self.hidden + self.mean
        return h * self.mean + self.hidden


class Dropped(planted.Block):
    def prepare(self) -> None:
        self.drop = nn.Dropout(0.3)
        self.batch_norm = nn.BatchNorm1D(FEATURES)

    def forward(self, h: Any, x: Any) -> Any:
        return self.drop(functional.gelu(self.batch_norm(h)))


class Shared(planted.WithLinear):
    def prepare(self) -> None:
        super().prepare()
        self.again = self.inner
        self.unused = nn.Linear(2, 2)
        self.inner.bias.stop_gradient = True

    def forward(self, h: Any, x: Any) -> Any:
        return h + self.again(x) * self.inner.weight.sum()


def with_note(model: Any, x: Any) -> Any:
    """The loss reads what the forward of the same micro-batch has left."""
    return loss_of(model, x) + getattr(model.block, "note", 0.0)


RIGHT = [
    *([] if IS_26 else [planted.MaskWritten]),
    planted.Dense, planted.Constants, planted.BatchNormed, planted.Recurrent, planted.Noting,
    planted.Convolved, planted.LayerNormed, Running, Dropped, Shared,
]  # fmt: skip


@pytest.mark.parametrize("kind", RIGHT, ids=lambda one: one.__name__)
def test_a_right_program_trains_as_if_it_were_not_compared(kind: type[planted.Block]) -> None:
    def trained(verify: bool) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
        model, step = step_of(small(kind), loss_fn=with_note, verify=verify)
        before = {name: one.numpy() for name, one in model.state_dict().items()}
        losses = [step([data(number)]).loss for number in range(3)]
        after = {name: one.numpy() for name, one in model.state_dict().items()}
        assert_equal({"model": before}, {"model": after})
        return losses, step.state_dict(), before

    (losses, state, _), (expected, plain, _) = trained(True), trained(False)
    assert losses == expected
    assert_equal(state, plain)


def test_micro_batches_are_compared_together() -> None:
    for kind in (Dropped, planted.Constants):
        _, step = step_of(small(kind), *MERGE_TWO)
        assert step([data(0), data(1)]).loss > 0
    _, step = step_of(small(planted.ScaleInPlace), *MERGE_TWO)
    with pytest.raises(StaticGraphError, match=OTHERS):
        step([data(0), data(1)])


@needs_bfloat16
def test_bfloat16_is_compared_within_its_rounding() -> None:
    _, step = step_of(small(Dropped), *BFLOAT16_ON)
    assert step([data(0)]).loss > 0
    _, step = step_of(small(planted.ScaleInPlace), *BFLOAT16_ON)
    with pytest.raises(StaticGraphError, match=OTHERS):
        step([data(0)])


# ------------------------------------------------------------------------------------ when


def count_comparisons(step: StaticTrainStep, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    done: list[int] = []
    comparison = step._comparison
    assert comparison is not None
    original = comparison.check
    monkeypatch.setattr(comparison, "check", lambda *args: [done.append(1), original(*args)])
    return done


def test_it_is_compared_in_steps_1_and_10_and_at_new_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = paddle.static.InputSpec([-1, FEATURES], "float32")
    _, step = step_of(small(planted.Dense), input_spec=spec)
    done = count_comparisons(step, monkeypatch)
    compared = []
    for number in range(1, 12):
        before = len(done)
        step([data(number, rows=5 if number in (4, 6) else ROWS)])
        if len(done) > before:
            compared.append(number)
    assert compared == [1, 4, 10]


def test_a_sublayer_that_is_replaced_is_noticed() -> None:
    model, step = step_of(small(planted.Dense))
    step([data(0)])
    model.head = nn.Identity()
    with pytest.raises(StaticGraphError, match=OTHERS):
        step([data(1)])


def test_a_frozen_parameter_is_noticed_at_the_next_comparison() -> None:
    model, step = step_of(small(planted.Dense))
    model.entry.weight.stop_gradient = True
    with pytest.raises(StaticGraphError, match=f"{OTHERS}.*entry.weight"):
        step([data(0)])


def test_the_modes_of_the_model_are_those_of_model_fn() -> None:
    """`model` may be evaluated between steps, and left in eval()."""
    model, step = step_of(small(Dropped))
    step([data(0)])
    model.eval()
    step([data(1)])
    assert not model.block.drop.training


# ------------------------------------------------------- under recompute, with a gradient cache


class Deep(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
            for _ in range(6)
        )

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.skipif(not memory.can_reset_peak(), reason="2.6 cannot reset the peak")
def test_under_recompute_the_comparison_keeps_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of the dygraph run is that of a recomputed one, not of a plain one."""
    paddle.seed(0)
    model = Deep()
    step = StaticTrainStep(
        config_of(), Deep, lambda model, x: model(x).square().mean(), model=model
    )
    x = paddle.randn([512, 64])
    step.build(x)
    comparison, peaks = step._comparison, []
    assert comparison is not None
    original = comparison._in_dygraph

    def measured(*args: Any) -> Any:
        held = memory.current_bytes()
        memory.reset_peak()
        run = original(*args)
        peaks.append(memory.peak_bytes() - held)
        return run

    monkeypatch.setattr(comparison, "_in_dygraph", measured)
    step([x])
    held = memory.current_bytes()
    memory.reset_peak()
    model(x).square().mean().backward()
    plain = memory.peak_bytes() - held
    assert not wrapped_layers(model)
    assert max(peaks) < 0.7 * plain


class Words(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, HIDDEN)
        self.norm = nn.BatchNorm1D(HIDDEN)
        self.drop = nn.Dropout(0.2)

    def forward(self, ids: Any) -> Any:
        return self.drop(self.norm(self.words(ids).mean(axis=1)))


class WrongWords(Words):
    def forward(self, ids: Any) -> Any:
        h = super().forward(ids)
        h.scale_(0.5)
        return h + self.words.weight[0]


class Distance(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(2.0))

    def forward(self, one: Any, other: Any) -> Any:
        return ((one - other * 2).square() * self.scale).mean()


@pytest.mark.parametrize("make", [Words, WrongWords])
def test_a_gradient_cache_is_compared_too(make: type[Words]) -> None:
    def step(verify: bool) -> StaticTrainStep:
        paddle.seed(0)
        return StaticTrainStep(
            config(),
            make,
            grad_cache=ProgramCache(Distance(), chunk_size=2),
            model=make(),
            verify=verify,
        )

    ids = np.random.RandomState(0).randint(0, 20, [2, 4, 3])
    one = step(True)
    if make is WrongWords:
        with pytest.raises(StaticGraphError, match=OTHERS):
            one([(ids[0], ids[1])])
        return
    losses = [one([(ids[0], ids[1])]).loss for _ in range(3)]
    plain = step(False)
    assert losses == [plain([(ids[0], ids[1])]).loss for _ in range(3)]
    assert_equal(one.state_dict(), plain.state_dict())


# ----------------------------------------------------------------------------------- ranks


class WrongOnRank1(planted.Block):
    def forward(self, h: Any, x: Any) -> Any:
        h = h * 1.0
        if paddle.distributed.get_rank() == 1:
            h.scale_(0.5)
        return h


def on_ranks() -> list[Any]:
    rank = paddle.distributed.get_rank()
    spec = paddle.static.InputSpec([-1, FEATURES], "float32")
    _, step = step_of(small(Dropped), input_spec=spec)
    found: list[Any] = [step([data(rank + number, 3 + rank * number)]).loss for number in range(3)]
    _, step = step_of(small(Dropped), *MERGE_TWO, input_spec=spec)
    found.append(step([data(rank), data(rank + 2)]).loss)
    _, step = step_of(small(WrongOnRank1), input_spec=spec)
    try:
        step([data(rank)])
    except StaticGraphError as error:
        found.append(str(error))
    return found


def test_ranks_refuse_a_program_together() -> None:
    one, other = results_of(on_ranks)
    assert one[:4] == other[:4]
    assert "the loss differs" in one[4] and "the loss differs" in other[4]
