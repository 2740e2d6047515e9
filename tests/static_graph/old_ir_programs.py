"""Build a Program of Paddle 2.6 with and without recompute, train it, and look at everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import static_graph
from paddle_recompute._paddle.static import training

needs_old_ir = pytest.mark.skipif(
    not paddle.__version__.startswith("2.6"), reason="the old representation is that of Paddle 2.6"
)

BATCH, LENGTH, WIDTH = 4, 6, 16
Build = Callable[[Any], Any]
"""``build(x)``: from the input ``[BATCH, LENGTH, WIDTH]`` to the loss, naming checkpoints."""


@dataclass
class Trained:
    """What some steps left behind."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)  # of the last step
    variables: dict[str, np.ndarray] = field(default_factory=dict)  # all persistable ones
    program: Any = None
    report: Any = None

    def count(self, kind: str) -> int:
        """How many operators of this type the Program has."""
        return sum(operator.type == kind for operator in self.program.global_block().ops)

    def same_as(self, other: Trained) -> None:
        """Every loss, gradient and variable, to the last bit."""
        assert self.losses == other.losses
        for mine, others in (
            (self.gradients, other.gradients),
            (self.variables, other.variables),
        ):
            assert mine.keys() == others.keys() and mine
            for name, value in mine.items():
                assert np.array_equal(value, others[name]), name


def batches(steps: int, shape: tuple[int, ...] = (BATCH, LENGTH, WIDTH)) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(5)
    for _ in range(steps):
        yield rng.standard_normal(shape, "float32")


def strategy(recompute: bool = True, names: tuple[str, ...] = (), **fields: Any) -> Any:
    from paddle.distributed import fleet

    made = fleet.DistributedStrategy()
    made.recompute = recompute
    made.recompute_configs = {"checkpoints": list(names)}
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def train(
    build: Build,
    *,
    recompute: bool,
    steps: int = 3,
    optimizer: Callable[[], Any] = lambda: paddle.optimizer.AdamW(1e-2),
    runs: Callable[[np.ndarray], list[np.ndarray]] = lambda batch: [batch],
    names: tuple[str, ...] = (),
    **fields: Any,
) -> Trained:
    """Train what `build` builds; every call starts from the same weights and random numbers."""
    done = Trained()
    with training.static_mode():
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
            x = paddle.static.data("x", [-1, LENGTH, WIDTH])
            loss = build(x)
            _, pairs = static_graph.minimize(
                optimizer(),
                loss,
                strategy(recompute, names, **fields),
                startup_program=startup,
            )
        done.program = main
        if recompute:
            done.report = static_graph.explain(main)
        executor, scope = paddle.static.Executor(), paddle.static.Scope()
        paddle.seed(3)
        executor.run(startup, scope=scope)
        fetches = [loss, *(gradient for _, gradient in pairs)]
        for batch in batches(steps):
            for part in runs(batch):
                value, *gradients = executor.run(
                    main, feed={"x": part}, fetch_list=fetches, scope=scope
                )
                done.losses.append(float(value))
        done.gradients = {p.name: g for (p, _), g in zip(pairs, gradients, strict=True)}
        done.variables = {
            one.name: np.array(scope.find_var(one.name).get_tensor())
            for one in main.list_vars()
            if one.persistable and one.name not in ("feed", "fetch")
        }
    return done


def blocks(x: Any, *, dropout: float = 0.1, count: int = 3, mark: bool = True) -> Any:
    """A small encoder; each block's output is a checkpoint."""
    for number in range(count):
        layer = paddle.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=dropout)
        x = layer(x)
        if mark:
            static_graph.mark_checkpoint(x, f"block.{number}")
    return x
