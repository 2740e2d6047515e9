"""`StaticTrainStep` is `TrainStep` in a Program: same numbers, same state, on both Paddles."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

import paddle_recompute
from paddle_recompute import TrainStep, apply_recompute
from paddle_recompute._paddle import memory
from paddle_recompute.app.config import Config
from paddle_recompute.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergenceError,
    PaddleRecomputeError,
    StaticGraphError,
)
from paddle_recompute.static_graph import StaticTrainStep
from paddle_recompute.static_graph._feeds import Feeds
from paddle_recompute.train_step import NOT_UPDATED
from paddle_recompute.train_step.optimizer import build_optimizer
from tests.bfloat16 import needs_bfloat16
from tests.ranks import run_ranks
from tests.static_graph.models import HIDDEN, Stack, static_mode

# Dygraph and Program run the same kernels, but sum gradients and norms in another order; so do a
# batch and its parts. AdamW divides by the root of the second moment, which magnifies the rounding
# of small gradients: parameters move by up to 1e-2 a step here, and differ by a thousandth of it.
SAME_NUMBERS = 2e-5
SAME_PARAMETERS = 1e-4
# The rounding of bfloat16, with 8 bits, on a loss near 1.
BFLOAT16 = 2e-2

FILE = Path(__file__).parents[2] / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml"
FEATURES, LENGTH, BATCH = 6, 3, 8
DTYPE = "strategy.amp_configs.dtype"
BFLOAT16_ON = ["strategy.amp=true", f"{DTYPE}=bfloat16"]
MERGE_TWO = ["strategy.gradient_merge=true", "strategy.gradient_merge_configs.k_steps=2"]
Batch = dict[str, Any]


def config_of(*overrides: str, recompute: bool = True) -> Config:
    return paddle_recompute.load_config(
        FILE,
        [
            f"recompute.enable={str(recompute).lower()}",
            "recompute.checkpoints=['layers.*']",
            "train.learning_rate=1e-2",
            *overrides,
        ],
    )


class Encoder(paddle.nn.Layer):
    """Has what a model can have: buffers, dropout, what is recomputed and what is not."""

    def __init__(self, dropout: float = 0.0, *, buffers: bool = True) -> None:
        super().__init__()
        self.norm = paddle.nn.BatchNorm1D(FEATURES) if buffers else None
        self.entry = paddle.nn.Linear(FEATURES, HIDDEN)
        self.layers = Stack(2, dropout).layers
        self.head = paddle.nn.Linear(HIDDEN, 1)

    def forward(self, x: Any) -> Any:
        if self.norm is not None:
            x = self.norm(x.transpose([0, 2, 1])).transpose([0, 2, 1])
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(axis=1))[:, 0]


def loss_of(model: Any, batch: Batch) -> Any:
    return (model(batch["x"]) - batch["y"]).square().mean()


def batches(steps: int, size: int = BATCH, length: int = LENGTH) -> list[Batch]:
    rng = np.random.default_rng(4)
    return [
        {
            "x": rng.standard_normal((size, length, FEATURES), "float32"),
            "y": rng.standard_normal(size, "float32"),
        }
        for _ in range(steps)
    ]


def parts_of(batch: Batch, cuts: int | Sequence[int]) -> list[Batch]:
    xs, ys = (np.split(batch[name], cuts) for name in ("x", "y"))
    return [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)]


def tensors(batch: Batch) -> Batch:
    return {name: paddle.to_tensor(array) for name, array in batch.items()}


ANY_SHAPE = {
    "x": InputSpec([-1, None, FEATURES], "float32"),
    "y": InputSpec([-1], "float32"),
}


def static_step(
    *overrides: str,
    recompute: bool = True,
    model: Callable[[], Any] = Encoder,
    loss_fn: Callable[[Any, Any], Any] = loss_of,
    seed: int = 11,
    **options: Any,
) -> StaticTrainStep:
    def seeded() -> Any:
        paddle.seed(seed)
        return model()

    return StaticTrainStep(config_of(*overrides, recompute=recompute), seeded, loss_fn, **options)


def in_dygraph(
    config: Config, model: Any, *, more: Sequence[Any] = (), **options: Any
) -> tuple[Any, TrainStep]:
    """The optimizer and the step with which dygraph trains `model`, and `more` parameters."""
    apply_recompute(model, config.recompute)
    optimizer = build_optimizer(config.optimizer, model, config.learning_rate, more)
    step = TrainStep(
        model,
        optimizer,
        clip_grad_norm=config.train.clip_grad_norm,
        accumulate_steps=config.strategy.gradient_merge_configs.k_steps,
        **options,
    )
    return optimizer, step


def dygraph_step(*overrides: str, make: Callable[[], Any] = Encoder) -> tuple[Any, Any, TrainStep]:
    paddle.seed(12)
    model = make()
    return model, *in_dygraph(config_of(*overrides), model, loss_fn=loss_of)


def arrays_of(model: paddle.nn.Layer) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def moments_of(model: paddle.nn.Layer, optimizer: Any) -> dict[str, np.ndarray]:
    """Under the names that a checkpoint gives them."""
    structured = {parameter.name: name for name, parameter in model.named_parameters()}
    return {
        f"{structured[parameter]}:{kind}": tensor.numpy()
        for kind, by_parameter in optimizer._accumulators.items()
        for parameter, tensor in by_parameter.items()
    }


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys() and one
    for name, value in one.items():
        difference = np.abs(np.asarray(value) - np.asarray(other[name]))
        assert difference.max(initial=0) <= tolerance, name


# --------------------------------------------------------------------- the same as in dygraph


class Odd(Encoder):
    """A Layer with two names, one that is frozen, one that is not used."""

    def __init__(self) -> None:
        super().__init__(buffers=False)
        self.again = self.layers[0]
        self.unused = paddle.nn.Linear(2, 2)
        self.entry.weight.stop_gradient = True

    def forward(self, x: Any) -> Any:
        return super().forward(self.again(self.entry(x))[:, :, :FEATURES])


@pytest.mark.parametrize("make", [Encoder, Odd])
def test_steps_are_those_of_dygraph(make: type[Encoder]) -> None:
    overrides = ["train.clip_grad_norm=0.5", "recompute.checkpoints=['layers.1']"]
    model, optimizer, theirs = dygraph_step(*overrides, make=make)
    ours = static_step(*overrides, model=make)
    before = arrays_of(model)
    ours.set_state_dict({"model": before})

    def trains(batch: Batch, tolerance: float = SAME_NUMBERS) -> None:
        expected, got = theirs([tensors(batch)]), ours([batch])
        assert got.loss == pytest.approx(expected.loss, rel=tolerance)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)
        assert got.grad_norm > 0.5 and list(got.seconds) == ["program"]

    first, second, *others = batches(5)
    for batch in others:
        trains(batch)
    state = ours.state_dict()
    assert_same(state["model"], arrays_of(model), SAME_PARAMETERS)
    assert_same(state["optimizer"], moments_of(model, optimizer), SAME_PARAMETERS)
    if make is Encoder:
        assert {"norm._mean", "layers.0.inner.weight"} <= state["model"].keys()
    else:
        assert {"again.inner.weight", "layers.0.inner.weight"} <= state["model"].keys()
        for name in ("unused.weight", "entry.weight"):
            np.testing.assert_array_equal(state["model"][name], before[name])
    # A dygraph run continues in another Program.
    theirs([tensors(first)])
    ours = static_step(*overrides, model=make)
    moved = theirs.state_dict()["optimizer"]  # with marks of what was never updated
    assert any(NOT_UPDATED in name for name in moved)
    ours.set_state_dict({"model": model.state_dict(), "optimizer": moved})
    trains(second)


def test_a_state_put_back_continues_to_the_bit() -> None:
    data = batches(5)
    one = static_step()
    for batch in data[:2]:
        one([batch])
    state = one.state_dict()
    expected = [one([batch]).loss for batch in data[2:]]
    other = static_step()
    other([data[3]])
    other.set_state_dict(state)
    assert [other([batch]).loss for batch in data[2:]] == expected
    assert_same(one.state_dict()["model"], other.state_dict()["model"])


# ------------------------------------------------------------------------------- recompute


def four_steps(recompute: bool, *overrides: str) -> tuple[list[float], StaticTrainStep]:
    step = static_step(*overrides, recompute=recompute, model=lambda: Encoder(0.1))
    results = [step([batch]) for batch in batches(4)]
    return [value for one in results for value in (one.loss, one.grad_norm)], step


@pytest.mark.parametrize("amp", [False, pytest.param(True, marks=needs_bfloat16)])
def test_recompute_changes_no_bit(amp: bool) -> None:
    overrides = BFLOAT16_ON if amp else []
    (plain, plain_step), (recomputed, step) = (four_steps(on, *overrides) for on in (False, True))
    segments = step.explain().segments
    assert [one.name for one in segments] == ["layers.0", "layers.1"]
    assert all(one.num_recomputed for one in segments)
    assert len(set(plain)) == 8 and recomputed == plain
    for section, values in plain_step.state_dict().items():
        assert_same(step.state_dict()[section], values)
        assert {str(one.dtype) for one in values.values()} == {"float32"}
    with pytest.raises(StaticGraphError, match=r"recompute is off .*set recompute\.enable"):
        plain_step.explain()


class Towers(paddle.nn.Layer):
    """None waits for the others, so nothing but the Program says who draws first."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = paddle.nn.Linear(FEATURES, HIDDEN)
        self.towers = paddle.nn.LayerList([Stack(1, 0.3) for _ in range(4)])

    def forward(self, x: Any) -> Any:
        x = self.entry(x)
        return sum(tower(x) for tower in self.towers).mean(axis=[1, 2])


