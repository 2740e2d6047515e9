"""Programs that are built twice, run for some steps and compared: with recompute and without."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet

from paddle_recompute._paddle import memory
from paddle_recompute._paddle.static import native
from paddle_recompute._paddle.static.attributes import COPY_OF
from paddle_recompute._paddle.static.training import accumulators, static_mode
from paddle_recompute.static_graph import SegmentReport, explain, mark_checkpoint, minimize

IS_26 = paddle.__version__.startswith("2.6")
needs_pir = pytest.mark.skipif(IS_26, reason="Paddle 2.6 builds the old representation")
needs_old_ir = pytest.mark.skipif(not IS_26, reason="Paddle 3 builds PIR")
HIDDEN = 8
BATCH = 4
Build = Callable[[], Any]
"""Builds a forward in the default Program and returns its loss; feeds are made by `feeds`."""


@dataclass
class Run:
    """What some steps of one Program gave."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, np.ndarray]] = field(default_factory=list)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    moments: dict[str, np.ndarray] = field(default_factory=dict)
    report: SegmentReport = field(default_factory=SegmentReport)


def peak_above_rest(run: Callable[[], object], steps: int) -> int:
    """The least peak of some runs of a Program, above the least that is held between them.

    A thread of Paddle's executor frees late on a CPU: at times a run begins with more than the
    rest, and takes more than it needs.
    """
    peaks, rests = [], []
    for _ in range(steps):
        rests.append(memory.current_bytes())
        memory.reset_peak()
        run()
        peaks.append(memory.peak_bytes())
    return min(peaks) - min(rests)


def strategy_of(checkpoints: Sequence[str] | None = None, **settings: Any) -> Any:
    """A DistributedStrategy with recompute at `checkpoints`, if they are given."""
    strategy = fleet.DistributedStrategy()
    if checkpoints is not None:
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": list(checkpoints)}
    for name, value in settings.items():
        setattr(strategy, name, value)
    return strategy


def train(
    build: Build,
    checkpoints: Sequence[str] | None,
    *,
    steps: int = 3,
    make_optimizer: Callable[[], Any] | None = None,
    feeds: Callable[[np.random.RandomState], dict[str, np.ndarray]] | None = None,
    prepare: Callable[[], Any] = contextlib.nullcontext,
    runs_per_step: int = 1,
    minimizes: Callable[..., Any] = minimize,
    **settings: Any,
) -> Run:
    """Build, minimize and run; every build starts from the same seed and the same names.

    Args:
        build: The forward.
        checkpoints: None: no recompute; empty: all.
        steps: Runs of the Program.
        make_optimizer: AdamW if left out.
        feeds: From a random state to what is fed; ``x`` of [BATCH, HIDDEN] if left out.
        prepare: A context around the building, such as auto_cast.
        runs_per_step: Runs that get the same feed.
        minimizes: Called as `minimize` is.
        **settings: Fields of the strategy.
    """
    make_optimizer = make_optimizer or (lambda: paddle.optimizer.AdamW(1e-2))
    feeds = feeds or (lambda random: {"x": random.randn(BATCH, HIDDEN).astype("float32")})
    run = Run()
    with static_mode():
        paddle.seed(7)
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.utils.unique_name.guard(), paddle.static.program_guard(main, startup):
            with prepare():
                loss = build()
            strategy = strategy_of(checkpoints, **settings)
            optimizer = make_optimizer()
            _, params_grads = minimizes(optimizer, loss, strategy)
        if checkpoints is not None:
            run.report = explain(main)
        scope = paddle.static.Scope()
        with paddle.static.scope_guard(scope):
            executor = paddle.static.Executor(paddle.CPUPlace())
            executor.run(startup)
            random = np.random.RandomState(0)
            wanted = [loss, *(gradient for _, gradient in params_grads)]
            for step in range(steps):
                if step % runs_per_step == 0:
                    feed = feeds(random)
                values = executor.run(main, feed=feed, fetch_list=wanted)
                run.losses.append(float(values[0]))
                names = [parameter.name for parameter, _ in params_grads]
                run.gradients.append(dict(zip(names, values[1:], strict=True)))
            parameters = [one.name for one in main.global_block().all_parameters()]
            for names, values in (
                (parameters, run.parameters),
                (accumulators(optimizer).values(), run.moments),
            ):
                values |= {name: np.array(scope.find_var(name).get_tensor()) for name in names}
    return run


