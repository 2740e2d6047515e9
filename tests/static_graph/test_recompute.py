"""The pass changes no number: every gradient is that of the plain Program, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute._paddle import memory
from paddle_recompute.recompute import keep, recompute_wrapper
from paddle_recompute.static_graph import mark_checkpoint, minimize
from tests.ranks import run_ranks
from tests.static_graph.models import (
    BATCH,
    HIDDEN,
    IS_26,
    Block,
    Run,
    assert_recompute_changes_nothing,
    building,
    copies,
    data,
    marked_stack,
    needs_old_ir,
    needs_pir,
    peak_above_rest,
    strategy_of,
    train,
)

Linear, functional = paddle.nn.Linear, paddle.nn.functional


def mark(*values: Any) -> Any:
    """Mark each with a name of its own; returns the last."""
    for number, value in enumerate(values):
        num_operators = len(value.block.program.global_block().ops)
        mark_checkpoint(value, f"after_{num_operators}_{number}")
    return values[-1]


# --------------------------------------------------------------------------- the ordinary case


def test_every_operator_of_a_block_runs_again_except_its_random_ones() -> None:
    run = train(marked_stack, ())
    first, *_, last = run.report.segments
    assert [segment.name for segment in run.report.segments] == [f"layers.{i}" for i in range(3)]
    # 2 matmuls, 2 biases, gelu, 2 dropouts, the residual; the norm's output is the checkpoint,
    # but 2.6 wants its mean and variance.
    assert first.num_recomputed == last.num_recomputed == (9 if IS_26 else 8)
    assert first.crossing == 1 and first.crossing_bytes == BATCH * HIDDEN * 4
    again = copies(marked_stack)
    assert again["matmul_v2" if IS_26 else "matmul"] == again["dropout_grad"] == 3 * 2
    assert not again["dropout"]


@needs_old_ir  # variables of PIR have no names
def test_variable_names_are_checkpoints_too_as_in_paddles_own_strategy() -> None:
    names: list[str] = []

    def build() -> Any:
        x = data()
        names.clear()
        for _ in range(2):
            x = Block()(x)
            names.append(x.name)
        return linear(x).square().mean()

    run = assert_recompute_changes_nothing(build, names)
    assert [segment.name for segment in run.report.segments] == names


def deep() -> Any:
    x = data(shape=(256, 64))
    for index in range(8):
        hidden = functional.gelu(Linear(64, 256)(x))
        x = x + functional.dropout(Linear(256, 64)(hidden), 0.1)
        x = mark_checkpoint(functional.layer_norm(x, [64]), f"layers.{index}")
    return x.square().mean()


def peak_of(recompute: bool) -> int:
    """Peak of a step in bytes: on 3.3 the smallest of twenty, above what was there before it.

    Operators this small end in another order each time, so single peaks scatter by a third.
    """
    with building() as main:
        minimize(paddle.optimizer.SGD(1e-3), deep(), strategy_of(() if recompute else None))
        with paddle.static.scope_guard(paddle.static.Scope()):
            executor = paddle.static.Executor()
            executor.run(paddle.static.default_startup_program())

            def step() -> None:
                executor.run(main, feed={"x": np.ones([256, 64], "float32")})

            step()
            if memory.can_reset_peak():
                return peak_above_rest(step, steps=20)
            step()
            return memory.peak_bytes()


def test_memory_falls_under_the_default_executor() -> None:
    """Only if the copies wait for their gradient: without the tie the peak is the plain one."""

    if memory.can_reset_peak():
        assert peak_of(True) < 0.6 * peak_of(False)
        return
    # A process of its own for each; the executor frees late on a loaded machine.
    plain = run_ranks(peak_of, 1, recompute=False)[0]
    assert any(run_ranks(peak_of, 1, recompute=True)[0] < 0.5 * plain for _ in range(8))


# ------------------------------------------------------------------------------- odd graphs

Build = Callable[[], Any]
FEEDS: dict[str, Any] = {}
GRAPHS: list[Build] = []
"""What tests/fuzz/static_programs.py does not draw."""


def graph(times: int = 2, shape: Sequence[int] = (BATCH, HIDDEN)) -> Any:
    """What a function returns for the checkpoint before it is the next one, `times` times."""

    def register(block: Callable[[Any], Any]) -> Build:
        def build() -> Any:
            x = data(shape=shape)
            for _ in range(times):
                x = mark(block(x))
            return x.square().mean()

        build.__name__ = block.__name__
        if tuple(shape) != (BATCH, HIDDEN):
            fed = [BATCH if length < 0 else length for length in shape]
            FEEDS[block.__name__] = lambda random: {"x": random.randn(*fed).astype("float32")}
        GRAPHS.append(build)
        return build

    return register


def whole(build: Build) -> Build:
    """A graph that is built at once."""
    GRAPHS.append(build)
    return build


def linear(x: Any) -> Any:
    return Linear(HIDDEN, HIDDEN)(x)


@graph(shape=(BATCH, 6, HIDDEN))
def transformer(x: Any) -> Any:
    return paddle.nn.TransformerEncoderLayer(HIDDEN, 2, 2 * HIDDEN, dropout=0.1)(x)


@graph()
def dropout_along_an_axis(x: Any) -> Any:
    return functional.gelu(functional.dropout(linear(x), 0.4, axis=1)) + x


@whole
def checkpoint_among_several_results() -> Any:
    x = data()
    for _ in range(2):
        a, b, rest = paddle.split(paddle.tanh(Linear(HIDDEN, 3 * HIDDEN)(x)), 3, axis=-1)
        mark(a, b)
        x = Linear(2 * HIDDEN, HIDDEN)(paddle.concat([functional.gelu(a * b), rest], -1)) + x
    return mark(paddle.tanh(linear(x))).square().mean()


@graph()
def branch_inside(x: Any) -> Any:
    hidden = functional.gelu(linear(x))
    branched = paddle.static.nn.cond(
        hidden.mean() > 0, lambda: paddle.exp(hidden * 0.1), lambda: hidden * 3
    )
    return paddle.tanh(linear(branched)) + x


@whole
def embedding_first() -> Any:
    ids = paddle.static.data("ids", [BATCH, 5], "int64")
    table = paddle.nn.Embedding(11, HIDDEN)
    x = table(ids)
    for _ in range(2):
        x = mark(functional.dropout(functional.gelu(linear(x)), 0.1) + x)
    return paddle.matmul(x, table.weight, transpose_y=True).square().mean()


FEEDS["embedding_first"] = lambda random: {"ids": random.randint(0, 11, [BATCH, 5]).astype("int64")}


@graph(shape=(-1, HIDDEN))
def unknown_batch(x: Any) -> Any:
    return Block()(x)


@graph()
def weight_arithmetic(x: Any) -> Any:
    """Operators that take nothing but parameters."""
    weight = Linear(HIDDEN, HIDDEN).weight
    scale = paddle.rsqrt(weight.square().sum(0, keepdim=True) + 1e-6)
    return functional.gelu(paddle.matmul(x, weight * scale)) + x


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
def test_odd_graph(build: Build) -> None:
    assert_recompute_changes_nothing(build, feeds=FEEDS.get(build.__name__))


@needs_pir
def test_what_a_branch_uses_is_not_computed_again() -> None:
    """The branch's own backward takes the original, so a second one would only cost memory."""
    again = copies(branch_inside)
    assert again and "gelu" not in again and "if" not in again