def test_branches_with_dropout_repeat_their_bits_at_every_start() -> None:
    def losses() -> list[float]:
        step = static_step("recompute.checkpoints=['towers.*.layers.*']", model=Towers)
        return [step([batch]).loss for batch in batches(3, size=64)]

    assert losses() == losses()


# ------------------------------------------------------- batches: in parts, of other shapes


def without_buffers() -> Encoder:
    return Encoder(buffers=False)


def test_merged_gradients_are_those_of_the_joined_batch() -> None:
    """Of parts that are not as large as one another; of equal ones: two ranks, merged, below."""
    clip = "train.clip_grad_norm=0.5"
    whole = static_step(clip, model=without_buffers)
    parts = static_step(clip, *MERGE_TWO, model=without_buffers, input_spec=ANY_SHAPE)
    whole.build(batches(1)[0])
    parts.set_state_dict({"model": whole.state_dict()["model"]})
    for batch in batches(3):
        expected, got = whole([batch]), parts(parts_of(batch, [3]))
        assert got.loss == pytest.approx(expected.loss, rel=SAME_NUMBERS)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=SAME_NUMBERS)
    for section, value in whole.state_dict().items():
        assert_same(parts.state_dict()[section], value, SAME_PARAMETERS)


def test_batches_of_other_sizes_and_lengths() -> None:
    data = [*batches(1), *batches(1, 5, 4), *batches(1, 2, 7), *batches(1)]
    variable = static_step(input_spec=ANY_SHAPE)
    model, _, theirs = dygraph_step()
    variable.set_state_dict({"model": model.state_dict()})
    for batch in data:
        got, expected = variable([batch]), theirs([tensors(batch)])
        assert got.loss == pytest.approx(expected.loss, rel=10 * SAME_NUMBERS)


