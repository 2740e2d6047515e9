"""An encoder as Programs of one chunk: a forward, and a forward with its backward.

The gradient of a chunk's vectors is fed, and the gradients of the parameters are added to variables
that live from run to run. So a step holds the activations of one chunk, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute import _nested
from paddle_recompute._paddle.static import native, training
from paddle_recompute._paddle.static.marks import has_marks
from paddle_recompute.contrastive import OwnBackward
from paddle_recompute.errors import DataError, StaticGraphError
from paddle_recompute.static_graph._building import ProgramBuilder, converted, trained_parameters
from paddle_recompute.static_graph._feeds import Feeds
from paddle_recompute.static_graph._trained_program import ScopeState
from paddle_recompute.static_graph.minimize import append_gradients, cast_forward
from paddle_recompute.static_graph.strategy import distributed_strategy

Encode = Callable[[Any, Any], Any]
_GRADIENT = "gradient_of_output_{}"


@dataclass
class _Forward:
    """The forward of a chunk as a Program. PIR values must die before their Program.

    Attributes:
        outputs: What the encoder returns, in float32.
        structure: Of `_nested.taken_out`: what it returns without them.
        paths: Where each of them is in it.
        dtypes: Of each, as the encoder returns it.
        main: The Program.
    """

    outputs: list[Any]
    structure: Any
    paths: list[str]
    dtypes: list[str]
    main: paddle.static.Program


@dataclass
class ChunkPrograms:
    """The Programs of chunks of one form.

    Attributes:
        feeds: Their feeds.
        forward: The forward alone.
        backward: Forward and backward; None: no parameter that is trained has a gradient.
        gradients: The parameters that have one, by name.
        statistics: What a forward changes for the next one, by name: that of BatchNorm.
    """

    feeds: Feeds
    forward: _Forward
    backward: _Forward | None
    gradients: list[str]
    statistics: set[str]

    @classmethod
    def build(cls, builder: ProgramBuilder, encode: Encode, feeds: Feeds) -> ChunkPrograms:
        """Build both Programs; parameters and sums of gradients have the same names in all.

        Raises:
            StaticGraphError: The encoder returns no vectors, or a gradient is sparse.
        """
        with builder.program() as (main, _):
            forward = _forward(builder, builder.model(recompute=False), encode, feeds, main)
            statistics = native().written_parameters(main)
            cast_forward(main, distributed_strategy(builder.config))
        with builder.program() as (main, startup):
            model = builder.model(recompute=True)
            backward = _forward(builder, model, encode, feeds, main)
            names: list[str] = []
            weighted = _weighted(backward) if trained_parameters(model) else None
            if weighted is not None:
                strategy = distributed_strategy(builder.config, model)
                # What is wrapped may be in the Program of another encoder.
                strategy.recompute = strategy.recompute and has_marks(main)
                strategy.recompute_configs = {"checkpoints": []}
                pairs = append_gradients(weighted, strategy, trained_parameters(model))
                _add_to_sums(pairs, main, startup)
                names = [parameter.name for parameter, _ in pairs]
        return cls(feeds, forward, backward if names else None, names, statistics)


class ProgramEncoder(OwnBackward):
    """An encoder whose chunks are runs of `ChunkPrograms`.

    Args:
        known: The Programs, one for each form of chunks.
        state: Where the variables are.
    """

    def __init__(self, known: list[ChunkPrograms], state: ScopeState) -> None:
        self._known = known
        self._state = state
        self._statistics = sorted({name for program in known for name in program.statistics})
        self._last: dict[str, NDArray[Any]] = {}

    def __call__(self, batch: Any) -> Any:
        programs, feed = self._programs_for(batch)
        forward = programs.forward
        arrays = self._state.run(forward.main, feed, forward.outputs, exchanges=False)
        return _as_tensors(forward, arrays, trained=programs.backward is not None)

    def state(self) -> dict[str, NDArray[Any]]:
        """The statistics; the same object as long as they do not change."""
        now = self._state.get(self._statistics)
        last = self._last
        if any(name not in last or not np.array_equal(now[name], last[name]) for name in now):
            self._last = now
        return self._last

    def backward(
        self, batch: Any, state: Mapping[str, NDArray[Any]], gradients: dict[str, paddle.Tensor]
    ) -> Any:
        programs, feed = self._programs_for(batch)
        backward = programs.backward
        assert backward is not None
        rows = next(iter(gradients.values())).shape[0]
        for number, output in enumerate(backward.outputs):
            gradient = gradients.get(backward.paths[number])
            if _is_floating(backward.dtypes[number]) and not output.stop_gradient:
                feed[_GRADIENT.format(number)] = (
                    np.zeros([rows, *output.shape[1:]], "float32")
                    if gradient is None
                    else gradient.astype("float32").numpy()
                )
        now = self._state.get(self._statistics)
        self._state.set(state)
        try:
            arrays = self._state.run(backward.main, feed, backward.outputs, exchanges=False)
        finally:
            self._state.set(now)
        return _as_tensors(backward, arrays, trained=True)

    def _programs_for(self, batch: Any) -> tuple[ChunkPrograms, dict[str, NDArray[Any]]]:
        faults = []
        for programs in self._known:
            try:
                return programs, programs.feeds.arrays(batch)
            except DataError as fault:
                faults.append(fault)
        raise faults[0]


def sum_of(parameter: str) -> str:
    """The variable that holds the sum of the gradients of the variable `parameter`.

    Without ``@GRAD``: the old representation takes a variable with it for a gradient of its own.
    """
    return f"{parameter}.sum_of_gradients"


def _forward(
    builder: ProgramBuilder, model: Any, encode: Encode, feeds: Feeds, main: paddle.static.Program
) -> _Forward:
    batch = feeds.variables()
    with converted("the encoder"), builder.mixed_precision():
        returned = encode(model, batch)
    structure, found = _nested.taken_out(returned, training.is_variable)
    leaves = _nested.named_leaves(returned, "output")
    paths = [path for path, leaf in leaves if training.is_variable(leaf)]
    dtypes = [training.dtype_name(output.dtype) for output in found]
    if not any(map(_is_floating, dtypes)):
        raise StaticGraphError(
            "the encoder of a gradient cache returned no floating-point variable, so the loss "
            "would get no vectors"
        )
    with native().in_float32():
        # bfloat16 fits into float32 to the last bit; NumPy has none.
        found = [
            output.astype("float32") if _is_floating(dtype) else output
            for output, dtype in zip(found, dtypes, strict=True)
        ]
    return _Forward(found, structure, paths, dtypes, main)


def _weighted(forward: _Forward) -> Any:
    """The scalar whose gradient is that of a chunk; None: no output has a gradient."""
    terms = []
    with native().in_float32():
        for number, output in enumerate(forward.outputs):
            if _is_floating(forward.dtypes[number]) and not output.stop_gradient:
                gradient = paddle.static.data(_GRADIENT.format(number), output.shape, "float32")
                terms.append((output * gradient).sum())
        return paddle.add_n(terms) if terms else None


def _add_to_sums(
    pairs: list[tuple[Any, Any]], main: paddle.static.Program, startup: paddle.static.Program
) -> None:
    own = native()
    with own.editing(main):
        for parameter, gradient in pairs:
            if not own.is_dense(gradient):
                raise StaticGraphError(
                    f"the gradient of '{parameter.name}' is sparse, and only dense gradients can "
                    "be added up over the chunks; create its embedding with sparse=False"
                )
            total = own.persistable(sum_of(parameter.name), parameter, startup, main)
            own.add_in_place(total, gradient)


def _as_tensors(forward: _Forward, arrays: list[Any], *, trained: bool) -> Any:
    """What the encoder returned, with Tensors of the dtypes that it returned."""

    def tensor(array: Any, dtype: str) -> paddle.Tensor:
        made = paddle.to_tensor(array).astype(dtype)
        made.stop_gradient = not (trained and _is_floating(dtype))
        return made

    return _nested.put_in(forward.structure, map(tensor, arrays, forward.dtypes))


def _is_floating(dtype: str) -> bool:
    return "float" in dtype
