"""Cases of the contract of `recompute`: what a training step leaves behind, whoever ran its blocks.

A case is a function that is given a `Run`: ``run(function, *args, **kwargs)`` is the plain call,
Paddle's recompute or ours. It does what a user would do and returns what a user can look at.
`case` makes a test of it, ours against the plain call, bit by bit, and lists it in `CASES`, from
which ``benchmarks.correctness`` makes its table.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base import framework

from paddle_recompute import _nested
from paddle_recompute._paddle.layers import is_parameter
from paddle_recompute._paddle.rng_state import hybrid_parallel_tracker
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import recompute

AUTO_CAST: Any = sys.modules["paddle.amp.auto_cast"]  # ``paddle.amp.auto_cast`` is a function
"""Has an AMP state beside that of the tracer, which ``GradScaler`` reads."""
Run = Callable[..., Any]
Seen = dict[str, Any]


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """One line of the contract.

    Attributes:
        section: The test module's name: ``"inputs"``, ``"randomness"``, ...
        title: What is special about it, in words.
        body: What a user does.
        settings: More arguments of `body`.
        expected: What must be seen, if that is not what the plain call shows.
        or_error: Whether a clear error is as good as the plain call's result.
        has_gradients: Whether a gradient is to be seen at all.
        is_listed: Whether it has a line of its own in the table of ``benchmarks.correctness``.
    """

    section: str
    title: str
    body: Callable[..., Seen]
    settings: dict[str, Any]
    expected: Seen | None = None
    or_error: bool = False
    has_gradients: bool = True
    is_listed: bool = True

    def observe(self, run: Run) -> Seen:
        """Flat: a readable place -> the plain Python or NumPy value there."""
        with clean_streams():
            found = self.body(run, **self.settings)
            found = dict(seen(found))
            if self.expected is None:
                found.update(state_of_the_process())
        return found

    def wanted(self) -> Seen:
        """What `observe` must find."""
        if self.expected is not None:
            return dict(seen(self.expected))
        found = self.observe(plain)
        gradients = [value for place, value in found.items() if place.startswith("grad of ")]
        assert not self.has_gradients or any(gradient is not None for gradient in gradients)
        return found


CASES: list[Case] = []


def case(
    title: str,
    *,
    expected: Seen | None = None,
    or_error: bool = False,
    has_gradients: bool = True,
    num_listed: int | None = None,
    **settings: list[Any],
) -> Callable[[Callable[..., Seen]], Callable[..., None]]:
    """Make a test of a case, or of one for each combination of `settings`.

    Only the first `num_listed` stand in the table: for variants that make a difference to this
    library alone.
    """

    def register(body: Callable[..., Seen]) -> Callable[..., None]:
        section = body.__module__.rpartition(".")[2].removeprefix("test_")
        cases = [
            Case(
                section,
                title.format(**given),
                body,
                given,
                expected,
                or_error,
                has_gradients,
                is_listed=num_listed is None or number < num_listed,
            )
            for number, given in enumerate(
                dict(zip(settings, values, strict=True))
                for values in itertools.product(*settings.values())
            )
        ]
        CASES.extend(cases)

        @pytest.mark.parametrize("one", cases, ids=[one.title for one in cases])
        def test(one: Case) -> None:
            wanted = one.wanted()
            try:
                found = one.observe(recompute)
            except RecomputeError:
                if one.or_error:
                    return
                raise
            lines = differences(found, wanted)
            assert not lines, "\n".join([f"{one.title}:", *lines])

        test.__name__ = body.__name__
        return test

    return register


def assert_as_plain(
    outcome: Callable[[Any], Any], ours: Any = recompute, plainly: Any = plain
) -> None:
    """What ``outcome(ours)`` returns is what ``outcome(plainly)`` does, bit by bit."""
    found: list[Seen] = []
    for given in (plainly, ours):
        with clean_streams():
            found.append(dict(seen(outcome(given))))
            found[-1].update(state_of_the_process())
    wanted, now = found
    assert any(v is not None for place, v in wanted.items() if place.startswith("grad of "))
    lines = differences(now, wanted)
    assert not lines, "\n".join(lines)


# ------------------------------------------------------------------------------ what can be seen


def seen(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The value, dtype and gradient of each tensor, and everything of a Layer that can change."""
    if isinstance(value, paddle.nn.Layer):
        for name, tensor in state_of(value).items():
            yield from seen(tensor, f"{place}.{name}")
        yield f"training flags of {place}", [m.training for m in value.sublayers(True)]
    elif isinstance(value, paddle.Tensor):
        yield place, array(value)
        yield f"kind of {place}", (str(value.dtype), value.stop_gradient)
        yield f"grad of {place}", None if value.grad is None else array(value.grad)
    elif isinstance(value, dict):
        yield f"keys of {place}", (type(value).__name__, list(value))
        for key, item in value.items():
            yield from seen(item, f"{place}[{key!r}]" if place else key)
    elif isinstance(value, (list, tuple)):
        yield f"type of {place}", (type(value).__name__, len(value))
        for index, item in enumerate(value):
            yield from seen(item, f"{place}[{index}]")
    elif hasattr(value, "__dataclass_fields__"):
        yield f"type of {place}", type(value).__name__
        yield from seen(vars(value), place)
    else:
        yield place, value