def test_the_number_of_examples_may_be_told() -> None:
    """Two micro-batches of 3 and 5, weighed alike."""
    step = static_step(
        *MERGE_TWO, model=without_buffers, input_spec=ANY_SHAPE, num_examples=lambda _: 1.0
    )
    (batch,) = batches(1)
    one, two = parts_of(batch, [3])
    alone = static_step(model=without_buffers, input_spec=ANY_SHAPE)
    alone.build(one)
    start, losses = alone.state_dict(), []
    for part in (one, two):
        alone.set_state_dict(start)
        losses.append(alone([part]).loss)
    assert step([one, two]).loss == pytest.approx(sum(losses) / 2, rel=SAME_NUMBERS)


# ------------------------------------------------------------------------------------ ranks


RANK_CASES = {"uneven": (False, (3, 5)), "merged": (True, (4, 4))}
Trained = tuple[list[float], dict[str, Any]]


def trained_on_ranks() -> dict[str, Trained]:
    """Steps of one rank with its share of each batch; every rank draws other weights at first."""
    rank = paddle.distributed.get_rank()
    trained = {}
    for name, (merge, (size, _)) in RANK_CASES.items():
        overrides = ["train.clip_grad_norm=0.5", *(MERGE_TWO if merge else [])]
        step = static_step(*overrides, model=without_buffers, input_spec=ANY_SHAPE, seed=11 + rank)
        losses = []
        for batch in batches(3):
            share = parts_of(batch, [size])[rank]
            with static_mode() if merge else contextlib.nullcontext():  # whichever the caller is in
                result = step(parts_of(share, 2) if merge else [share])
            losses += [result.loss, result.grad_norm]
        trained[name] = losses, step.state_dict()
    return trained


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Trained]]:
    return run_ranks(trained_on_ranks, 2, timeout=110)


