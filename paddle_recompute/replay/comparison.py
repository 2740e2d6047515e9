"""Whether a Program computes what dygraph computes from the same state: when to look, and how.

Both are run on the same values (`compare`). What can be seen of a run is compared array by array:
to the bit, or, where other kernels may have run, within a tolerance that is measured. For it
dygraph runs again with parameters, inputs and cotangents moved by one last bit; a Program may
differ from the first run by `_FACTOR` times what the second one does. A fixed relative tolerance
does not serve: a gradient that is zero in exact arithmetic, such as that of a bias before a
BatchNorm, is rounding and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute import _nested
from paddle_recompute._paddle.amp import amp_state
from paddle_recompute._paddle.layers import is_initialized
from paddle_recompute.replay.model_state import ModelState, alias
from paddle_recompute.replay.random_streams import RngState

Array = NDArray[Any]
Seen = Mapping[str, Array | None]
"""Of one run, by what it is, in the order of the forward; None: no gradient, which is zeros."""

STEPS = (1, 10, 100, 1000)
"""A Program is compared in these of its steps."""
GRADIENT_OF = "the gradient of "
"""The names of the gradients of parameters in `Seen` begin with it."""
LATER = " in the step after it"
"""The names of what is seen in a second step of the run end with it."""
_FACTOR = 30
"""Moving all numbers at once in another pattern of bits makes up to some times the difference."""
_MOST = 0.01
"""The largest tolerance: moved numbers may take another branch, and differ by everything."""
_MOST_BITS = 8
"""The largest tolerance in last bits of the precision in which operators compute, if it is more: in
bfloat16 a gradient differs by 1 to 4 of them, as the CPU has other instructions."""
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


@dataclass(frozen=True)
class DygraphRun:
    """One run in dygraph.

    Attributes:
        seen: What was seen of it.
        end: Where it left the random streams.
        fault: What it does that no Program can repeat, in words; "" if nothing.
    """

    seen: Seen
    end: RngState
    fault: str = ""


@contextlib.contextmanager
def isolated(
    states: Mapping[str, ModelState], *, moved: bool, dtype: str | None = None
) -> Iterator[dict[str, paddle.Tensor]]:
    """Inside, the models of `states` run as `ModelState.isolated` says; gives the leaves that they
    read, by prefix and name of the parameter.

    Args:
        states: By the prefix of their parameters' names.
        moved: Whether the numbers of the leaves are moved by one last bit.
        dtype: As for `moved_by_last_bit`.
    """
    leaves = {
        f"{prefix}{name}": moved_by_last_bit(one, dtype) if moved else alias(one)
        for prefix, state in states.items()
        for name, one in state.trained.items()
    }
    with contextlib.ExitStack() as stack:
        for prefix, state in states.items():
            own = {name: leaves[f"{prefix}{name}"] for name in state.trained}
            stack.enter_context(state.isolated(own))
        yield leaves


def draws_elsewhere(start: RngState) -> str:
    """What is wrong with a forward that began at `start`, if it draws where no Program does."""
    moved = start.only_moved()
    if moved.numpy is None and moved.python is None:
        return ""
    return (
        "its forward draws from Python's random or from NumPy; a Program would repeat the number "
        "that was drawn while it was built. Draw with Paddle, or before the forward"
    )


def compare(
    model: paddle.nn.Layer,
    in_dygraph: Callable[[bool], DygraphRun],
    in_program: Callable[[Seen], Seen],
    agree: Callable[[str, bool], bool],
    dtype: str | None = None,
) -> None:
    """Compare a run of a Program of `model` with one in dygraph.

    Args:
        model: Whose parameters are named in a fault.
        in_dygraph: Runs dygraph, with moved numbers if the argument is true.
        in_program: Runs the Program from the same state; gets what was seen in dygraph.
        agree: ``agree(fault, wish)`` raises if any rank has a fault (not ""); returns whether any
            rank has the wish. The ranks call it equally often.
        dtype: As for `moved_by_last_bit`.
    """
    own = in_dygraph(False)
    agree(own.fault, False)
    found = in_program(own.seen)
    moved = own.end.only_moved()
    has_drawn = moved.generators is not None or moved.tracker is not None
    differ = own.seen.keys() != found.keys() or any(
        difference(own.seen[name], found[name]) for name in found
    )
    # All ranks make the run with moved numbers, or none: a loss may have collectives.
    if agree("it draws other random numbers than dygraph" if has_drawn else "", differ):
        other = in_dygraph(True).seen
        most = max(_MOST, _MOST_BITS * _last_bit(dtype or _precision()))
        wrong = differences(own.seen, found, other, most)
        agree(explain(model, wrong) if wrong else "", False)


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
        is_cast = tensor.dtype == paddle.float32
        step = _last_bit(dtype or (_precision() if is_cast else tensor.dtype))
        signs = paddle.to_tensor(np.sign(np.resize(_NUMBERS[::-1], tensor.shape)))
        copied = copied * (1 + step * signs.astype(tensor.dtype))
    copied.stop_gradient = tensor.stop_gradient
    return copied


def _precision() -> Any:
    """The dtype in which operators compute in dygraph now, with float32 operands."""
    state = amp_state()
    return paddle.float32 if str(state.level).endswith("O0") else state.dtype


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


def differences(expected: Seen, found: Seen, moved: Seen, most: float) -> dict[str, float]:
    """What differs by more than the tolerance, and by how much, in the order of `expected`.

    Args:
        expected: Of dygraph.
        found: Of the Program.
        moved: Of dygraph with moved numbers.
        most: The largest tolerance.
    """
    if expected.keys() != found.keys():
        missing = expected.keys() ^ found.keys()
        return {name: float("inf") for name in [*expected, *found] if name in missing}
    sizes = {name: difference(expected[name], found[name]) for name in expected}
    arrays = [array for array in expected.values() if array is not None and array.dtype.kind == "f"]
    largest = max((float(np.abs(array).max(initial=0)) for array in arrays), default=0.0)
    wrong = {}
    for name, size in sizes.items():
        noise = _FACTOR * difference(expected[name], moved[name])
        if size <= max(min(noise, most), _floor(expected[name])):
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
    wrong = {name: wrong[name] for name in wrong if not name.endswith(LATER)} or wrong
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
