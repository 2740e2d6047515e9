"""More parts of blocks: those with a state, Layers found only when called, what forwards do."""

from __future__ import annotations

import contextvars
import functools
import importlib
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import paddle

from tests.fuzz.habit_parts import ONE, PARTS, WIDTH, Dense, Layer, Tensor, part, reset_settings

CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("layer", default=None)
REGISTRY: dict[str, list[Any]] = {"layers": []}


def reset() -> None:
    """State outside of Layers as at the start of a process."""
    reset_settings()
    CURRENT.set(None)
    REGISTRY["layers"] = []
    layer_of.cache_clear()


class WithLinear(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)


# ------------------------------------------------------------------------------- state of a Layer


@part("codebook")
class Codebook(Layer):
    """Vector quantization: the codes follow their rows, faster during the warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", paddle.randn([3, WIDTH]))
        self.register_buffer("uses", paddle.zeros([3]))
        self.warm = 0

    def forward(self, x: Tensor) -> Tensor:
        with paddle.no_grad():
            distance = (x.unsqueeze(1) - self.codes.unsqueeze(0)).square().sum(-1)
            hot = paddle.nn.functional.one_hot(distance.argmin(-1), 3)
            quantized = paddle.matmul(hot, self.codes)
            if self.training:
                decay = 0.5 if self.warm < 2 else 0.9
                mean = paddle.matmul(hot, x, transpose_x=True) / len(x)
                self.codes.set_value(self.codes * decay + mean * (1 - decay))
                self.uses.add_(hot.sum(0))
                self.warm += 1
        return x + (quantized - x).detach() * 0.5


@part("auxiliary loss")
class Auxiliary(Layer):
    """A gate whose loss the training loop collects."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = paddle.nn.Linear(WIDTH, 2)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weights = paddle.nn.functional.softmax(self.gate(x))
        self.aux = weights.mean(0).square().sum()
        return x * weights[:, :1]


@part("tracker")
class Tracker(Layer):
    """Logs numbers, and keeps tensors of the last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.twice_maxima: list[float] = []
        self.twice_calls = 0
        self.last: Tensor | None = None
        self.total = paddle.zeros([])

    def forward(self, x: Tensor) -> Tensor:
        self.twice_calls += 1
        self.twice_maxima.append(float(x.abs().max()))
        self.last = x.detach()
        self.total = self.total + x.detach().mean()
        return x


@part("unused with gradient")
class Unused(WithLinear):
    """Computes figures that the loss does not use."""

    twice_deviation = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.twice_deviation = float(h.std())
        return paddle.tanh(h)


@part("cache")
class Cached(Layer):
    """Fills a table in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = paddle.cos(paddle.arange(WIDTH, dtype="float32"))
        return x * self.table


@part("offset")
class Offset(Layer):
    """Adds a tensor whose values its backward does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = paddle.full([WIDTH], 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


@part("late buffer")
class LateBuffer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        elif self.training:
            self.mean.set_value(self.mean * 0.9 + x.detach().mean(0) * 0.1)
        return x - self.mean.clone()


# -------------------------------------------------------------- Layers found only when called


class Shared(Layer):
    """Has a buffer, and numbers beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = paddle.nn.BatchNorm1D(WIDTH)
        self.register_buffer("mean", paddle.zeros([WIDTH]))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean.set_value(self.mean + x.detach().mean(0) / self.count)
        return self.norm(x) - self.mean.clone()


class Finder(Layer):
    """Calls the Layer of the registry that `find` returns."""

    known: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()

    def __init__(self, find: Callable[[int], Layer]) -> None:
        super().__init__()
        self.number, self.find = len(REGISTRY["layers"]), find
        REGISTRY["layers"].append(Shared())
        Finder.known[self.number] = REGISTRY["layers"][self.number]

    def forward(self, x: Tensor) -> Tensor:
        return self.find(self.number)(x)


@functools.lru_cache
def layer_of(number: int) -> Layer:
    return REGISTRY["layers"][number]


def by_import(number: int) -> Layer:
    return getattr(importlib.import_module(__name__), "REGISTRY")["layers"][number]  # noqa: B009


def in_context(number: int) -> Layer:
    if CURRENT.get() is None:
        CURRENT.set(REGISTRY["layers"][number])
    return CURRENT.get()


