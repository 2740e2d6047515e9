"""What people put into a block of a model: usual Layers, what is trained, settings of a schedule.

Every part is a Layer that maps ``[rows, WIDTH]`` to the same shape. An attribute whose name starts
with ``twice_`` changes in both forwards, as the docstring of `recompute` says. All else (other
attributes, buffers, gradients, random numbers) must be as after the plain call. The parts with a
state of their own are in `habit_states`.
"""

from __future__ import annotations

import contextvars
import threading
import types
from collections.abc import Callable
from typing import Any, ClassVar

import paddle
from paddle.autograd import PyLayer

Tensor = paddle.Tensor
Layer = paddle.nn.Layer
WIDTH = 4
ONE = paddle.nn.initializer.Constant(1.0)

TEMPERATURE = 1.0
SETTINGS = types.SimpleNamespace(temperature=1.0)
LOCAL = threading.local()
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("temperature", default=1.0)
PARTS: dict[str, Callable[[], Layer]] = {
    "layer norm": lambda: paddle.nn.LayerNorm(WIDTH),
    "batch norm": lambda: paddle.nn.BatchNorm1D(WIDTH),
    "weight norm": lambda: paddle.nn.utils.weight_norm(paddle.nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: paddle.nn.utils.spectral_norm(paddle.nn.Linear(WIDTH, WIDTH)),
    "dropout": lambda: paddle.nn.Dropout(0.3),
}


def part(name: str) -> Callable[[type[Layer]], type[Layer]]:
    """Register a class of parts."""

    def register(kind: type[Layer]) -> type[Layer]:
        PARTS[name] = kind
        return kind

    return register


def reset_settings() -> None:
    """Settings outside of Layers as at the start of a process."""
    global TEMPERATURE
    TEMPERATURE = SETTINGS.temperature = LOCAL.temperature = OfClass.temperature = 1.0
    CONTEXT.set(1.0)


# ----------------------------------------------------------------------------------- usual Layers


@part("linear")
class Dense(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)
        self.dropout = paddle.nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(paddle.nn.functional.gelu(self.linear(x)))


@part("frozen batch norm")
class FrozenBatch(paddle.nn.BatchNorm1D):
    """Detection models put their BatchNorm into eval mode in each forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.eval()
        return super().forward(x)


@part("attention")
class Attention(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = paddle.nn.MultiHeadAttention(WIDTH, 2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x.reshape([1, -1, WIDTH])).reshape([-1, WIDTH])


@part("lstm")
class Recurrent(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = paddle.nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.reshape([1, -1, WIDTH]))[0].reshape([-1, WIDTH])


@part("named parameters")
class Named(Layer):
    """Groups of an optimizer are told apart by names."""

    def __init__(self) -> None:
        super().__init__()
        weight = paddle.ParamAttr(learning_rate=0.5, need_clip=False)
        self.linear = paddle.nn.Linear(WIDTH, WIDTH, weight_attr=weight, bias_attr=False)
        self.gamma = self.create_parameter([1], default_initializer=ONE)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gamma


# ------------------------------------------------------------------------------ what is trained


@part("adapters")
class Adapters(Layer):
    """A frozen Linear with two adapters, one of which is trained; both are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.base = paddle.nn.Linear(WIDTH, WIDTH)
        self.down = paddle.nn.LayerList([paddle.nn.Linear(WIDTH, 2) for _ in range(2)])
        self.up = paddle.nn.LayerList([paddle.nn.Linear(2, WIDTH) for _ in range(2)])
        self.dropout = paddle.nn.Dropout(0.1)
        self.active = 0
        for parameter in self.base.parameters():
            parameter.stop_gradient = True
        self.train_adapter(0)

    def train_adapter(self, number: int) -> None:
        """Train one, freeze the other."""
        for layers in (self.down, self.up):
            for index, layer in enumerate(layers):
                for parameter in layer.parameters():
                    parameter.stop_gradient = index != number

    def forward(self, x: Tensor) -> Tensor:
        first, second = (
            up(down(self.dropout(x))) for down, up in zip(self.down, self.up, strict=True)
        )
        return self.base(x) + first + 0.5 * second


@part("one adapter")
class OneAdapter(Adapters):
    """Only the active adapter is computed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up[self.active](self.down[self.active](self.dropout(x)))


@part("adapters on features")
class OnFeatures(Adapters):
    """The operators of a frozen adapter have no input that needs a gradient, so save nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.detach())


class FusedLinear(PyLayer):
    """A product that adds the gradient of its weight to ``weight.main_grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return paddle.matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensor()
        of_weight = paddle.matmul(x, gradient, transpose_x=True)
        if hasattr(weight, "main_grad"):
            weight.main_grad.add_(of_weight)
            of_weight = None
        return paddle.matmul(gradient, weight, transpose_y=True), of_weight


@part("fused linear with a gradient")
class FusedWithGradient(Layer):
    """No ``main_grad`` was set up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([WIDTH, WIDTH])

    def forward(self, x: Tensor) -> Tensor:
        return FusedLinear.apply(x, self.weight)


@part("fused linear")
class Fused(FusedWithGradient):
    def __init__(self) -> None:
        super().__init__()
        self.weight.main_grad = paddle.zeros([WIDTH, WIDTH])


class Reverse(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * -ctx.strength


@part("gradient reversal")
class Reversal(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return Reverse.apply(x, self.temperature)


# -------------------------------------------------------------------------- settings of a schedule


class OfSetting(Layer):
    def temperature_now(self) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return paddle.tanh(x * self.temperature_now())


@part("attribute")
class OfAttribute(OfSetting):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def temperature_now(self) -> Any:
        return self.temperature


@part("global")
class OfGlobal(OfSetting):
    def temperature_now(self) -> Any:
        return TEMPERATURE


@part("settings object")
class OfSettings(OfSetting):
    def temperature_now(self) -> Any:
        return SETTINGS.temperature


@part("class attribute")
class OfClass(OfSetting):
    temperature: ClassVar[float] = 1.0

    def temperature_now(self) -> Any:
        return OfClass.temperature


@part("thread local")
class OfLocal(OfSetting):
    def temperature_now(self) -> Any:
        return LOCAL.temperature


@part("context variable")
class OfContext(OfSetting):
    def temperature_now(self) -> Any:
        return CONTEXT.get()


@part("list of settings")
class OfList(OfSetting):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0, 1.0]
        self.named = {"temperature": 1.0}

    def temperature_now(self) -> Any:
        return self.scales[-1] * self.named["temperature"]


def schedule(layer: Layer, value: float) -> None:
    """Give every setting below `layer` a new value."""
    global TEMPERATURE
    TEMPERATURE = SETTINGS.temperature = LOCAL.temperature = OfClass.temperature = value
    CONTEXT.set(value)
    for one in layer.sublayers(include_self=True):
        if isinstance(one, (OfAttribute, Reversal)):
            one.temperature = value
        elif isinstance(one, OfList):
            one.scales.append(value)
            one.named["temperature"] = value
        elif isinstance(one, paddle.nn.Dropout):
            one.p = value / 4
