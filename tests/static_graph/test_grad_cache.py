"""The gradient cache in Programs: the numbers of `GradCache` in dygraph, on both Paddles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import distributed as dist
from paddle.static import InputSpec

from paddle_recompute import ContrastiveLoss, GradCache
from paddle_recompute._paddle import memory
from paddle_recompute.app.config import Config
from paddle_recompute.captured_state import RngState
from paddle_recompute.contrastive import _recomputation_check
from paddle_recompute.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    RecomputeError,
    StaticGraphError,
)
from paddle_recompute.static_graph import ProgramCache, StaticTrainStep
from tests.bfloat16 import needs_bfloat16
from tests.ranks import run_ranks
from tests.static_graph.models import HIDDEN, Stack, peak_above_rest
from tests.static_graph.test_train_step import (
    BFLOAT16,
    BFLOAT16_ON,
    MERGE_TWO,
    assert_same,
    config_of,
    in_dygraph,
)

PAIRS, CHUNK, STEPS, LENGTH, WORDS = 8, 3, 2, 7, 20
Inputs = tuple[Any, ...]


class Encoder(paddle.nn.Layer):
    """Vectors of vectors, with what can go wrong: dropout, and statistics that it changes."""

    def __init__(self, dropout: float = 0.3, *, statistics: bool = False) -> None:
        super().__init__()
        self.layers = Stack(2, dropout).layers
        self.norm = paddle.nn.BatchNorm1D(HIDDEN) if statistics else None

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None else self.norm(x)


class Gated(Encoder):
    """Paddle may compute in the memory of what is detached."""

    def forward(self, x: Any) -> Any:
        h = super().forward(x)
        return h * paddle.nn.functional.sigmoid(h.detach())


class TextEncoder(paddle.nn.Layer):
    """The mean of the vectors of a text's words; 0 is padding."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.words = paddle.nn.Embedding(WORDS, HIDDEN)
        self.layers = Stack(2, dropout).layers

    def forward(self, ids: Any) -> Any:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        mask = (ids != 0).astype("float32").unsqueeze(-1)
        return (x * mask).sum(axis=1) / mask.sum(axis=1)