@needs_pir
def test_what_an_unknown_operator_takes_is_kept() -> None:
    """It could return its operand's memory without saying so."""
    from paddle_recompute.recompute.program.pir.aliasing import Memory

    with building() as program:
        taken, other = paddle.tanh(data()), paddle.exp(data("other"))
        paddle.static.Print(taken)
        memory_of = Memory(program.global_block().ops)
        assert memory_of.is_shared(taken) and not memory_of.is_overwritten(taken)
        assert not memory_of.is_shared(other)


@needs_pir
def test_a_warning_beside_control_flow_describes_what_has_no_shape(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a cond or while leaves for its backward is a stack (``cf.stack_create``)."""
    with building():
        hidden = paddle.tanh(linear(data()))
        small = mark(paddle.tanh(hidden).mean())
        branched = paddle.static.nn.cond(
            hidden.mean() > 0, lambda: paddle.exp(hidden), lambda: hidden * 3
        )
        minimize(paddle.optimizer.SGD(0.1), (branched * small).mean(), strategy_of([]))
    assert "stack_create[...]" in caplog.text


# ------------------------------------------------- running statistics, and draws inside of a Layer

IMAGES = (BATCH, 3, 6, 6)


def shifted_images(random: np.random.RandomState) -> dict[str, np.ndarray]:
    return {"x": (random.randn(*IMAGES) * 3 + 1).astype("float32")}


def own_norms() -> Any:
    """Blocks of convolution, norm and ReLU, twice in each block."""
    x = data(shape=IMAGES)
    for number in range(2):
        for _ in range(2):
            x = functional.relu(paddle.nn.BatchNorm2D(3)(paddle.nn.Conv2D(3, 3, 3, padding=1)(x)))
        x = mark_checkpoint(x, f"blocks.{number}")
    return x.square().mean()


def one_norm_called_many_times() -> Any:
    norm, x = paddle.nn.BatchNorm2D(3), data(shape=IMAGES)
    for number in range(2):
        x = paddle.nn.Conv2D(3, 3, 3, padding=1)(norm(x))
        x = mark_checkpoint(functional.relu(norm(x)), f"blocks.{number}")
    return x.square().mean()


def norm_in_eval() -> Any:
    x, norm = data(shape=IMAGES), paddle.nn.BatchNorm2D(3)
    norm.eval()
    for number in range(2):
        x = norm(paddle.nn.Conv2D(3, 3, 3, padding=1)(x))
        x = mark_checkpoint(functional.gelu(x), f"blocks.{number}")
    return x.square().mean()


def statistics_read() -> Any:
    x, norm = data(shape=IMAGES), paddle.nn.BatchNorm2D(3)
    for number in range(2):
        x = norm(paddle.nn.Conv2D(3, 3, 3, padding=1)(x))
        x = mark_checkpoint(functional.gelu(x) * norm._mean.sum(), f"blocks.{number}")
    return x.square().mean()


@pytest.mark.parametrize(
    ("build", "statistics"),
    [
        (own_norms, 8),
        (one_norm_called_many_times, 2),
        (norm_in_eval, None),
        (statistics_read, None),
    ],
)
def test_a_batch_norm_leaves_its_running_statistics(build: Build, statistics: int | None) -> None:
    run = assert_recompute_changes_nothing(build, feeds=shifted_images)
    if statistics is not None:  # the norm runs again, and its means and variances were compared
        assert not any("batch_norm" in name for name in kept(run)), kept(run)
        moved = [name for name in run.parameters if name.endswith(("w_1", "w_2"))]
        assert len(moved) == statistics


def kept(run: Run) -> set[str]:
    return {name.removeprefix("pd_op.") for part in run.report.segments for name in part.kept_ops}


@pytest.mark.parametrize(
    ("kind", "dropout"),
    [(paddle.nn.LSTM, 0.0), (paddle.nn.LSTM, 0.5), (paddle.nn.GRU, 0.5)],
)
def test_a_recurrent_layer_runs_again_where_it_draws_nothing(kind: Any, dropout: float) -> None:
    """Final states are in the memory of a list that cannot be computed again (3.3): a copy that
    took one from there would be overwritten.
    """

    def build() -> Any:
        x = data(shape=(BATCH, 6, HIDDEN))
        for number in range(2):
            norm = paddle.nn.LayerNorm(HIDDEN)
            out, states = kind(HIDDEN, HIDDEN, num_layers=2, dropout=dropout)(x)
            last = states[0] + states[1] if kind is paddle.nn.LSTM else states
            last = paddle.exp(last) * paddle.tanh(last)
            x = mark_checkpoint(norm(x + out + last.sum(0).unsqueeze(1)), f"layers.{number}")
        return x.square().mean()

    run = assert_recompute_changes_nothing(build, feeds=FEEDS["transformer"])
    assert ("rnn" in kept(run)) == bool(dropout)


# ------------------------------------------------------------------- parts of Layers, and to_static
# Paddle's own executor writes over what was detached (``fixed = h.detach(); exp(h) * fixed`` is the
# square of the exponential in 3.3): tests/fuzz/test_static_graphs.py has more forms of it.


class Part(paddle.nn.Layer):
    """A block as in a model: what is detached lies between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = paddle.nn.Linear(HIDDEN, HIDDEN)
        self.outer = paddle.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        doubled = y.detach() * 2 + y * y
        y = 0.1 * y
        fixed = y.detach()
        return self.outer(paddle.exp(y) * fixed + doubled)


class Kept(paddle.nn.Layer):
    """Two linear layers, the second of which may be kept."""

    def __init__(self, is_kept: bool) -> None:
        super().__init__()
        self.first, self.second = Linear(HIDDEN, HIDDEN), Linear(HIDDEN, HIDDEN)
        self._is_kept = is_kept

    def forward(self, x: Any) -> Any:
        h = functional.gelu(self.first(x))
        return (keep(self.second, h) if self._is_kept else self.second(h)).tanh()


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_kept_part_is_not_copied(is_kept: bool) -> None:
    def build() -> Any:
        x = data()
        for index in range(2):
            x = mark_checkpoint(functional.dropout(Kept(is_kept)(x), 0.1), f"layers.{index}")
        return linear(x).square().mean()

    assert_recompute_changes_nothing(build)
    assert copies(build)["matmul_v2" if IS_26 else "matmul"] == (2 if is_kept else 4)


@needs_pir  # recompute in to_static
@pytest.mark.parametrize("make", [lambda wraps: Part(), Kept], ids=["detached", "kept"])
def test_to_static_has_the_bits_of_dygraph(make: Callable[[bool], paddle.nn.Layer]) -> None:
    def trained(*, wraps: bool) -> list[float]:
        paddle.seed(3)
        part = make(wraps)
        model = paddle.nn.Sequential(recompute_wrapper(part) if wraps else part)
        call = paddle.jit.to_static(model, full_graph=True) if wraps else model
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        found = []
        for number in range(3):
            loss = call(paddle.full([BATCH, HIDDEN], 0.5 + number)).square().mean()
            loss.backward()
            found += [float(loss), *(float(p.grad.sum()) for p in model.parameters())]
            optimizer.step()
            optimizer.clear_grad()
        return found

    assert trained(wraps=True) == trained(wraps=False)
