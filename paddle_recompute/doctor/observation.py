"""One step of a model, and everything that can be compared with another step.

Before each step the state is restored: parameters, buffers, and the RNG state of Paddle, NumPy and
Python.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle.layers import is_initialized
from paddle_recompute.comparison import GRADIENT_OF, Array, Seen, StepState
from paddle_recompute.errors import PaddleRecomputeError

LOSS, BUFFER = "the loss", "the buffer "
"""What is seen of a step is named so; the name of the buffer follows."""
_ROUNDING = 1e-6
"""Relative difference of norms that another order of sums explains, in float32."""


class LossError(PaddleRecomputeError, ValueError):
    """`loss_fn` or `grad_cache` returned something else than a scalar loss."""


@dataclass(frozen=True)
class Output:
    """A summary of the output of one call of a sublayer."""

    layer: str
    checksum: int
    norm: float
    is_finite: bool

    def is_as(self, other: Output) -> bool:
        """Whether both are equal within rounding."""
        if self.checksum == other.checksum:
            return True
        return abs(self.norm - other.norm) <= _ROUNDING * max(abs(self.norm), 1e-30)


@dataclass
class Observation:
    """One step.

    Attributes:
        error: The exception that ended the step, or None. What follows it is empty then.
        loss: The value of the loss.
        gradients: Of each trained parameter, by name; None where it got none.
        sparse: The names of the parameters whose gradient is sparse (SelectedRows) and is not
            read.
        buffers: After the step, by name.
        next_random: The next numbers of the random stream.
        outputs: Of the forward, in the order in which the calls ended.
        repeated: The same, of the calls during the backward.
        grown: Names of lists and dicts that the forward made longer: attributes of sublayers, or
            their inputs.
    """

    error: BaseException | None = None
    loss: float = 0.0
    gradients: dict[str, Array | None] = field(default_factory=dict)
    sparse: list[str] = field(default_factory=list)
    buffers: dict[str, Array] = field(default_factory=dict)
    next_random: Array = field(default_factory=lambda: np.zeros(0))
    outputs: list[Output] = field(default_factory=list)
    repeated: list[Output] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)

    def seen(self) -> Seen:
        """What can be compared array by array."""
        return {
            LOSS: np.array(self.loss, "float32"),
            **{f"{GRADIENT_OF}{name}": gradient for name, gradient in self.gradients.items()},
            **{f"{BUFFER}{name}": buffer for name, buffer in self.buffers.items()},
        }

    def calls(self) -> dict[str, int]:
        """The number of calls of each sublayer, in forward and backward."""
        return Counter(output.layer for output in [*self.outputs, *self.repeated])


def observe(
    model: paddle.nn.Layer, state: StepState, step: Callable[[], paddle.Tensor], *, backward: bool
) -> Observation:
    """Make a step from `state` and observe it.

    Args:
        model: Its sublayers are observed.
        state: Restored before the step.
        step: Returns the loss.
        backward: Whether to call ``loss.backward()``; False if `step` does.
    """
    seen = Observation()
    # Not a list: recompute restores lists that the second forward changes.
    calls: SimpleQueue[Output] = SimpleQueue()
    lengths: dict[int, int] = {}
    hooks = []
    state.restart()

    def before(_: Any, inputs: Any) -> None:
        for value in inputs if isinstance(inputs, tuple | list) else ():
            if isinstance(value, list | dict):
                lengths[id(value)] = len(value)

    def after(name: str) -> Callable[..., None]:
        def hook(_: Any, inputs: Any, output: Any) -> None:
            calls.put(_summary(name, output))
            for value in inputs if isinstance(inputs, tuple | list) else ():
                if isinstance(value, list | dict) and len(value) > lengths.get(id(value), 1 << 60):
                    seen.grown.append(name)

        return hook

    for name, layer in model.named_sublayers(include_self=True):
        hooks.append(layer.register_forward_pre_hook(before))
        hooks.append(layer.register_forward_post_hook(after(name)))
    sizes = _sizes(model)
    try:
        loss = _checked(step())
        seen.grown += [
            place for place, size in _sizes(model).items() if size > sizes.get(place, size)
        ]
        seen.outputs = _taken(calls)
        if backward and not loss.stop_gradient:
            loss.backward()
    except Exception as error:  # of the model's own classes too: it becomes a finding
        seen.error = error
        return seen
    finally:
        for hook_handle in hooks:
            hook_handle.remove()
        seen.repeated = _taken(calls)
    seen.loss = float(loss.detach().astype("float32").item())
    seen.gradients = {
        name: None if parameter.grad is None else _as_float(parameter.grad)
        for name, parameter in model.named_parameters()
        if not parameter.stop_gradient
    }
    seen.sparse = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.is_selected_rows()
    ]
    seen.buffers = {
        name: buffer.numpy().copy()
        for name, buffer in [*model.named_buffers(), *model.named_parameters()]
        # BatchNorm keeps its running statistics as parameters that are not trained.
        if buffer.stop_gradient and is_initialized(buffer)
    }
    seen.next_random = paddle.rand([4]).numpy()
    return seen


def _checked(loss: Any) -> paddle.Tensor:
    """`loss` if it is a scalar that can have a gradient.

    Raises:
        LossError: It is not.
    """
    if not isinstance(loss, paddle.Tensor):
        raise LossError(f"it returns {type(loss).__name__}; return a Tensor with one element")
    if loss.size != 1:
        raise LossError(
            f"it returns a Tensor of shape {list(loss.shape)}; return one element, such as its mean"
        )
    if not loss.is_floating_point():
        raise LossError(f"it returns {loss.dtype}, which has no gradient; return floating point")
    return loss


def _taken(calls: SimpleQueue[Output]) -> list[Output]:
    return [calls.get() for _ in range(calls.qsize())]


def _as_float(gradient: paddle.Tensor) -> Array:
    if gradient.is_selected_rows():
        return np.zeros(0, "float32")  # a finding by itself; 2.6 cannot cast it
    array: Array = gradient.astype("float32").numpy()
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
    """The lengths of lists and dicts that are attributes of sublayers."""
    return {
        f"{name}.{attribute}".lstrip("."): len(value)
        for name, layer in model.named_sublayers(include_self=True)
        for attribute, value in vars(layer).items()
        if isinstance(value, list | dict) and not attribute.startswith("_")
    }