@pytest.mark.parametrize("case", RANK_CASES)
def test_two_ranks_are_one_process_with_the_joined_batch(
    ranks: list[dict[str, Trained]], case: str
) -> None:
    (losses, state), (others, other_state) = (rank[case] for rank in ranks)
    assert losses == others
    step = static_step("train.clip_grad_norm=0.5", model=without_buffers, input_spec=ANY_SHAPE)
    expected = []
    for batch in batches(3):
        result = step([batch])
        expected += [result.loss, result.grad_norm]
    assert losses == pytest.approx(expected, rel=10 * SAME_NUMBERS)
    for section, value in step.state_dict().items():
        assert_same(state[section], other_state[section])
        assert_same(state[section], value, SAME_PARAMETERS)


# -------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("overrides", "options", "kind", "words"),
    [
        ([*BFLOAT16_ON[:1], f"{DTYPE}=float16"], {}, ConfigError, "received float16"),
        (["recompute.checkpoints=['encoder.*']"], {}, PaddleRecomputeError, "encoder"),
        ([], {"input_spec": {"x": ANY_SHAPE["x"]}}, ConfigError, r"describes \['x'\]"),
        ([], {"loss_fn": lambda model, batch: model(batch["x"])}, ConfigError, "return a scalar"),
        ([], {"num_examples": lambda _: 0.0}, ConfigError, "greater than 0"),
        ([], {"num_examples": lambda _: math.nan}, ConfigError, "greater than 0"),
    ],
    ids=["float16", "pattern", "input_spec", "no scalar", "no examples", "nan examples"],
)
def test_what_is_refused_when_it_is_built(
    overrides: list[str], options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        static_step(*overrides, **options)(batches(1))


@pytest.fixture(scope="module")
def trained() -> StaticTrainStep:
    """A step that has run once."""
    step = static_step()
    step(batches(1))
    return step


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": np.zeros(BATCH, "float64")}, r"\['y'\]: received float64 \[8\]; .* float32 \[8"),
        ({"y": np.zeros(BATCH + 1, "float32")}, r"float32 \[9\]; .* give input_spec with -1"),
        ({"y": np.zeros([BATCH, 1], "float32")}, r"received float32 \[8, 1\]"),
        ({"z": np.zeros(1, "float32")}, r"arrays at \['x'\], \['y'\], \['z'\]; the Program"),
        ({"scale": 2.0}, r"\[2\.0\] beside its arrays"),
    ],
    ids=["dtype", "size", "rank", "structure", "constant"],
)
def test_micro_batches_unlike_the_first(
    trained: StaticTrainStep, arrays: Batch, words: str
) -> None:
    before = trained.state_dict()["model"]
    with pytest.raises(DataError, match=words):
        trained([{**batches(1)[0], **arrays}])
    assert_same(trained.state_dict()["model"], before)