class Towers(paddle.nn.Layer):
    """Two encoders; the second one may be frozen."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.query, self.positive = Encoder(), Encoder()
        self.layers = self.query.layers  # what the configuration recomputes
        for parameter in self.positive.parameters() if frozen else ():
            parameter.stop_gradient = True


def loss_of(**options: Any) -> ContrastiveLoss:
    return ContrastiveLoss(0.2, normalize=True, **options)


def vectors(step: int, rows: int = PAIRS, inputs: int = 2) -> Inputs:
    rng = np.random.default_rng(step)
    return tuple(rng.standard_normal((inputs, rows, HIDDEN)).astype("float32"))


def texts(step: int, rows: int = PAIRS) -> Inputs:
    rng = np.random.default_rng(step)
    found = []
    for length in (LENGTH, LENGTH - 2):
        ids = rng.integers(1, WORDS, (rows, length))
        for row, end in zip(ids, rng.integers(1, length + 1, rows), strict=True):
            row[end:] = 0
        found.append(ids)
    return tuple(found)


def compared(
    config: Config,
    make: Callable[[], paddle.nn.Layer],
    *,
    batches: Callable[[int], list[Inputs]] = lambda step: [vectors(step)],
    chunk_size: int | None = CHUNK,
    chunk_tokens: int | None = None,
    options: dict[str, Any] | None = None,
    encoders: Callable[[Any], Any] = lambda model: model,
    encode: Any = None,
    input_spec: Any = None,
) -> StaticTrainStep:
    """Train in both modes and compare every number, bit by bit."""
    chunks = {"chunk_size": chunk_size, "chunk_tokens": chunk_tokens}
    paddle.seed(5)
    model, loss, other_loss = make(), loss_of(**options or {}), loss_of(**options or {})
    start = {name: value.numpy() for name, value in model.state_dict().items()}
    cache = GradCache(encoders(model), loss, **chunks)
    _, theirs = in_dygraph(config, model, more=loss.parameters(), grad_cache=cache)
    given = {} if encode is None else {"encode": encode}
    ours = StaticTrainStep(
        config, make, grad_cache=ProgramCache(other_loss, **chunks, **given), input_spec=input_spec
    )
    ours.build(batches(0)[0])
    ours.set_state_dict(
        {"model": {**ours.state_dict()["model"], **start}}
    )  # with the loss's parameters
    rank = dist.get_rank()
    for step in range(STEPS):
        paddle.seed(100 * step + rank)
        expected = theirs([tuple(map(paddle.to_tensor, one)) for one in batches(step)])
        drawn_next = paddle.rand([1]).item()
        paddle.seed(100 * step + rank)
        got = ours(batches(step))
        assert (got.loss, got.grad_norm) == (expected.loss, expected.grad_norm), step
        assert paddle.rand([1]).item() == drawn_next
    state = ours.state_dict()["model"]
    trained = {name: value.numpy() for name, value in model.state_dict().items()}
    trained |= {f"loss/{name}": one.numpy() for name, one in loss.named_parameters()}
    assert_same(state, trained)
    assert any((state[name] != start[name]).any() for name in start)
    return ours


# ------------------------------------------------------------------ the same as in dygraph


TOWERS = {
    "encoders": lambda model: (model.query, model.positive),
    "encode": (
        lambda model, inputs: model.query(inputs),
        lambda model, inputs: model.positive(inputs),
    ),
}
TEXT = InputSpec([-1, -1], "int64")
CLIPPED = "train.clip_grad_norm=0.5"
COMPARED: dict[str, dict[str, Any]] = {
    # Dropout is on: another mask in the second forward would be another gradient.
    "clipping": {"config": config_of(CLIPPED), "options": {"learnable_temperature": True}},
    "chunks of one pair, a loss in tiles": {
        "chunk_size": 1,
        "options": {"tile": 3, "learnable_temperature": True},
    },
    "a detached factor": {"make": Gated},
    "micro-batches, and chunks of more than there is": {
        "config": config_of(*MERGE_TWO),
        "batches": lambda step: [vectors(2 * step), vectors(2 * step + 1)],
        "chunk_size": 100,
    },
    "chunks of tokens": {
        "make": TextEncoder,
        "batches": lambda step: [texts(step)],
        "chunk_size": None,
        "chunk_tokens": 3 * LENGTH,  # each chunk is cut to its longest text
        "input_spec": (TEXT, TEXT),
    },
    "two towers": {"make": Towers, **TOWERS},
    "statistics, without recompute": {
        "config": config_of(CLIPPED, recompute=False),
        "make": lambda: Encoder(statistics=True),
        "chunk_size": 4,
    },
    "a frozen tower": {"make": lambda: Towers(frozen=True), **TOWERS},
    # Another size of the batch needs no other Program.
    "fewer pairs": {"batches": lambda step: [vectors(step, rows=PAIRS - step)]},
}


@pytest.mark.parametrize("name", COMPARED)
def test_every_bit_is_that_of_dygraph_with(name: str) -> None:
    ours = compared(**{"config": config_of(), "make": Encoder, **COMPARED[name]})
    assert "without" in name or all(one.num_recomputed for one in ours.explain().segments)


def on_ranks() -> list[list[float]]:
    """With as many pairs on each rank, and with fewer, so fewer chunks, on the second."""
    rank = dist.get_rank()
    found = []
    for rows in (PAIRS, PAIRS - 3 * rank):
        ours = compared(
            config_of(),
            Encoder,
            batches=lambda step, rows=rows: [vectors(10 * step + rank, rows=rows)],
            options={"learnable_temperature": True},
        )
        found.append([float(np.abs(one).sum()) for one in ours.state_dict()["model"].values()])
    return found


def test_two_ranks_have_the_negatives_of_both() -> None:
    one, other = run_ranks(on_ranks, 2, timeout=110)
    assert one == other and one[0] != one[1]


@needs_bfloat16
def test_bfloat16_is_near_float32_and_recompute_changes_no_bit_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dygraph has no mixed precision on a CPU, so there is nothing to be equal to."""
    # Both forwards of a chunk are in bfloat16: no bit of the second one differs.
    monkeypatch.setattr(_recomputation_check, "REPETITION_TOLERANCE", 0.0)

    def numbers(*overrides: str, recompute: bool = False) -> list[float]:
        step = step_of(overrides, recompute=recompute)
        results = [step([vectors(one)]) for one in range(STEPS)]
        return [number for one in results for number in (one.loss, one.grad_norm)]

    single, mixed = numbers(), numbers(*BFLOAT16_ON)
    assert mixed != single and mixed == pytest.approx(single, rel=5 * BFLOAT16)
    assert numbers(*BFLOAT16_ON, recompute=True) == mixed


# ---------------------------------------------------------------------------------- memory


