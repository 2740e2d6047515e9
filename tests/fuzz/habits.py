"""The habits of training loops: what people do before, between and after forwards and backwards."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from tests.fuzz import habit_parts, habit_states
from tests.fuzz.habit_parts import WIDTH, Tensor

if TYPE_CHECKING:
    from tests.fuzz.habit_programs import Session

ROWS = 6
PHASES = ("before", "between", "after", "updated")
"""Before a forward; between it and its backward; before the update; after it."""


@dataclass(frozen=True)
class Kind:
    """A kind of habit.

    Attributes:
        do: Does it; in the phase "around" it returns a context manager.
        phases: When it may happen.
        refused: The phases in which recompute may refuse it.
    """

    do: Callable[[Session, int], Any]
    phases: frozenset[str]
    refused: frozenset[str]


HABITS: dict[str, Kind] = {}


def habit(
    name: str, *phases: str, refused: tuple[str, ...] = ()
) -> Callable[[Callable[[Session, int], Any]], Callable[[Session, int], Any]]:
    """Register a habit; without phases it may happen at any time."""

    def register(do: Callable[[Session, int], Any]) -> Callable[[Session, int], Any]:
        HABITS[name] = Kind(do, frozenset(phases or PHASES), frozenset(refused))
        return do

    return register


def train_block(session: Session, pick: int, is_trained: bool) -> None:
    for parameter in session.block(pick).parameters():
        parameter.stop_gradient = not is_trained


@contextlib.contextmanager
def set_around(holder: Any, pick: int) -> Iterator[None]:
    before, holder.temperature = holder.temperature, 0.1 + pick / 4
    yield
    holder.temperature = before


def first_part(session: Session, pick: int) -> paddle.nn.Layer:
    return session.block(pick).parts[0]


BETWEEN_UPDATES = ("before", "between", "updated")
SHORT: dict[str, tuple[Callable[[Session, int], Any], tuple[str, ...]]] = {
    "schedule": (
        lambda s, pick: habit_parts.schedule(s.model, 0.25 * (1 + pick) + 0.125 * s.step), PHASES,
    ),
    "with a thread local": (lambda s, pick: set_around(habit_parts.LOCAL, pick), ("around",)),
    "with a class attribute": (lambda s, pick: set_around(habit_parts.OfClass, pick), ("around",)),
    "with auto_cast": (
        lambda s, pick: paddle.amp.auto_cast(
            level="O1", dtype="bfloat16" if pick % 2 else "float16"
        ),
        ("around",),
    ),
    "freeze": (lambda s, pick: train_block(s, pick, False), PHASES),
    "unfreeze": (lambda s, pick: train_block(s, pick, True), PHASES),
    "eval": (lambda s, pick: s.block(pick).eval(), PHASES),
    "train": (lambda s, pick: s.model.train(), PHASES),
    "forward without a backward": (
        lambda s, pick: s.note("not trained", s.model(paddle.randn([ROWS, WIDTH]))), PHASES,
    ),
    "look at another batch": (
        paddle.no_grad()(lambda s, pick: s.note("looked at", s.model(paddle.ones([2, WIDTH])))),
        PHASES,
    ),
    "new optimizers": (lambda s, pick: s.make_optimizers(), ("before", "updated")),
    "learning rate": (
        lambda s, pick: [one.set_lr(0.01 * (1 + pick)) for one in s.optimizers], PHASES,
    ),
    "save": (
        lambda s, pick: s.saved.update(
            {k: v.numpy().copy() for k, v in s.model.state_dict().items()}
        ),
        PHASES,
    ),
    "forward pre-hook": (
        lambda s, pick: s.removable.append(
            first_part(s, pick).register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1.5,))
        ),
        BETWEEN_UPDATES,
    ),
    "forward post-hook": (
        lambda s, pick: s.removable.append(
            first_part(s, pick).register_forward_post_hook(lambda _, inputs, out: out * 0.5)
        ),
        BETWEEN_UPDATES,
    ),
    "collect garbage": (lambda s, pick: gc.collect(), PHASES),
}  # fmt: skip
for name, (do, phases) in SHORT.items():
    habit(name, *phases)(do)


# Schedules and contexts.


@habit("with a context variable", "around")
@contextlib.contextmanager
def _(session: Session, pick: int) -> Iterator[None]:
    token = habit_parts.CONTEXT.set(0.1 + pick / 4)
    yield
    habit_parts.CONTEXT.reset(token)


# What is trained.


@habit("switch adapters")
def _(session: Session, pick: int) -> None:
    for one in session.parts(habit_parts.Adapters):
        one.active = (one.active + 1) % 2
        one.train_adapter(one.active)


@habit("replace a Layer", refused=())
def _(session: Session, pick: int) -> None:
    for one in session.parts(habit_parts.Dense)[:1]:
        one.dropout = paddle.nn.Dropout(0.1 * (pick % 5))


# Other forwards.


@habit("generate")
def _(session: Session, pick: int) -> None:
    session.model.eval()
    with paddle.no_grad():
        x = paddle.ones([2, WIDTH])
        for _ in range(2):
            x = session.model(x)
    session.note("generated", x)
    session.model.train()


@habit("train on another batch")
def _(session: Session, pick: int) -> None:
    loss = session.loss(session.model(paddle.randn([ROWS, WIDTH])))
    if not loss.stop_gradient:
        loss.backward()


@habit("catch an error of a forward")
def _(session: Session, pick: int) -> None:
    block = session.block(pick)
    block.fails = True
    try:
        session.model(paddle.randn([ROWS, WIDTH]))
    except MemoryError:
        session.note("caught", 1)
    block.fails = False


class Fails(Exception):
    """Raised in a backward."""


@habit("catch an error of a backward")
def _(session: Session, pick: int) -> None:
    block = session.block(pick)

    def fail(gradient: Tensor) -> None:
        raise Fails

    def hook(layer: Any, inputs: Any, output: Tensor) -> None:
        if not output.stop_gradient:
            output.register_hook(fail)

    handle = block.register_forward_post_hook(hook)
    outputs = session.model(paddle.randn([ROWS, WIDTH]))
    handle.remove()
    try:
        if not outputs.stop_gradient:
            outputs.sum().backward()
    except Fails:
        session.note("caught", 1)
    except (OSError, RuntimeError, SystemError):
        session.note("caught", 1)  # Paddle gives another one to the caller
    with session.opened():
        session.model.clear_gradients()


# Copies and files.


@habit("go on with a copy", "before", "updated")
def _(session: Session, pick: int) -> None:
    session.model = copy.deepcopy(session.model)
    session.make_optimizers()


@habit("teacher")
def _(session: Session, pick: int) -> None:
    teacher = copy.deepcopy(session.model)
    teacher.eval()
    with paddle.no_grad():
        session.note("teacher", teacher(paddle.ones([2, WIDTH])))


@habit("load", refused=("between",))
def _(session: Session, pick: int) -> None:
    if session.saved:
        session.model.set_state_dict(session.saved)


@habit("save to a file and load", refused=("between",))
def _(session: Session, pick: int) -> None:
    file = io.BytesIO()
    paddle.save(session.model.state_dict(), file)
    file.seek(0)
    session.model.set_state_dict(paddle.load(file))


# Weights.


@habit("EMA", "before", "updated", "after", "between")
def _(session: Session, pick: int) -> None:
    for name, value in session.model.state_dict().items():
        now = value.numpy()
        session.shadow[name] = session.shadow.get(name, now) * 0.5 + now * 0.5
    session.note("shadow", dict(session.shadow))


@habit("evaluate the EMA", refused=("between",))
def _(session: Session, pick: int) -> None:
    state = {name: value.numpy().copy() for name, value in session.model.state_dict().items()}
    if session.shadow.keys() == state.keys():
        session.model.set_state_dict(session.shadow)
        HABITS["generate"].do(session, pick)
        session.model.set_state_dict(state)


@habit("clip weights", refused=("between",))
def _(session: Session, pick: int) -> None:
    with session.opened(), paddle.no_grad():
        for parameter in session.block(pick).parameters():
            parameter.set_value(parameter.clip(-0.3, 0.3))


@habit("clip gradients", "after")
def _(session: Session, pick: int) -> None:
    with session.opened():
        trained = [one for one in session.model.parameters() if one.grad is not None]
        if trained:
            session.note("norm", paddle.nn.utils.clip_grad_norm_(trained, 0.5))


@habit("clear gradients", "before", "updated")
def _(session: Session, pick: int) -> None:
    for optimizer in session.optimizers:
        optimizer.clear_grad(set_to_zero=bool(pick % 2))


@habit("update too early", "between", refused=("between",))
def _(session: Session, pick: int) -> None:
    for optimizer in session.optimizers:
        optimizer.step()


# Not in between: plain Paddle computes gradients with what is written to a tensor that it saved.
@habit("reset a buffer", "before", "after", "updated")
def _(session: Session, pick: int) -> None:
    for name, buffer in session.block(pick).named_buffers():
        if not name.endswith(("weight", "weight_u", "weight_v")):
            buffer.set_value(paddle.full_like(buffer, 0.5))


@habit("release memory", "between", refused=("between",))
def _(session: Session, pick: int) -> None:
    """As engines of pipelines do with what they have sent; the next step gets a new tensor."""
    session.released += session.parts(habit_states.Offset)


# Hooks.


@habit("hook that keeps features", "before", "between", "updated")
def _(session: Session, pick: int) -> None:
    kept: dict[str, Tensor] = {}
    session.kept = kept
    handle = session.block(pick).register_forward_post_hook(
        lambda layer, given, out: kept.update(feature=out.detach())
    )
    session.removable.append(handle)


@habit("hook of a parameter", "before", "updated")
def _(session: Session, pick: int) -> None:
    def count(gradient: Tensor) -> Tensor:
        session.calls_of_hooks += 1
        return gradient * 0.5

    with session.opened():
        for parameter in session.block(pick).parameters()[:1]:
            if not (parameter.stop_gradient or hasattr(parameter, "main_grad")):
                session.removable.append(parameter.register_hook(count))


@habit("remove hooks")
def _(session: Session, pick: int) -> None:
    while session.removable:
        session.removable.pop().remove()


# The process.


@habit("draw")
def _(session: Session, pick: int) -> None:
    session.note("drawn", [paddle.rand([2]).numpy(), np.random.rand(), random.random()])


@habit("seed")
def _(session: Session, pick: int) -> None:
    paddle.seed(pick)
    np.random.seed(pick)
    random.seed(pick)