def test_a_constant_of_another_type_is_refused() -> None:
    """True is equal to 1, and a forward may tell them apart."""
    x = np.ones([2, 3], "float32")
    with pytest.raises(DataError, match=r"has \[True\] beside its arrays, .* with \[1\]"):
        Feeds({"x": x, "flag": 1}).arrays({"x": x, "flag": True})


def test_a_loss_that_is_not_finite() -> None:
    step = static_step()
    with pytest.raises(DivergenceError, match="continue from the last checkpoint"):
        step([{**batches(1)[0], "y": np.full(BATCH, np.inf, "float32")}])


def test_a_state_of_another_model(trained: StaticTrainStep) -> None:
    state = trained.state_dict()
    model = state["model"]
    fewer = {name: one for name, one in model.items() if name != "head.bias"}
    wide = np.zeros([HIDDEN + 1, 1], "float32")
    for wrong, words in (
        ({"model": {**fewer, "head.weight": wide}}, "missing in model: head.bias; .* head.weight"),
        ({"model": {**model, "more": wide}}, "unexpected in model: more"),
        (
            {"model": {**model, "entry.weight": model["entry.weight"].T}},
            "of another shape in model: entry.weight",
        ),
        ({**state, "momentum": {"beta": np.zeros(1)}}, "unexpected: momentum"),
    ):
        with pytest.raises(CheckpointError, match=words):
            trained.set_state_dict(wrong)
    assert_same(trained.state_dict()["model"], model)


def test_calls_that_are_refused(trained: StaticTrainStep, monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,), new = batches(1), static_step()
    for ask in (new.state_dict, new.explain):
        with pytest.raises(StaticGraphError, match="not built yet"):
            ask()
    with pytest.raises(StaticGraphError, match="is built already"):
        trained.build(batch)
    with pytest.raises(ConfigError, match=r"got 2 micro-batches; .*k_steps is 1"):
        trained([batch, batch])
    for call in (lambda: trained([batch]), lambda: new.build(batch)):
        with paddle.no_grad(), pytest.raises(ConfigError, match=r"under paddle.no_grad\(\)"):
            call()
    trained([batch])
    monkeypatch.setattr(paddle.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(StaticGraphError, match=r"call paddle\.distributed\.init_parallel"):
        static_step()


def test_a_wrapped_layer_that_hands_its_input_on_is_no_fault() -> None:
    """A pattern that selects dropouts works with a probability of 0, too."""
    nn = paddle.nn
    step = static_step(
        'recompute.checkpoints=["*"]',
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Identity()),
        loss_fn=lambda model, x: model(x).square().mean(),
    )
    step([paddle.ones([2, 4])])
    assert [one.name for one in step.explain().segments] == ["0"]


# -------------------------------------------------------------------------------- what it holds


def held_and_freed() -> tuple[list[int], list[int]]:
    """Bytes while each of three steps is there, and after it."""
    held, freed = [], []
    for _ in range(3):
        step = static_step(
            recompute=False,
            model=lambda: paddle.nn.Linear(500, 500),
            loss_fn=lambda model, x: model(x).square().mean(),
        )
        for _ in range(2):
            step([paddle.ones([8, 500])])
        held.append(memory.current_bytes())
        del step
        gc.collect()
        freed.append(memory.current_bytes())
    return held, freed


def test_three_steps_take_the_memory_of_one() -> None:
    """In a process of its own, where nothing else is freed meanwhile."""
    [(held, freed)] = run_ranks(held_and_freed, 1, fresh=True)
    a_model = 500 * 500 * 4
    assert min(held) > 3 * a_model  # parameters and two moments
    assert max(freed) < a_model / 100
