"""Programs of habits: what people do around a recomputed model, put together at random.

A program is plain data: the parts of the blocks (`habit_parts`, `habit_states`), the door through
which the blocks are recomputed, and what the training loop does before, between and after its
forwards and backwards (`habits`). `observe` runs it, plainly or with ours, and returns what it
leaves behind.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle.distributed.fleet import utils as fleet_utils
from paddle.utils import unique_name

from paddle_recompute import (
    GradCache,
    OffloadSequential,
    RecomputeConfig,
    apply_recompute,
    patch_fleet,
    recompute,
    recompute_wrapper,
    unpatch_fleet,
)
from tests.fuzz import habit_parts, habit_states
from tests.fuzz.habit_parts import PARTS, WIDTH, Tensor
from tests.fuzz.habits import HABITS, ROWS
from tests.recompute.contract import Seen, clean_streams, plain, seen, state_of_the_process

WITHOUT = frozenset(filter(None, os.environ.get("FUZZ_WITHOUT", "").split(",")))
"""Parts that no program has, where a known fault hides others: the environment's FUZZ_WITHOUT."""

# ----------------------------------------------------------------------------------- descriptions

CALLS = ("layer", "lambda", "method", "partial", "keyword")
POLICIES = ("all", "every_n")
DOORS = (*CALLS, "fleet", "wrapper", *POLICIES, "values", "chain", "chain on disk", "cache")
FINISHES = ("backward", "backward", "backward", "twice", "two losses", "grad", "penalty")


@dataclass(frozen=True)
class Habit:
    """One thing that the training loop does, in one step or in all."""

    name: str
    phase: str
    step: int | None
    pick: int


@dataclass(frozen=True)
class Program:
    """A model, how its blocks are recomputed, and the training loop."""

    blocks: tuple[tuple[str, ...], ...]
    door: str = "layer"
    habits: tuple[Habit, ...] = ()
    finish: str = "backward"
    steps: int = 3
    micro_batches: int = 1
    is_shared: bool = False  # the first block is called again at the end
    is_tied: bool = False  # the head has the weight of the stem

    def parts(self) -> set[str]:
        """All parts of all blocks."""
        return {part for block in self.blocks for part in block}

    def is_chain(self) -> bool:
        """Whether the blocks are an `OffloadSequential`."""
        return self.door.startswith("chain")

    def does(self, name: str, phase: str | None = None) -> bool:
        """Whether it has a habit."""
        return any(one.name == name and phase in (None, one.phase) for one in self.habits)


def draw(number: int) -> Program:
    """The program of a seed."""
    choose = random.Random(number)
    names = sorted(PARTS)
    finish = choose.choice(FINISHES)
    if finish == "penalty":
        names = sorted(habit_states.TWICE_DIFFERENTIABLE)
    names = [name for name in names if name not in WITHOUT]
    usual = [name for name in names if name not in habit_states.UNDETECTED | habit_states.REFUSED]
    blocks = tuple(
        tuple(
            choose.choice(names if choose.random() < 0.05 else usual)
            for _ in range(choose.randint(1, 3))
        )
        for _ in range(choose.randint(2, 3))
    )
    steps = choose.randint(1, 3)
    habits = []
    for _ in range(choose.randint(1, 4)):
        name = choose.choice(sorted(HABITS))
        phases = sorted(HABITS[name].phases)
        # One in ten of those that may be refused, so that most programs run to their end.
        right = [phase for phase in phases if phase not in HABITS[name].refused]
        phase = choose.choice(right if right and choose.random() < 0.9 else phases)
        step = choose.choice([None, *range(steps)])
        habits.append(Habit(name, phase, step, choose.randrange(6)))
    if habit_states.WITH_PYLAYERS.intersection(part for block in blocks for part in block):
        finish = "backward"  # plain Paddle dies where a PyLayer's runs twice (2.6.2 and 3.3.1)
    return Program(
        blocks,
        choose.choice(DOORS),
        tuple(habits),
        finish,
        steps,
        choose.choice([1, 1, 1, 2]),
        choose.random() < 0.15,
        choose.random() < 0.15,
    )


# ------------------------------------------------------------------------------------- the model