def assert_equal_arrays(
    values: dict[str, np.ndarray], expected: dict[str, np.ndarray], **tolerance: float
) -> None:
    """To the bit without a tolerance."""
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert np.isfinite(value.astype("float32")).all()
        bounds = {"rtol": 0.0, "atol": 0.0, **tolerance}
        np.testing.assert_allclose(value, expected[name], err_msg=name, **bounds)


def assert_equal(run: Run, expected: Run) -> None:
    """Bit for bit: losses, every gradient of every step, parameters and moments at the end."""
    assert run.losses == expected.losses and run.gradients[0]
    for gradients, theirs in zip(run.gradients, expected.gradients, strict=True):
        assert_equal_arrays(gradients, theirs)
    assert_equal_arrays(run.parameters, expected.parameters)
    assert_equal_arrays(run.moments, expected.moments)


@contextlib.contextmanager
def building() -> Iterator[paddle.static.Program]:
    """An empty Program in static mode."""
    with static_mode():
        program = paddle.static.Program()
        with paddle.static.program_guard(program, paddle.static.Program()):
            yield program


def of_paddle(optimizer: Any, loss: Any, strategy: Any) -> Any:
    """Paddle's own `minimize`, in place of ours."""
    return optimizer.minimize(loss)


def copies(build: Build) -> collections.Counter[str]:
    """How many operators of each kind run again in the Program of `build`."""
    own = native()
    with building() as program:
        minimize(paddle.optimizer.SGD(0.1), build(), strategy_of([]))
        return collections.Counter(
            own.kind(one).removeprefix("pd_op.")
            for one in own.operations(program)
            if own.text_attribute(one, COPY_OF)
        )


def num_recomputed(run: Run) -> int:
    return sum(segment.num_recomputed or 0 for segment in run.report.segments)


def assert_recompute_changes_nothing(
    build: Build, checkpoints: Sequence[str] = (), **options: Any
) -> Run:
    """Train with recompute and without; returns the run with it.

    A pass that copies nothing would be equal too, so at least one operator must run again.
    """
    recomputed = train(build, checkpoints, **options)
    assert num_recomputed(recomputed) > 0
    assert_equal(recomputed, train(build, None, **options))
    return recomputed


def data(name: str = "x", shape: Sequence[int] = (BATCH, HIDDEN), dtype: str = "float32") -> Any:
    value = paddle.static.data(name, list(shape), dtype)
    value.stop_gradient = dtype != "float32"
    return value


@contextlib.contextmanager
def executor_in_place(allowed: bool) -> Iterator[None]:
    """Whether a result may be written over an operand; without, Paddle is always right."""
    if allowed:
        yield
    elif not paddle.__version__.startswith("2."):
        flag = "FLAGS_pir_apply_inplace_pass"
        before = paddle.get_flags(flag)
        paddle.set_flags({flag: False})
        try:
            yield
        finally:
            paddle.set_flags(before)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paddle.base.executor, "_apply_inplace_addto_pass", lambda *_: None)
            yield


class Block(paddle.nn.Layer):
    """A feed-forward block with a residual, dropout and a norm."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.inner = paddle.nn.Linear(HIDDEN, 4 * HIDDEN)
        self.outer = paddle.nn.Linear(4 * HIDDEN, HIDDEN)
        self.norm = paddle.nn.LayerNorm(HIDDEN)
        self.dropout = paddle.nn.Dropout(dropout)
        self.activation = paddle.nn.functional.gelu

    def forward(self, x: Any) -> Any:
        hidden = self.dropout(self.activation(self.inner(x)))
        return self.norm(x + self.dropout(self.outer(hidden)))


class Stack(paddle.nn.Layer):
    """Blocks one after the other."""

    def __init__(self, num_blocks: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = paddle.nn.LayerList([Block(dropout) for _ in range(num_blocks)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def marked_stack(num_blocks: int = 3, dropout: float = 0.1, *, stop_gradient: bool = False) -> Any:
    """The loss of a `Stack` whose blocks are checkpoints ``layers.0``, ``layers.1``, ..."""
    x = data()
    x.stop_gradient = stop_gradient
    for index, layer in enumerate(Stack(num_blocks, dropout).layers):
        x = mark_checkpoint(layer(x), f"layers.{index}")
    return x.square().mean()
