"""Whether a Program computes what dygraph computes from the same state: when to look, and how.

Both are run on the same values. What can be seen of a run is compared array by array: to the bit,
or, where other kernels may have run, within a tolerance that is measured. For it dygraph runs again
with parameters, inputs and cotangents moved by one last bit; a Program may differ from the first
run by `_FACTOR` times what the second one does. A fixed relative tolerance does not serve: a
gradient that is zero in exact arithmetic, such as that of a bias before a BatchNorm, is rounding
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute import _nested
from paddle_recompute._paddle.amp import amp_state
from paddle_recompute._paddle.layers import is_initialized

Array = NDArray[Any]
Seen = Mapping[str, Array | None]
"""Of one run, by what it is, in the order of the forward; None: no gradient, which is zeros."""

STEPS = (1, 10, 100, 1000)
"""A Program is compared in these of its steps."""
GRADIENT_OF = "the gradient of "
"""The names of the gradients of parameters in `Seen` begin with it."""
_FACTOR = 30
"""Moving all numbers at once in another pattern of bits makes up to some times the difference."""
_MOST = 0.01
"""The largest tolerance: moved numbers may take another branch, and differ by everything."""
_ROUNDING = 1e-4
"""A gradient that is zero in exact arithmetic is below this part of the largest number."""
_FLOOR = 4
"""Last bits of the largest number of an array, which may always differ."""


_FIRST = 16


class Occasions:
    """When a Program is compared: in `STEPS`, and the first time with each shape.

    Args:
        often: In the first `_FIRST` steps and in every power of two, too. A Program with branches
            computes other things in other steps.
    """

    def __init__(self, *, often: bool = False) -> None:
        self._often = often
        self._calls = 0
        self._shapes: set[Any] = set()

    def is_next_one(self, shapes: Any) -> bool:
        """Count a step with inputs of `shapes` (hashable); whether the Program is compared in it.

        Args:
            shapes: Whatever a Program could have been made for wrongly.
        """
        self._calls += 1
        is_new = shapes not in self._shapes
        self._shapes.add(shapes)
        is_often = self._calls <= _FIRST or self._calls & (self._calls - 1) == 0
        return is_new or self._calls in STEPS or (self._often and is_often)


_NUMBERS = np.random.default_rng(0).standard_normal(65537).astype("float32")


def cotangent(output: paddle.Tensor, *, moved: bool = False) -> paddle.Tensor:
    """Fixed random numbers like `output`; a real loss can hide a fault in a gradient."""
    numbers = paddle.to_tensor(np.resize(_NUMBERS, output.shape)).astype(output.dtype)
    return moved_by_last_bit(numbers) if moved else numbers


@paddle.no_grad()
def moved_by_last_bit(tensor: paddle.Tensor, dtype: str | None = None) -> paddle.Tensor:
    """A copy of `tensor` whose numbers are moved up or down by one last bit; integers stay.

    The bit is that of the precision in which operators compute: of mixed precision, if it is on.

    Args:
        tensor: What is copied.
        dtype: That precision, where dygraph does not know it.
    """
    copied = tensor.detach().clone()
    if tensor.is_floating_point():
        state = amp_state()
        is_cast = tensor.dtype == paddle.float32 and not str(state.level).endswith("O0")
        step = _last_bit(dtype or (state.dtype if is_cast else tensor.dtype))
        signs = paddle.to_tensor(np.sign(np.resize(_NUMBERS[::-1], tensor.shape)))
        copied = copied * (1 + step * signs.astype(tensor.dtype))
    copied.stop_gradient = tensor.stop_gradient
    return copied


def _last_bit(dtype: Any) -> float:
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52}.get(
        _nested.dtype_name(dtype), 2.0**-23
    )


def on_host(tensor: paddle.Tensor | None, shape: Sequence[int] = ()) -> Array | None:
    """A copy of the numbers in host memory, where the first run waits for the second.

    Args:
        tensor: Sparse gradients too.
        shape: Of the parameter of a sparse gradient.
    """
    if tensor is None or not is_initialized(tensor):
        return None
    if tensor.is_selected_rows():  # dygraph does not add up its rows, a Program does
        rows = paddle.to_tensor(tensor.rows()).unsqueeze(-1)
        tensor = paddle.scatter_nd(rows, tensor._get_tensor_from_selected_rows(), shape)
    tensor = tensor.detach()
    if _nested.dtype_name(tensor.dtype) in ("bfloat16", "float16"):
        tensor = tensor.astype("float32")
    return np.array(tensor.numpy())


def difference(one: Array | None, other: Array | None) -> float:
    """The largest difference, relative to the largest number of both; 0.0: the same bits."""
    if one is None or other is None:
        one = np.zeros_like(other) if one is None and other is not None else one
        other = np.zeros_like(one) if other is None and one is not None else other
        if one is None or other is None:
            return 0.0
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"):
        return 0.0
    if one.dtype.kind != "f":
        return float("inf")
    scale = max(float(np.abs(one).max()), float(np.abs(other).max()))
    with np.errstate(all="ignore"):
        largest = float(np.abs(one.astype("float64") - other).max()) / scale
    return largest if largest == largest else float("inf")


def differences(expected: Seen, found: Seen, moved: Callable[[], Seen]) -> dict[str, float]:
    """What differs by more than the tolerance, and by how much, in the order of `expected`.

    Args:
        expected: Of dygraph.
        found: Of the Program.
        moved: Makes the run of dygraph with moved numbers; not called where all bits are equal.
    """
    if expected.keys() != found.keys():
        missing = expected.keys() ^ found.keys()
        return {name: float("inf") for name in [*expected, *found] if name in missing}
    sizes = {name: difference(expected[name], found[name]) for name in expected}
    if not any(sizes.values()):
        return {}
    others = moved()
    arrays = [array for array in expected.values() if array is not None and array.dtype.kind == "f"]
    largest = max((float(np.abs(array).max(initial=0)) for array in arrays), default=0.0)
    wrong = {}
    for name, size in sizes.items():
        noise = _FACTOR * difference(expected[name], others[name])
        if size <= max(min(noise, _MOST), _floor(expected[name])):
            continue
        # All of it may be rounding, if it is small beside the other numbers of the run.
        if size > noise or not _scale(expected[name], found[name]) <= _ROUNDING * largest:
            wrong[name] = size
    return wrong


def _scale(*arrays: Array | None) -> float:
    """The largest number."""
    return max((float(np.abs(a).max(initial=0)) for a in arrays if a is not None), default=0.0)


def _floor(array: Array | None) -> float:
    return _FLOOR * _last_bit(paddle.float32 if array is None else array.dtype)


def explain(model: paddle.nn.Layer, wrong: Mapping[str, float]) -> str:
    """`wrong`, of `differences`, in words that name the parameter and its Layer.

    A fault reaches the outputs behind it and the gradients of the parameters before it. So it lies
    behind the last parameter whose gradient is wrong, or, if an output is wrong, before that.
    """
    gradients = [name for name in wrong if name.startswith(GRADIENT_OF)]
    others = [name for name in wrong if name not in gradients]
    first, *more = [*others[:1], *gradients[-1:]]
    by = "" if wrong[first] == float("inf") else f" by {wrong[first]:.1e} of its largest number"
    too = "".join(f", and so does {_described(model, name)}" for name in more)
    return f"{_described(model, first)} differs{by} from that of eager execution{too}"


def _described(model: paddle.nn.Layer, name: str) -> str:
    parameter = name.removeprefix(GRADIENT_OF)
    if parameter == name or parameter not in dict(model.named_parameters()):
        return name
    path = parameter.rpartition(".")[0]
    kind = type(dict(model.named_sublayers(include_self=True))[path]).__name__
    where = f"the Layer '{path}' ({kind})" if path else kind
    return f"{GRADIENT_OF}the parameter '{parameter}' of {where}"