class Block(paddle.nn.Layer):
    """Parts that are called one after the other."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = paddle.nn.LayerList([PARTS[name]() for name in names])
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """The forward, without the hooks of the block."""
        for one in self.parts:
            x = one(x)
        if self.fails:
            raise MemoryError("a kernel ran out of memory")
        return x


class Model(paddle.nn.Layer):
    """A stem, the blocks, and a head."""

    def __init__(self, program: Program, is_plain: bool) -> None:
        super().__init__()
        self.is_chain, self.is_shared = program.is_chain(), program.is_shared
        self.run = plain if is_plain else recompute
        self.form = program.door
        self.stem = paddle.nn.Linear(WIDTH, WIDTH)
        blocks = [Block(names) for names in program.blocks]
        if self.is_chain:
            self.blocks = paddle.nn.Sequential(*blocks)
        else:
            self.blocks = paddle.nn.LayerList(blocks)
        self.head = paddle.nn.Linear(WIDTH, WIDTH)
        if program.is_tied:
            self.head.weight = self.stem.weight
        if not is_plain:
            self.recompute_by(program.door)

    def recompute_by(self, door: str) -> None:
        """Wrap what `door` wraps."""
        if door == "wrapper":
            for block in self.blocks:
                recompute_wrapper(block)
        elif door in POLICIES:
            apply_recompute(self, RecomputeConfig(checkpoints=["blocks.*"], policy=door))
        elif door == "values":
            self.run = functools.partial(recompute, determinism_check="values")
        elif self.is_chain:
            place = "disk" if door == "chain on disk" else "host"
            self.blocks = OffloadSequential(self.blocks, num_shards=2, offload=place)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        blocks = list(self.blocks)
        if self.is_chain:
            h = self.blocks(h)
        else:
            for block in [*blocks, *blocks[: self.is_shared]]:
                h = self.call(block, h)
        return self.head(h)

    def call(self, block: Block, h: Tensor) -> Tensor:
        """One block, in the form of the door."""
        if self.form == "lambda":
            return self.run(lambda t: block(t), h)
        if self.form == "method":
            return self.run(block.compute, h)
        if self.form == "partial":
            return self.run(functools.partial(block, h))
        if self.form == "keyword":
            return self.run(block, x=h)
        if self.form in ("layer", "values"):
            return self.run(block, h)
        if self.form == "fleet":
            call = plain if self.run is plain else fleet_utils.recompute  # by `patch_fleet` ours
            return call(block, h)
        return block(h)


# ------------------------------------------------------------------------------------ the session


class Session:
    """A training run."""

    def __init__(self, program: Program, is_plain: bool) -> None:
        self.program, self.is_plain = program, is_plain
        self.model = Model(program, is_plain)
        self.noted: dict[str, Any] = {}
        self.removable: list[Any] = []
        self.released: list[habit_states.Offset] = []
        self.shadow: dict[str, np.ndarray] = {}
        self.saved: dict[str, np.ndarray] = {}
        self.calls_of_hooks = 0
        self.step = 0
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """One for the blocks, one for all else."""
        make = functools.partial(self._optimizer, 0.05)
        blocks = self.model.blocks
        of_blocks = blocks.parameters()
        known = {id(one) for one in of_blocks}
        rest = [one for one in self.model.parameters() if id(one) not in known]
        chained = isinstance(blocks, OffloadSequential)
        first = blocks.optimizer(make) if chained else make(of_blocks) if of_blocks else None
        self.optimizers = [one for one in (first, make(rest)) if one is not None]

    @staticmethod
    def _optimizer(rate: float, parameters: list[Tensor]) -> paddle.optimizer.Optimizer:
        return paddle.optimizer.Momentum(rate, 0.9, parameters=parameters)

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """Inside, parameters can be used, also those of a chain."""
        blocks = self.model.blocks
        if isinstance(blocks, OffloadSequential) and blocks.parameters():
            return blocks.resident()
        return contextlib.nullcontext()

    def parts(self, *kinds: type) -> list[Any]:
        """All parts of some classes."""
        return [one for one in self.model.sublayers() if isinstance(one, kinds)]

    def block(self, pick: int) -> Block:
        """One of the blocks."""
        blocks = [one for one in self.model.sublayers() if isinstance(one, Block)]
        return blocks[pick % len(blocks)]

    def note(self, what: str, value: Any) -> None:
        """Keep the values for the comparison."""
        if isinstance(value, paddle.Tensor):
            value = value.numpy()
        self.noted[f"{len(self.noted)} step {self.step} {what}"] = value

    def habits(self, phase: str) -> None:
        """Do what is done in this phase of this step."""
        for one in self.program.habits:
            if one.phase == phase and one.step in (None, self.step):
                HABITS[one.name].do(self, one.pick)
        for part in self.released:  # after all else: no plain forward can run any more
            part.offset._clear_dataptr()

    # ---------------------------------------------------------------------------------- a step

    def train(self) -> None:
        """All steps."""
        for step in range(self.program.steps):
            self.step = step
            for micro_batch in range(self.program.micro_batches):
                x = paddle.randn([ROWS, WIDTH])
                self.habits("before")
                with contextlib.ExitStack() as stack:
                    for one in self.program.habits:
                        if one.phase == "around" and one.step in (None, step):
                            stack.enter_context(HABITS[one.name].do(self, one.pick))
                    if self.program.door != "cache":
                        x.stop_gradient = self.program.finish not in ("grad", "penalty")
                        outputs = self.model(x)
                        loss = self.loss(outputs)
                if self.program.door == "cache":
                    loss = self.cached(x)
                else:
                    self.habits("between")
                    self.finish(x, outputs, loss)
                while self.released:
                    self.released.pop().offset = paddle.full([WIDTH], 0.2)
                self.note(f"loss {micro_batch}", loss)
                self.model.train()
            self.habits("after")
            self.note_gradients()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.clear_grad()
            for layer in habit_states.REGISTRY["layers"]:  # no optimizer has them
                layer.clear_gradients()
            self.habits("updated")

    def loss(self, outputs: Tensor) -> Tensor:
        """With the losses that Layers keep."""
        loss = outputs.square().mean() + outputs.tanh().sum() * 0.01
        for one in self.parts(habit_states.Auxiliary):
            if one.aux is not None:
                loss = loss + one.aux * 0.1
        return loss

    def finish(self, x: Tensor, outputs: Tensor, loss: Tensor) -> None:
        """The backward."""
        kind = self.program.finish
        if loss.stop_gradient:
            return
        if kind == "twice":
            loss.backward(retain_graph=True)
            loss.backward()
        elif kind == "two losses":
            loss.backward(retain_graph=True)
            (outputs * outputs.detach()).sum().backward()
        elif kind == "grad":
            (gradient,) = paddle.grad(loss, [x], retain_graph=True, allow_unused=True)
            self.note("gradient", gradient)
            loss.backward()
        elif kind == "penalty":
            (gradient,) = paddle.grad(loss, [x], create_graph=True)
            (loss + gradient.square().sum()).backward()
        else:
            loss.backward()

    def cached(self, x: Tensor) -> Tensor:
        """A contrastive step over chunks, by `GradCache` or plainly."""
        sides = x, x.flip([0])

        def loss_of(queries: Tensor, positives: Tensor) -> Tensor:
            self.habits("between")
            return (paddle.matmul(queries, positives, transpose_y=True).tanh()).mean()

        half = ROWS // 2
        if not self.is_plain:
            return GradCache(self.model, loss_of, chunk_size=half).backward(*sides)
        vectors = [
            paddle.concat([self.model(side[:half]), self.model(side[half:])]) for side in sides
        ]
        loss = loss_of(*vectors)
        loss.backward()
        return loss

    def note_gradients(self) -> None:
        """Of all parameters, with what PyLayers added up themselves."""
        for number, layer in enumerate(habit_states.REGISTRY["layers"]):
            for name, one in layer.named_parameters():
                self.note(f"gradient of found {number} {name}", gradient_of(one))
        with self.opened():
            for name, one in self.model.named_parameters():
                self.note(f"gradient of {name}", gradient_of(one))
                if hasattr(one, "main_grad"):
                    self.note(f"main_grad of {name}", one.main_grad)
                    one.set_value(one - 0.05 * one.main_grad)
                    one.main_grad.zero_()

    def left(self) -> Seen:
        """Everything that can be looked at in the end."""
        found: dict[str, Any] = dict(self.noted)
        with self.opened():
            for name, one in self.model.named_parameters():
                found[f"parameter {name}"] = one.numpy(), one.stop_gradient
        for path, layer in self.model.named_sublayers(include_self=True):
            hooks = len(layer._forward_pre_hooks), len(layer._forward_post_hooks)
            found[f"mode of {path}"] = layer.training, hooks
            for name, buffer in layer.named_buffers(include_sublayers=False):
                found[f"buffer {path}.{name}"] = buffer.numpy()
            if type(layer).__module__ in (
                habit_parts.__name__,
                habit_states.__name__,
            ) or isinstance(layer, Block):
                for name, value in vars(layer).items():
                    if not name.startswith("_") and name != "training" and is_plain_data(value):
                        found[f"{path}.{name}"] = value
        for number, layer in enumerate(habit_states.REGISTRY["layers"]):
            found[f"found {number}"] = layer
            found[f"count of found {number}"] = layer.count
        found["calls of hooks"] = self.calls_of_hooks
        amp = sys.modules["paddle.amp.auto_cast"]  # `paddle.amp.auto_cast` is the function
        found["dtype that GradScaler reads"] = amp.amp_global_state().amp_dtype
        return {**dict(seen(found)), **state_of_the_process()}


def gradient_of(parameter: Tensor) -> np.ndarray | None:
    """Its values."""
    return None if parameter.grad is None else parameter.grad.numpy()


def is_plain_data(value: Any) -> bool:
    """Whether it is a number, a tensor, or a list of them."""
    if isinstance(value, list):
        return all(map(is_plain_data, value))
    return value is None or isinstance(value, (int, float, paddle.Tensor))


def observe(program: Program, is_plain: bool) -> Seen:
    """What the program leaves behind: a readable place -> the value there."""

    def run() -> Seen:
        with clean_streams(), unique_name.guard():
            habit_states.reset()
            if program.door == "fleet" and not is_plain:
                patch_fleet()
            session = Session(program, is_plain)
            session.train()
            return session.left()

    try:
        return contextvars.Context().run(run)
    finally:
        unpatch_fleet()
        habit_states.reset()