FINDS: dict[str, Callable[[int], Any]] = {
    "registry": lambda number: REGISTRY["layers"][number],
    "class registry": lambda number: Finder.known[number],
    "weak reference": lambda number: weakref.ref(REGISTRY["layers"][number])(),
    "lru_cache": layer_of,
    "import": by_import,
    "layer in a context variable": in_context,
}
PARTS.update({name: functools.partial(Finder, find) for name, find in FINDS.items()})


# ------------------------------------------------------------------------------ what forwards do


@part("noise")
class Noise(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x + paddle.randn([1]) * 0.1 + np.random.rand() * random.random()


@part("stochastic depth")
class Depth(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.4:
            return x
        return x + self.linear(x)


@part("auto_cast")
class AutoCast(WithLinear):
    def forward(self, x: Tensor) -> Tensor:
        with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
            h = self.linear(x)
        with paddle.amp.auto_cast(enable=False):
            return paddle.tanh(h.astype("float32"))


@part("caught exception")
class Caught(WithLinear):
    """A kernel that does not take these shapes, and a way around it."""

    is_fast = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        try:
            if self.is_fast:
                return paddle.matmul(h, paddle.ones([WIDTH + 1, WIDTH]))
        except ValueError:
            self.note()
        return paddle.tanh(h)

    def note(self) -> None:
        """Log it."""


@part("remembered exception")
class Remembered(Caught):
    def note(self) -> None:
        self.is_fast = False


@part("no_grad")
class PartlyFrozen(WithLinear):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = paddle.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with paddle.no_grad():
            features = self.frozen(x)
        features.stop_gradient = True
        return self.linear(features) + x.detach() * x


@part("tensor hook")
class Hooked(WithLinear):
    gradients = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if not h.stop_gradient:
            h.register_hook(self.halve)
        return h

    def halve(self, gradient: Tensor) -> Tensor:
        """Count, and halve."""
        self.gradients += 1
        return gradient * 0.5


@part("view and in place")
class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        h.add_(paddle.ones([1]))
        return h.reshape([-1]).reshape([-1, WIDTH]).clip(-3, 3)


@part("called twice")
class Twice(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Dense()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x)) + x


# --------------------------------------------------------------------- refused, or not detected


@part("act norm")
class ActNorm(Layer):
    """Sets its parameter from its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([WIDTH], default_initializer=ONE)
        self.register_buffer("is_set", paddle.zeros([1]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.is_set.item():
            with paddle.no_grad():
                self.scale.set_value(1 / (1 + x.abs().mean(0)))
            self.is_set.set_value(paddle.ones([1]))
        return x * self.scale


@part("iterator")
class Iterates(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.cycle([1.0, 0.5, 0.25])

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.numbers)


@part("counts for itself")
class Counts(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.twice_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.twice_calls += 1
        return x / (1 + self.twice_calls % 3)


@part("own tensor in place")
class InPlaceState(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.memory = paddle.ones([1])

    def forward(self, x: Tensor) -> Tensor:
        self.memory.add_(x.detach().mean())
        return x * self.memory.clone()


REFUSED = {"act norm"}
"""Parts that recompute refuses, and that run after a pass under ``paddle.no_grad``."""
UNDETECTED = {"iterator", "counts for itself", "own tensor in place", "remembered exception"}
"""Parts that the docstring of `recompute` lists under "Not detected"."""
UNDETECTED_IN_BETWEEN = {"class attribute", "thread local"}
"""The same, if the schedule goes on between the forward and the backward."""
WITH_PYLAYERS = {"fused linear", "fused linear with a gradient", "gradient reversal"}
"""Parts with a PyLayer."""
ANOTHER_ORDER = {"called twice", "spectral norm", "weight norm", "stochastic depth"}
"""Parts that use a parameter more than once in a call, or whose graph may be of any depth: where
gradients of several calls are added up, the order of the sum may be another one."""
TWICE_DIFFERENTIABLE = {
    "weight norm", "named parameters", "attribute", "global", "settings object", "class attribute",
    "thread local", "context variable", "list of settings", "tracker", "unused with gradient",
    "cache", "offset", "late buffer", "noise", "stochastic depth", "no_grad", "tensor hook",
    "view and in place", "codebook",
}  # fmt: skip
"""Parts of operators whose gradient Paddle can differentiate."""
