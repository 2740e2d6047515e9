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
    planted.RowWrittenInABranch: written("h[0] = 0.0"),
    planted.WrittenIntoZeros: written("fixed[:, 0] = h[:, 1]"),
    planted.Assigned: OTHERS if IS_26 else written("paddle.assign(paddle.tanh(h), y)"),
    planted.AddInPlace: f"{OTHERS}the loss differs by .*' of the Layer '",
    planted.ScaleInPlace: f"{OTHERS}the loss differs",
    planted.EarlyReturn: f"{CANNOT}.*bool",
    planted.WeightNormed: f"{OTHERS}the loss differs",
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


# ----------------------------------------------------------------------------- right Programs


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
    planted.BufferAssigned, planted.Dropped, Shared,
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


@pytest.mark.parametrize("overrides", [MERGE_TWO, pytest.param(BFLOAT16_ON, marks=needs_bfloat16)])
def test_micro_batches_and_bfloat16_are_compared(overrides: list[str]) -> None:
    batches = [data(number) for number in range(2 if overrides is MERGE_TWO else 1)]
    for kind in (planted.Dropped, planted.Constants):
        _, step = step_of(small(kind), *overrides)
        assert step(batches).loss > 0
    _, step = step_of(small(planted.ScaleInPlace), *overrides)
    with pytest.raises(StaticGraphError, match=OTHERS):
        step(batches)
    _, step = step_of(small(planted.ScaleInPlace), *overrides, verify=False)
    assert step(batches).loss > 0


class Scaled(nn.Sequential):
    """A small model; the gradient of its first Layer is multiplied by `factor`."""

    def __init__(self, factor: float) -> None:
        super().__init__(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
        self.factor = factor

    def forward(self, x: Any) -> Any:
        h = self[0](x)
        return self[2](self[1](h * self.factor + (h * (1 - self.factor)).detach()))


@needs_bfloat16
def test_in_bfloat16_a_gradient_that_is_wrong_by_a_tenth_is_found() -> None:
    """It is less than what bfloat16 rounds; the Program without mixed precision shows it."""
    model, step = step_of(lambda: Scaled(1.0), *BFLOAT16_ON)
    step([data(0)])
    model, step = step_of(lambda: Scaled(1.1), *BFLOAT16_ON)
    model.factor = 1.0
    with pytest.raises(StaticGraphError, match=f"{OTHERS}the gradient .*'0.bias'.* by 9.*e-02"):
        step([data(0)])


@needs_bfloat16
def test_in_bfloat16_both_programs_start_from_the_same_statistics() -> None:
    _, step = step_of(lambda: nn.Sequential(nn.BatchNorm1D(FEATURES), Scaled(1.0)), *BFLOAT16_ON)
    step([data(0)])


@needs_bfloat16
def test_a_gradient_that_is_missing_in_bfloat16_alone_is_found() -> None:
    def loss_of_one(model: Any, x: Any) -> Any:
        model.factor = 0.0 if not built else 1.0
        built.append(model)
        return loss_of(model, x)

    built: list[Any] = []
    _, step = step_of(lambda: Scaled(1.0), *BFLOAT16_ON, loss_fn=loss_of_one)
    with pytest.raises(StaticGraphError, match=f"{OTHERS}the gradient .*'0.bias'"):
        step([data(0)])
    assert len(built) > 2


# ------------------------------------------------------------------------------------ when


def test_it_is_compared_in_steps_1_and_10_and_at_new_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = paddle.static.InputSpec([-1, FEATURES], "float32")
    _, step = step_of(small(planted.Dense), input_spec=spec)
    compared: list[int] = []
    original = step._comparison.check
    monkeypatch.setattr(
        step._comparison, "check", lambda *args: [compared.append(number), original(*args)]
    )
    for number in range(1, 12):
        step([data(number, rows=5 if number in (4, 6) else ROWS)])
    assert compared == [1, 4, 10]


rate = 1.0  # of the loss below

CHANGES: dict[str, tuple[int, Callable[[Any], None]]] = {
    "a sublayer is replaced": (1, lambda model: setattr(model, "head", nn.Identity())),
    "a parameter is frozen": (1, lambda model: setattr(model.entry.weight, "stop_gradient", True)),
    "it was frozen before": (0, lambda model: setattr(model.entry.weight, "stop_gradient", True)),
    "the loss reads another number": (1, lambda model: globals().update(rate=2.0)),
}
"""After how many steps which change is made."""


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_model_or_loss_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "rate", 1.0)
    steps, change = CHANGES[what]
    model, step = step_of(small(planted.Dense), loss_fn=lambda m, x: loss_of(m, x) * rate)
    for number in range(steps):
        step([data(number)])
    change(model)
    with pytest.raises(StaticGraphError, match=f"{OTHERS}.*{'entry' * ('frozen' in what)}"):
        step([data(steps)])


