"""One step of a model, and everything about it that can be compared with another one.

Every step starts from the same state: parameters, buffers, and the random streams of Paddle, NumPy
and Python are put back before it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute import _nested, _paddle
from paddle_recompute.errors import PaddleRecomputeError

Array = NDArray[Any]
ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, OSError)
"""What Paddle raises where a step goes wrong."""
_ROUNDING = 1e-6
"""Relative difference of norms that another order of sums explains, in float32."""


@dataclass(frozen=True)
class Output:
    """What one call of a sublayer returned, in a few numbers."""

    layer: str
    checksum: int
    norm: float
    is_finite: bool

    def is_as(self, other: Output) -> bool:
        """Whether both are equal but for rounding."""
        if self.checksum == other.checksum:
            return True
        return abs(self.norm - other.norm) <= _ROUNDING * max(abs(self.norm), 1e-30)


@dataclass
class Observation:
    """One step.

    Attributes:
        error: What ended it; then there is only what was seen before.
        loss: Its value.
        gradients: Of each trained parameter, by name; None where it got none.
        buffers: After the step, by name.
        next_random: What the random stream gives next.
        outputs: Of the forward, in the order in which the calls ended.
        repeated: Likewise of what was called again during the backward.
        grown: Lists and dicts of sublayers, or given to them, that the forward made longer.
    """

    error: BaseException | None = None
    loss: float = 0.0
    gradients: dict[str, Array | None] = field(default_factory=dict)
    buffers: dict[str, Array] = field(default_factory=dict)
    next_random: Array = field(default_factory=lambda: np.zeros(0))
    outputs: list[Output] = field(default_factory=list)
    repeated: list[Output] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)

    def calls(self) -> dict[str, int]:
        """How often each sublayer was called, in both passes."""
        count: dict[str, int] = {}
        for output in [*self.outputs, *self.repeated]:
            count[output.layer] = count.get(output.layer, 0) + 1
        return count


class State:
    """The parameters, buffers, gradients and random streams of a model, to be put back."""

    def __init__(self, model: paddle.nn.Layer) -> None:
        self._tensors = [
            (tensor, tensor.numpy().copy())
            for _, tensor in [*model.named_parameters(), *model.named_buffers()]
            if _paddle.is_initialized(tensor)
        ]
        self._slots = [
            (tensors, name, tensors[name])
            for layer in model.sublayers(include_self=True)
            for tensors, names in _paddle.non_trained_state(layer)
            for name in names
        ]
        self._gradients = [
            (parameter, parameter.grad.clone())
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
        self._model = model
        self._paddle = paddle.get_rng_state()
        self._numpy, self._python = np.random.get_state(), random.getstate()

    def restore(self) -> None:
        """Put everything back; gradients are cleared."""
        for tensors, name, tensor in self._slots:  # a forward may assign another tensor
            tensors[name] = tensor
        with paddle.no_grad():
            for tensor, value in self._tensors:
                tensor.set_value(value)
        for parameter in self._model.parameters():
            parameter.clear_gradient(False)
        paddle.set_rng_state(self._paddle)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    def __enter__(self) -> State:
        return self

    def __exit__(self, *_: object) -> None:
        """Put everything back, the gradients too."""
        self.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def observe(
    model: paddle.nn.Layer, state: State, step: Callable[[], paddle.Tensor], *, backward: bool
) -> Observation:
    """Make a step from `state` and look at it.

    Args:
        model: Whose sublayers are watched.
        state: What it starts from.
        step: Returns the loss.
        backward: Whether the backward of the loss is still to be made.
    """
    seen = Observation()
    # Not a list: recompute puts lists back that a second forward changes.
    calls: SimpleQueue[Output] = SimpleQueue()
    lengths: dict[int, int] = {}
    hooks = []
    state.restore()

    def before(name: str) -> Callable[..., None]:
        def hook(_: Any, inputs: Any) -> None:
            for value in inputs if isinstance(inputs, tuple | list) else ():
                if isinstance(value, list | dict):
                    lengths[id(value)] = len(value)

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(layer: Any, inputs: Any, output: Any) -> None:
            calls.put(_summary(name, output))
            for value in inputs if isinstance(inputs, tuple | list) else ():
                if isinstance(value, list | dict) and len(value) > lengths.get(id(value), 1 << 60):
                    seen.grown.append(name)

        return hook

    for name, layer in model.named_sublayers(include_self=True):
        hooks.append(layer.register_forward_pre_hook(before(name)))
        hooks.append(layer.register_forward_post_hook(after(name)))
    sizes = _sizes(model)
    try:
        loss = step()
        seen.grown += [
            place for place, size in _sizes(model).items() if size > sizes.get(place, size)
        ]
        seen.outputs = _taken(calls)
        if backward:
            loss.backward()
    except (PaddleRecomputeError, *ERRORS) as error:
        seen.error = error
        return seen
    finally:
        for one in hooks:
            one.remove()
        seen.repeated = _taken(calls)
    seen.loss = float(loss)
    seen.gradients = {
        name: None if parameter.grad is None else _as_float(parameter.grad)
        for name, parameter in model.named_parameters()
        if not parameter.stop_gradient
    }
    seen.buffers = {
        name: buffer.numpy().copy()
        for name, buffer in [*model.named_buffers(), *model.named_parameters()]
        # BatchNorm keeps its running statistics as parameters that are not trained.
        if buffer.stop_gradient and _paddle.is_initialized(buffer)
    }
    seen.next_random = paddle.rand([4]).numpy()
    return seen


def _taken(calls: SimpleQueue[Output]) -> list[Output]:
    return [calls.get() for _ in range(calls.qsize())]


def _as_float(tensor: paddle.Tensor) -> Array:
    array: Array = tensor.astype("float32").numpy()
    return array


def _summary(name: str, output: Any) -> Output:
    checksum, norm, is_finite = 0, 0.0, True
    for tensor in _nested.tensors_in(output):
        if tensor.is_floating_point():
            values = tensor.detach().astype("float32").numpy()
            is_finite &= bool(np.isfinite(values).all())
            norm += float(np.abs(values, dtype="float64").sum())
        else:
            values = tensor.numpy()
        checksum = zlib.crc32(np.ascontiguousarray(values).tobytes(), checksum)
    return Output(name, checksum, norm, is_finite)


def _sizes(model: paddle.nn.Layer) -> dict[str, int]:
    """Of the lists and dicts that are attributes of sublayers."""
    return {
        f"{name}.{attribute}".lstrip("."): len(value)
        for name, layer in model.named_sublayers(include_self=True)
        for attribute, value in vars(layer).items()
        if isinstance(value, list | dict) and not attribute.startswith("_")
    }