class Deep(Encoder):
    """Most of its memory is activations, and little of it the vectors."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.layers = Stack(4, 0.1).layers


def peaks_of(rows: int, chunk: int, steps: int) -> Iterator[int]:
    """Of steps after the first one, which makes the moments and the executors."""
    step = StaticTrainStep(
        config_of(recompute=False),
        Deep,
        grad_cache=ProgramCache(loss_of(tile=64), chunk_size=chunk),
    )
    step([vectors(0, rows=rows)])
    for _ in range(steps):
        yield peak_above_rest(lambda: step([vectors(1, rows=rows)]), steps=1)


@pytest.mark.skipif(not memory.can_reset_peak(), reason="2.6 cannot reset the peak")
def test_memory_is_that_of_a_chunk() -> None:
    """A fraction of the whole batch's, though not an eighth: on a CPU an executor's thread frees
    late, up to 0.4 of the whole on a loaded machine, also where the least of eight steps is taken.
    """
    whole = min(peaks_of(512, 512, steps=2))
    assert any(peak < whole / 2 for peak in peaks_of(512, 64, steps=8))


# ---------------------------------------------------------------------------------- faults


def step_of(
    overrides: Sequence[str] = (),
    *,
    recompute: bool = False,
    dropout: float = 0.0,
    loss: paddle.nn.Layer | None = None,
) -> StaticTrainStep:
    def model() -> Encoder:
        paddle.seed(5)
        return Encoder(dropout)

    cache = ProgramCache(loss or loss_of(), chunk_size=CHUNK)
    return StaticTrainStep(config_of(*overrides, recompute=recompute), model, grad_cache=cache)


def test_a_step_that_fails_leaves_neither_update_nor_gradient() -> None:
    expected, failing = step_of(), step_of()
    for step in (expected, failing):
        step([vectors(0)])
    before = failing.state_dict()
    query, positive = vectors(1)
    with pytest.raises(DivergenceError, match="the loss is nan; the parameters were not updated"):
        failing([(np.full_like(query, np.nan), positive)])
    for section, value in failing.state_dict().items():
        assert_same(value, before[section])
    assert failing([vectors(2)]).grad_norm == expected([vectors(2)]).grad_norm


def test_masks_that_are_not_replayed_are_an_error_and_no_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = step_of(dropout=0.5)
    step([vectors(0)])
    before = step.state_dict()
    monkeypatch.setattr(RngState, "restore", lambda self: None)
    with pytest.raises(RecomputeError, match="other values in the second forward of a chunk"):
        step([vectors(1)])
    for section, value in step.state_dict().items():
        assert_same(value, before[section])


class Shifted(ContrastiveLoss):
    """A loss with a parameter of its own that is no temperature."""

    def __init__(self) -> None:
        super().__init__(temperature=0.1, normalize=True)
        half = paddle.nn.initializer.Constant(0.5)
        self.shift = self.create_parameter([1], default_initializer=half)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return super().forward(*inputs, **options) + (self.shift**2).sum()


def test_parameters_of_the_loss_are_not_decayed() -> None:
    step = step_of(["train.weight_decay=0.5", "train.learning_rate=0.01"], loss=Shifted())
    step([vectors(0)])
    shift = float(step.state_dict()["model"]["loss/shift"].item())
    assert abs(shift - (0.5 - 0.01)) < 1e-6  # Adam's first step alone


def test_parameters_of_the_loss_that_are_frozen_later_are_refused() -> None:
    loss = loss_of(learnable_temperature=True)
    step = step_of(loss=loss)
    step([vectors(0)])
    loss.logit_scale.stop_gradient = True
    with pytest.raises(StaticGraphError, match="of the loss were frozen or unfrozen"):
        step([vectors(1)])


def test_parameters_of_a_sublayer_of_the_loss_are_refused() -> None:
    loss = paddle.nn.Layer()
    loss.inner = loss_of(learnable_temperature=True)
    with pytest.raises(ConfigError, match=r"'inner\.logit_scale' is a parameter of a sublayer"):
        step_of(loss=loss)([vectors(0)])


def test_what_does_not_fit_together_is_refused() -> None:
    cache = ProgramCache(loss_of(), chunk_size=CHUNK)
    with pytest.raises(ConfigError, match="received neither of loss_fn and grad_cache"):
        StaticTrainStep(config_of(), Encoder)
    with pytest.raises(ConfigError, match="received both of loss_fn and grad_cache"):
        StaticTrainStep(config_of(), Encoder, lambda *_: None, grad_cache=cache)
    with pytest.raises(ConfigError, match=r"give grad_cache=ProgramCache\(\.\.\.\) instead"):
        StaticTrainStep(config_of("contrastive.chunk_size=4"), Encoder, lambda *_: None)
    with pytest.raises(ConfigError, match="received neither chunk_size nor chunk_tokens"):
        StaticTrainStep(config_of(), Encoder, grad_cache=ProgramCache(loss_of()))([vectors(0)])
    step = step_of()
    step([vectors(0)])
    with pytest.raises(DataError, match=r"built for float32 \[-1, 8\]"):
        step([tuple(one[:, :4] for one in vectors(1))])
    with pytest.raises(DataError, match="query has 8 rows and positive has 7"):
        step([(vectors(1)[0], vectors(1)[1][:7])])
