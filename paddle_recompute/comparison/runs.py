"""Whether a Program computes what dygraph computes from the same state: when to look, and how.

Both are run on the same values (`compare`). What can be seen of a run is compared array by array:
to the bit, or, where other kernels may have run, within a tolerance that is measured (`Rounding`).
For it dygraph runs again with parameters, inputs and cotangents moved by one last bit. A fixed
relative tolerance does not serve: a gradient that is zero in exact arithmetic, such as that of a
bias before a BatchNorm, is rounding and nothing else.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle.amp import amp_state
from paddle_recompute._paddle.layers import is_initialized
from paddle_recompute.captured_state import RngState
from paddle_recompute.comparison.arrays import (
    Array,
    Difference,
    Precision,
    Rounding,
    Seen,
    differences,
)
from paddle_recompute.comparison.model_state import ModelState, alias

STEPS = (1, 10, 100, 1000)
"""A Program is compared in these of its steps."""
GRADIENT_OF = "the gradient of "
"""The names of the gradients of parameters in `Seen` begin with it."""
LATER = " in the step after it"
"""The names of what is seen in a second step of the run end with it."""
_MOVED_RUNS = 3
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


@dataclass(frozen=True)
class Run:
    """One run in dygraph.

    Attributes:
        seen: What was seen of it.
        end: Where it left the random streams.
        fault: What it does that no Program can repeat, in words; "" if nothing.
    """

    seen: Seen
    end: RngState
    fault: str = ""


class DifferenceError(Exception):
    """A Program does not compute what dygraph computes."""


def alone(fault: str, wish: bool) -> bool:
    """Of a rank that compares by itself: raises `fault`, and returns the wish."""
    if fault:
        raise DifferenceError(fault)
    return wish


def compare(
    model: paddle.nn.Layer,
    in_dygraph: Callable[[int], Run],
    in_program: Callable[[Seen], Seen],
    agree: Callable[[str, bool], bool] = alone,
    dtype: str | None = None,
) -> None:
    """Compare a run of a Program of `model` with one in dygraph.

    Args:
        model: Whose parameters are named in a fault.
        in_dygraph: Runs dygraph; with a number above 0, on numbers that are `moved` by it.
        in_program: Runs the Program from the same state; gets what was seen in dygraph.
        agree: ``agree(fault, wish)`` raises if any rank has a fault (not ""); returns whether any
            rank has the wish. The ranks call it equally often.
        dtype: As for `moved`; then the comparison is coarse.
    """
    own = in_dygraph(0)
    agree(own.fault, False)
    found = in_program(own.seen)
    since = own.end.only_advanced()
    has_drawn = since.generators is not None or since.tracker is not None
    # All ranks make the runs with moved numbers, or none: a loss may have collectives.
    differ = bool(differences(own.seen, found))
    if agree("it draws other random numbers than dygraph" if has_drawn else "", differ):
        rounding = Rounding(own.seen, _coarsest(model, dtype), is_coarse=dtype is not None)
        for number in range(1, _MOVED_RUNS + 1):
            rounding.add(in_dygraph(number).seen)
        wrong = differences(own.seen, found, rounding)
        agree(explain(model, wrong) if wrong else "", False)


@contextlib.contextmanager
def isolated(
    states: Mapping[str, ModelState],
    *,
    values: Mapping[str, paddle.Tensor] | None = None,
    moved_by: int = 0,
    dtype: str | None = None,
) -> Iterator[dict[str, paddle.Tensor]]:
    """Inside, the models of `states` run as `ModelState.isolated` says; gives the leaves that they
    read, by prefix and name of the parameter.

    Args:
        states: By the prefix of their parameters' names.
        values: What the leaves have, by prefix and name; None: those of the model, in its memory.
        moved_by: As for `moved`.
        dtype: As for `moved`.
    """
    start = values or {
        f"{prefix}{name}": parameter
        for prefix, state in states.items()
        for name, parameter in state.trained.items()
    }
    leaves = {
        name: moved(tensor, moved_by, dtype) if moved_by else alias(tensor)
        for name, tensor in start.items()
    }
    with contextlib.ExitStack() as stack:
        for prefix, state in states.items():
            own = {name: leaves[f"{prefix}{name}"] for name in state.trained}
            stack.enter_context(state.isolated(own))
        yield leaves


def draws_elsewhere(start: RngState) -> str:
    """What is wrong with a forward that began at `start`, if it draws where no Program does."""
    since = start.only_advanced()
    if since.numpy is None and since.python is None:
        return ""
    return (
        "its forward draws from Python's random or from NumPy; a Program would repeat the number "
        "that was drawn while it was built. Draw with Paddle, or before the forward"
    )


_NUMBERS = np.random.default_rng(0).standard_normal(65537).astype("float32")


def cotangent(output: paddle.Tensor, moved_by: int = 0) -> paddle.Tensor:
    """Fixed random numbers like `output`; a real loss can hide a fault in a gradient."""
    numbers = paddle.to_tensor(np.resize(_NUMBERS, output.shape)).astype(output.dtype)
    return moved(numbers, moved_by)


@paddle.no_grad()
def moved(tensor: paddle.Tensor, number: int, dtype: str | None = None) -> paddle.Tensor:
    """A copy of `tensor` whose numbers are moved up or down by one last bit; integers stay.

    The bit is that of the precision in which operators compute: of mixed precision, if it is on.

    Args:
        tensor: The tensor to copy.
        number: Which pattern of up and down; 0: none.
        dtype: That precision, where dygraph does not know it.
    """
    copied = tensor.detach().clone()
    if number and tensor.is_floating_point():
        is_cast = tensor.dtype == paddle.float32
        own = Precision.of(_nested.dtype_name(tensor.dtype))
        step = (_precision(dtype) if is_cast or dtype else own).last_bit
        signs = np.sign(np.resize(np.roll(_NUMBERS[::-1], 9973 * number), tensor.shape))
        copied = copied * (1 + step * paddle.to_tensor(signs).astype(tensor.dtype))
    copied.stop_gradient = tensor.stop_gradient
    return copied


def displaced(array: Array, seed: int) -> Array:
    """`array` moved by up to an eighth, and zeros by up to 1/64: a gate that is still zero would
    hide what is wrong behind it.
    """
    if array.dtype.kind != "f":
        return array
    by = np.random.default_rng(seed).uniform(-1, 1, array.shape).astype(array.dtype)
    return np.where(array == 0, by / 64, array * (1 + by / 8)).astype(array.dtype)


def _precision(dtype: str | None = None) -> Precision:
    """In which operators compute with float32 operands: of `dtype`, or as dygraph does now."""
    state = amp_state()
    if dtype is None and not str(state.level).endswith("O0"):
        dtype = _nested.dtype_name(state.dtype)
    return Precision.of(dtype or "float32")


def _coarsest(model: paddle.nn.Layer, dtype: str | None) -> Precision:
    """The coarsest of `_precision` and the dtypes of the parameters of `model`."""
    kinds = {_nested.dtype_name(parameter.dtype) for parameter in model.parameters()}
    return max([_precision(dtype), *map(Precision.of, kinds)], key=lambda one: one.last_bit)


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


def explain(model: paddle.nn.Layer, wrong: Mapping[str, Difference]) -> str:
    """`wrong`, of `differences`, in words that name the parameter and its Layer.

    A fault reaches the outputs behind it and the gradients of the parameters before it. So it lies
    behind the last parameter whose gradient is wrong, or, if an output is wrong, before that.
    """
    wrong = {name: wrong[name] for name in wrong if not name.endswith(LATER)} or wrong
    gradients = [name for name in wrong if name.startswith(GRADIENT_OF)]
    others = [name for name in wrong if name not in gradients]
    first, *more = [*others[:1], *gradients[-1:]]
    size = wrong[first].size
    by = "" if size == math.inf else f" by {size:.1e} of its largest number"
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
