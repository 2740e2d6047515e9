"""Random training runs on real ranks: a run whose state is spread has the bits of the plain run.

A program draws a small model (tied weights, parameters that nobody uses, frozen ones), an optimizer
and a row of calls: steps, steps of a loop of one's own with an evaluation or a ``state_dict``
between its backward and its update, updates of gradients that are not finite, reads and writes of
parameters, frozen parameters, another learning rate, a new model and optimizer that go on from the
state, a thread that reads. It runs with a plain optimizer, and with a `ShardedOptimizer` or as a
chain with ``offload="ranks"``. All that a call gives must be equal to the last bit.

With ``FUZZ_RANKS=3`` it runs on three ranks. A failure prints the seed and the program::

    FUZZ_SEED=123 FUZZ_PROGRAMS=1 python -m pytest tests/fuzz/test_sharded_programs.py
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import (
    GradientSync,
    OffloadSequential,
    RecomputeConfig,
    ShardedOptimizer,
    TrainStep,
    apply_recompute,
)
from paddle_recompute.errors import ConfigError, DivergenceError
from tests.fuzz import budget
from tests.ranks import run_ranks
from tests.sharding.runs import OPTIMIZERS

RANKS = int(os.environ.get("FUZZ_RANKS", 2))
WIDTH = 6
ROWS = 3
MAKES: dict[str, Callable[..., Any]] = {
    **OPTIMIZERS,
    "adamax": lambda parameters: paddle.optimizer.Adamax(0.02, parameters=parameters),
    "adagrad": lambda parameters: paddle.optimizer.Adagrad(0.02, parameters=parameters),
    "adadelta": lambda parameters: paddle.optimizer.Adadelta(0.02, parameters=parameters),
    "scheduled": lambda parameters: paddle.optimizer.AdamW(
        paddle.optimizer.lr.StepDecay(0.02, 2), parameters=parameters
    ),
    "groups": lambda parameters: paddle.optimizer.AdamW(
        0.02, parameters=groups_of(parameters), weight_decay=0.1
    ),
}


def groups_of(parameters: list[paddle.Tensor]) -> list[Any]:
    """No decay of biases; a rank that has none has one group."""
    biases = [one for one in parameters if one.ndim == 1]
    others = [one for one in parameters if one.ndim != 1]
    groups = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
    return [one for one in groups if one["params"]]


@dataclass(frozen=True)
class Program:
    """What a run is made of.

    Attributes:
        layers: The kind of each Layer of the chain.
        tied: Pairs of Layers of which the second has the weight of the first.
        frozen: Layers whose parameters are frozen from the beginning.
        way: ``plain``, ``sharded`` or ``ranks``; what is compared with ``plain``.
        calls: Names of functions of `CALLS`, each with a number.
    """

    layers: tuple[str, ...]
    tied: tuple[tuple[int, int], ...]
    frozen: frozenset[int]
    recompute: bool
    optimizer: str
    accumulate: int
    clip: float | None
    way: str
    calls: tuple[tuple[str, int], ...]


def draw(seed: int) -> Program:
    rng = np.random.default_rng([30_000, seed])
    number = int(rng.integers(3, 7))
    kinds = ["linear", "norm", "dropout linear", "unused"]
    layers = tuple(str(rng.choice(kinds, p=[0.4, 0.2, 0.3, 0.1])) for _ in range(number))
    linear = [i for i, kind in enumerate(layers) if "linear" in kind]
    tied = []
    if len(linear) > 2 and rng.random() < 0.4:
        tied.append((linear[0], linear[-1]))
    frozen = frozenset(int(i) for i in range(1, number) if rng.random() < 0.15)
    ways = ["sharded", "ranks"]
    names = [str(rng.choice([*CALLS])) for _ in range(int(rng.integers(4, 12)))]
    way, accumulate = str(rng.choice(ways)), int(rng.choice([1, 1, 2]))
    if way == "ranks":
        # A chain with shared parameters sums up in another order. It leaves moments alone where a
        # step is not finite, and the plain step, which reads nothing on the host, decays them.
        accumulate = 1 if tied else accumulate
        names = [name for name in names if name != "not finite"]
    calls = [("step", 0), *((name, int(rng.integers(100))) for name in names), ("step", 99)]
    return Program(
        ("linear", *layers[1:-1], "linear"),
        tuple(one for one in tied if set(one) <= {0, number - 1, *linear}),
        frozen,
        bool(rng.random() < 0.5),
        str(rng.choice([*MAKES])),
        accumulate,
        None if rng.random() < 0.4 else 0.05,
        way,
        tuple(calls),
    )


class Part(paddle.nn.Layer):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dense = paddle.nn.Linear(WIDTH, WIDTH) if kind != "norm" else None
        self.norm = paddle.nn.LayerNorm(WIDTH) if kind == "norm" else None
        self.kind = kind

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.norm is not None:
            return self.norm(x)
        if self.kind == "unused":
            return paddle.tanh(x)
        y = paddle.nn.functional.gelu(self.dense(x))
        return x + (
            paddle.nn.functional.dropout(y, 0.2, self.training) if "drop" in self.kind else y
        )


class Run:
    """The objects of a run, and all that its calls gave."""

    def __init__(self, program: Program, way: str) -> None:
        self.program, self.way = program, way
        self.found: list[tuple[str, list[np.ndarray]]] = []
        self.number = 0
        self.rate: float | None = None
        self.build()

    def build(self) -> None:
        program = self.program
        layers = [Part(kind) for kind in program.layers]
        for first, second in program.tied:
            layers[second].dense.weight = layers[first].dense.weight
        rng = np.random.RandomState(1)
        for layer in layers:
            for parameter in layer.parameters():
                values = rng.randn(*parameter.shape) * 0.3
                parameter.set_value(paddle.to_tensor(values.astype("float32")))
        for index in program.frozen & {*range(len(layers))}:
            for parameter in layers[index].parameters():
                parameter.stop_gradient = True
        make = MAKES[program.optimizer]

        def make_of(parameters: Any) -> Any:
            return make(parameters=parameters)

        if self.way in ("ranks", "host"):
            self.model: Any = OffloadSequential(layers, num_shards=RANKS, offload=self.way)
            self.optimizer: Any = self.model.optimizer(make_of)
        else:
            self.model = paddle.nn.Sequential(*layers)
            if program.recompute:
                config = RecomputeConfig(enable=True, checkpoints=["*"])
                apply_recompute(self.model, config)
            if self.way == "plain":
                self.optimizer = make_of(self.model.parameters())
            else:
                self.optimizer = ShardedOptimizer(make_of, self.model)
        self.sync = GradientSync(self.model)
        self.step = TrainStep(
            self.model,
            self.optimizer,
            loss_fn=lambda model, x: model(x).square().mean(),
            sync=self.sync,
            accumulate_steps=program.accumulate,
            clip_grad_norm=program.clip,
        )

    def rows(self, part: int = 0) -> paddle.Tensor:
        rng = np.random.RandomState([self.number, part, dist.get_rank()])
        return paddle.to_tensor(rng.randn(ROWS + dist.get_rank(), WIDTH).astype("float32"))

    def parameter(self, number: int) -> paddle.Tensor:
        parameters = self.model.parameters()
        return parameters[number % len(parameters)]

    def evaluated(self) -> np.ndarray:
        self.model.eval()
        with paddle.no_grad():
            y = self.model(paddle.ones([2, WIDTH]))
        self.model.train()
        return y.numpy()

    def state(self) -> list[np.ndarray]:
        weights = {k: v.numpy() for k, v in self.model.state_dict().items()}
        moments = self.step.state_dict()["optimizer"]
        moments = {key: np.asarray(moments[key]).reshape([-1]) for key in sorted(moments)}
        return [*weights.values(), np.array([*map(hash_of, moments)]), *moments.values()]


def hash_of(text: str) -> int:
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(text))


def make_step(run: Run, number: int) -> list[np.ndarray]:
    result = run.step([run.rows(part) for part in range(run.program.accumulate)])
    return [np.array([result.loss, result.grad_norm])]


def not_finite(run: Run, number: int) -> list[np.ndarray]:
    rows = run.rows() * (np.nan if dist.get_rank() == number % RANKS else 1.0)
    try:
        result = run.step([rows] * run.program.accumulate)
        return [np.array([result.loss])]
    except DivergenceError:
        return []


def own_loop(run: Run, number: int) -> list[np.ndarray]:
    """A backward, something, the update."""
    with run.sync.last_backward():
        run.model(run.rows()).square().mean().backward()
    found = []
    if number % 3 == 0:
        found.append(run.evaluated())
    if number % 5 == 0:
        found += run.state()
    run.optimizer.step()
    if number % 2:
        found.append(run.evaluated())
    run.optimizer.clear_grad(set_to_zero=run.way != "ranks" and number % 7 > 3)
    run.optimizer.clear_grad(set_to_zero=False)
    return found


def evaluate(run: Run, number: int) -> list[np.ndarray]:
    return [run.evaluated()]


def save_twice(run: Run, number: int) -> list[np.ndarray]:
    return run.state() + run.state()


def read(run: Run, number: int) -> list[np.ndarray]:
    with paddle.no_grad():
        return [run.parameter(number).numpy(), np.asarray(run.parameter(number + 1))]


def write(run: Run, number: int) -> list[np.ndarray]:
    parameter = run.parameter(number)
    values = np.random.RandomState(number).randn(*parameter.shape) * 0.1
    with paddle.no_grad():
        parameter.set_value(paddle.to_tensor(values.astype("float32")))
        other = run.parameter(number + 1)
        other.set_value(other.numpy() * 0.5)
    return []


def freeze(run: Run, number: int) -> list[np.ndarray]:
    if number % 2:
        run.parameter(number).stop_gradient = True
    return []


def set_rate(run: Run, number: int) -> list[np.ndarray]:
    if run.program.optimizer != "scheduled":
        run.optimizer.set_lr(0.001 * (1 + number))
        run.rate = 0.001 * (1 + number)
    return [np.array([run.optimizer.get_lr()])]


def go_on_anew(run: Run, number: int) -> list[np.ndarray]:
    """Other objects, which get the state."""
    weights = {k: paddle.to_tensor(v.numpy()) for k, v in run.model.state_dict().items()}
    flags = [one.stop_gradient for one in run.model.parameters()]
    state = run.step.state_dict()
    state["optimizer"] = {k: np.array(np.asarray(v)) for k, v in state["optimizer"].items()}
    run.build()
    run.model.set_state_dict(weights)
    for parameter, flag in zip(run.model.parameters(), flags, strict=True):
        parameter.stop_gradient = flag
    run.step.set_state_dict(state)
    if run.rate is not None:
        run.optimizer.set_lr(run.rate)
    return run.state() if number % 2 else []


def in_a_thread(run: Run, number: int) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: found.append(run.parameter(number).numpy()))
    thread.start()
    own = run.parameter(number).numpy()
    thread.join()
    return [own, *found]


CALLS: dict[str, Callable[[Run, int], list[np.ndarray]]] = {
    "step": make_step,
    "not finite": not_finite,
    "own loop": own_loop,
    "evaluate": evaluate,
    "save twice": save_twice,
    "read": read,
    "write": write,
    "freeze": freeze,
    "set rate": set_rate,
    "go on anew": go_on_anew,
    "thread": in_a_thread,
}


def trace(program: Program, way: str) -> list[tuple[str, list[np.ndarray]]]:
    run = Run(program, way)
    for name, number in program.calls:
        run.number += 1
        paddle.seed(100 * run.number + dist.get_rank())
        if name == "thread" and program.way == "ranks":
            continue  # all ranks would have to read in the same order
        run.found.append((name, CALLS[name](run, number)))
    run.found.append(("end", run.state()))
    return run.found


def fault_of(program: Program) -> str:
    reference = "host" if program.way == "ranks" and RANKS > 2 else "plain"
    expected, actual = trace(program, reference), trace(program, program.way)
    for place, ((name, one), (_, other)) in enumerate(zip(expected, actual, strict=True)):
        if len(one) != len(other):
            return f"call {place} ({name}): {len(one)} results, {len(other)}"
        for index, (x, y) in enumerate(zip(one, other, strict=True)):
            if x.shape != y.shape or not np.array_equal(x, y, equal_nan=True):
                return f"call {place} ({name}), result {index}: {x}, {y}"
    return ""


def run_program(program: Program) -> None:
    try:
        fault = fault_of(program)
    except ConfigError as error:  # on all ranks alike
        assert "each of which must own at least one" in str(error)
        return
    assert not fault, fault


def run_programs(first: int, count: int) -> int:
    return budget.each_program(draw, run_program, first, count, 20)


@pytest.mark.timeout(24 * 3600)
def test_a_spread_run_has_the_bits_of_the_plain_run() -> None:
    count = budget.examples(7)
    done = run_ranks(run_programs, RANKS, timeout=60 + 4 * count, first=budget.seed(), count=count)
    assert done == [count] * RANKS