def state_of(layer: paddle.nn.Layer) -> dict[str, paddle.Tensor]:
    """Parameters and all buffers, also those that ``state_dict`` leaves out."""
    return {**layer.state_dict(), **dict(layer.named_parameters()), **dict(layer.named_buffers())}


def array(tensor: paddle.Tensor) -> np.ndarray:
    if tensor.is_selected_rows():
        tensor = paddle.to_tensor(tensor.get_selected_rows().get_tensor())
    return np.array(tensor.numpy())


def state_of_the_process() -> Seen:
    """Where the random streams stand, and modes that recompute must put back."""
    tracer = framework._dygraph_tracer()
    level, lists = str(tracer._amp_level), tracer._get_amp_op_list()
    return {
        "Paddle's stream afterwards": paddle.rand([4]).numpy(),
        "NumPy's stream afterwards": np.random.rand(),
        "Python's stream afterwards": random.random(),
        "grad mode afterwards": paddle.is_grad_enabled(),
        "AMP level afterwards": (level, tracer._amp_dtype, sorted(map(str, lists[0]))),
    }


def differences(found: Seen, wanted: Seen) -> list[str]:
    """One line for each place that shows something else than is wanted."""
    lines = []
    for place in [*wanted, *(place for place in found if place not in wanted)]:
        now, plainly = found.get(place, "nothing"), wanted.get(place, "nothing")
        if not same(now, plainly):
            lines.append(f"{place}: {short(now)} instead of {short(plainly)}")
    return lines


def same(one: Any, other: Any) -> bool:
    """Bit for bit; NaNs are equal."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return type(one) is type(other) and bool(one == other)


ANOTHER_ORDER = 1e-5
"""What a float32 sum of the cases' few terms may differ by when they are added in another order,
as a share of its largest term or of 1."""


def is_rounding(found: Seen, wanted: Seen) -> bool:
    """Whether nothing differs but gradients, and those as sums in another order do."""
    return found.keys() == wanted.keys() and all(
        place.startswith("grad of ")
        and isinstance(found[place], np.ndarray)
        and isinstance(value, np.ndarray)
        and found[place].shape == value.shape
        and np.abs(found[place] - value).max() <= ANOTHER_ORDER * max(1, np.abs(value).max())
        for place, value in wanted.items()
        if not same(found[place], value)
    )


def short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        start = " ".join(f"{number:.4g}" for number in value.ravel()[:2].tolist())
        return f"{value.dtype}{list(value.shape)} {start}{' ..' if value.size > 2 else ''}"
    return str(value)


@contextlib.contextmanager
def clean_streams() -> Iterator[None]:
    """All random streams from the same start, and fleet's tracker without states."""
    tracker = hybrid_parallel_tracker()
    tracker.reset()
    paddle.seed(1)
    np.random.seed(2)
    random.seed(3)
    yield
    tracker.reset()


# --------------------------------------------------------------------------------- what users do


class Using(paddle.nn.Layer):
    """A Layer whose forward is ``use(child, x)``."""

    def __init__(self, child: paddle.nn.Layer, use: Callable[..., paddle.Tensor]) -> None:
        super().__init__()
        self.child, self._use = child, use

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self._use(self.child, x)


class WarmingUp(paddle.nn.Layer):
    """Counts in Python beside a buffer, as the decay of a moving average does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", paddle.zeros([4]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        decay = min(0.9, (1 + self.calls) / (10 + self.calls))
        self.mean = decay * self.mean + (1 - decay) * x.detach().mean(0)
        return x * self.calls + self.mean


def leaf(*shape: int, dtype: str = "float32", stop_gradient: bool = False) -> paddle.Tensor:
    """A tensor of normal numbers that asks for a gradient."""
    tensor = paddle.randn(list(shape)).astype(dtype).detach()
    tensor.stop_gradient = stop_gradient
    return tensor


def upstream(value: Any) -> Any:
    """`value` with the tensors that want gradients behind an operator, as in a model; a leaf
    would show its gradient even if recompute lost the way from the block's inputs to it."""
    known: dict[int, paddle.Tensor] = {}

    def behind_an_operator(tensor: paddle.Tensor) -> paddle.Tensor:
        if tensor.stop_gradient or is_parameter(tensor):
            return tensor
        return known.setdefault(id(tensor), tensor * 2)

    return _nested.map_tensors(behind_an_operator, value)


def loss_of(outputs: Any) -> paddle.Tensor:
    """A number that depends on every element of the outputs that can have a gradient."""
    loss = paddle.zeros([])
    for number, tensor in enumerate(_nested.tensors_in(outputs), start=1):
        if tensor.is_floating_point() and not tensor.stop_gradient:
            loss = loss + number * tensor.astype("float32").square().sum()
    return loss


def step(run: Run, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Seen:
    """Forward and backward of one block whose inputs come from operators."""
    up_args, up_kwargs = upstream((args, kwargs))
    outputs = run(function, *up_args, **up_kwargs)
    loss = loss_of(outputs)
    if not loss.stop_gradient:
        loss.backward()
    found: Seen = {"outputs": outputs, "loss": loss, "args": args, "kwargs": kwargs}
    if isinstance(function, paddle.nn.Layer):
        found["layer"] = function
    return found