def test_the_modes_of_the_model_are_those_of_model_fn() -> None:
    """`model` may be evaluated between steps, and left in eval()."""
    model, step = step_of(small(planted.BatchNormed))
    step([data(0)])
    model.eval()
    step([data(1)])
    assert not model.block.inner.training


# ------------------------------------------------------- under recompute, with a gradient cache


def test_under_recompute_dygraph_recomputes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the comparison keeps the peak; afterwards the model is as it was."""

    def make() -> nn.Layer:
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU())

    model, step = step_of(make, "recompute.enable=true", "recompute.checkpoints=['0']")
    step.build(data(0))
    wrapped, original = [], step._comparison._in_dygraph

    def watched(*args: Any) -> Any:
        wrapped.append([*wrapped_layers(model)])
        return original(*args)

    monkeypatch.setattr(step._comparison, "_in_dygraph", watched)
    step([data(0)])
    assert wrapped and all(names == ["0"] for names in wrapped)
    assert not wrapped_layers(model)


class Words(nn.Layer):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.words = nn.Embedding(20, HIDDEN)
        self.norm = nn.BatchNorm1D(HIDDEN)
        self.drop = nn.Dropout(0.2)
        self.factor = factor

    def forward(self, ids: Any) -> Any:
        h = self.drop(self.norm(self.words(ids).mean(axis=1)))
        h.scale_(self.factor)
        return h + self.words.weight[0]


class Distance(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(2.0))

    def forward(self, one: Any, other: Any) -> Any:
        return ((one - other * 2).square() * self.scale).mean()


def test_a_gradient_cache_is_compared_too() -> None:
    def step(verify: bool, factor: float = 1.0) -> StaticTrainStep:
        cache = ProgramCache(Distance(), chunk_size=2)
        make = functools.partial(Words, factor)
        return step_of(make, loss_fn=None, grad_cache=cache, verify=verify)[1]

    batch = tuple(np.random.RandomState(0).randint(0, 20, [2, 4, 3]))
    wrong = step(True, 0.5)
    with pytest.raises(StaticGraphError, match=OTHERS):
        wrong([batch])
    one = step(True)
    losses = [one([batch]).loss for _ in range(3)]
    plain = step(False)  # which seeds again
    assert losses == [plain([batch]).loss for _ in range(3)]
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
    _, step = step_of(small(planted.Dropped), input_spec=spec)
    found: list[Any] = [step([data(rank + number, 3 + rank * number)]).loss for number in range(2)]
    _, step = step_of(small(planted.Dropped), *MERGE_TWO, input_spec=spec)
    found.append(step([data(rank), data(rank + 2)]).loss)
    _, step = step_of(small(WrongOnRank1), input_spec=spec)
    try:
        step([data(rank)])
    except StaticGraphError as error:
        found.append(str(error))
    return found


def test_ranks_refuse_a_program_together() -> None:
    one, other = results_of(on_ranks)
    assert one[:3] == other[:3]
    assert "the loss differs" in one[3] and "the loss differs" in other[3]
