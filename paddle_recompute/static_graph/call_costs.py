"""What single calls of a model's Layers take as Programs, plain and recomputed."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle import memory
from paddle_recompute._paddle.static import training
from paddle_recompute._paddle.static.marks import has_marks
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.replay import RngState
from paddle_recompute.static_graph._building import ProgramBuilder, trained_parameters
from paddle_recompute.static_graph._feeds import Feeds
from paddle_recompute.static_graph._trained_program import ScopeState
from paddle_recompute.static_graph.minimize import append_gradients
from paddle_recompute.static_graph.options import HasStaticConfig, StaticConfig, static_config
from paddle_recompute.static_graph.strategy import distributed_strategy

_BALLAST = "ballast"
"""How many float32 are allocated between forward and backward."""
LEAST_OF = 4
"""Runs of which the least peak counts: the executor frees late on a CPU, in a thread of its own."""
Treatment = Callable[[paddle.nn.Layer], object]
LEAST_ROUNDS, MOST_ROUNDS = 2, 20
AFFORDABLE = 0.5
"""Seconds for the rounds of a call beyond the least; a round runs it once under each treatment."""


class ProgramCost(NamedTuple):
    """What one call takes as a Program.

    Attributes:
        seconds: The least time of a run.
        held: All bytes that are allocated between forward and backward, with the ballast.
        peak: The most bytes of a run, without a ballast.
    """

    seconds: float
    held: int
    peak: int


class ProgramCalls:
    """Measures calls of the Layers of a model, each as a Program of its own.

    A Program has the forward and the backward of one call. The ranks exchange nothing. The weights
    are drawn: the model is in memory once more. The random streams stay as they are. It
    goes in 0.3.

    Args:
        config: Of the `StaticTrainStep` whose calls they are.
        model_fn: As that of `StaticTrainStep`; called once for each Program.
    """

    def __init__(
        self, config: StaticConfig | HasStaticConfig, model_fn: Callable[[], paddle.nn.Layer]
    ) -> None:
        warnings.warn(
            "ProgramCalls goes in 0.3: plans measure the calls of a Program in dygraph, and the "
            "Program itself. Measure a step of a StaticTrainStep instead",
            DeprecationWarning,
            stacklevel=2,
        )
        config = static_config(config)
        self._builder = ProgramBuilder(config, model_fn, 0.0, None)
        self._strategy = distributed_strategy(config)
        self._strategy.recompute_configs = {"checkpoints": []}
        self._strategy.amp = False  # in PIR what can be cast is, while it is built; maybe nothing
        self._state: ScopeState | None = None

    def measure(
        self, layer: str, inputs: Any, treatments: Mapping[str, Treatment], ballast: int
    ) -> dict[str, ProgramCost]:
        """What forward and backward take under each treatment.

        Only differences mean something: what all treatments have alike is part of both, the start
        of a run, the weights and the output of the call.

        Args:
            layer: The name of the Layer in the model.
            inputs: ``(args, kwargs)`` of the call, nested, with Tensors; those that need gradients
                get them.
            treatments: By name; each wraps parts of the Layer, or nothing. The first must be
                possible in a Program; others that are not are left out.
            ballast: More bytes than the forward or the backward take. So many are allocated between
                the two, so that the peak of a run is there.

        Returns:
            By the names of `treatments`.

        Raises:
            StaticGraphError: The call cannot be built, or no output of it needs a gradient.
        """
        streams = RngState.capture()
        try:
            programs = self._all_built(layer, inputs, treatments)
            self._round(programs)  # the executor prepares a Program in its first run
            held, peaks = self._least_peaks(programs, ballast), self._least_peaks(programs, 0)
            began = time.perf_counter()
            rounds = [self._round(programs) for _ in range(LEAST_ROUNDS)]
            while len(rounds) < MOST_ROUNDS and time.perf_counter() - began < AFFORDABLE:
                rounds.append(self._round(programs))
        finally:
            streams.restore()
        return {
            name: ProgramCost(min(one[name] for one in rounds), held[name], peaks[name])
            for name in programs
        }

    def _all_built(
        self, layer: str, inputs: Any, treatments: Mapping[str, Treatment]
    ) -> dict[str, _CallProgram]:
        programs: dict[str, _CallProgram] = {}
        for name, treatment in treatments.items():
            try:
                programs[name] = self._built(layer, inputs, treatment)
            except StaticGraphError:
                if not programs:
                    raise
        return programs

    def _round(self, programs: Mapping[str, _CallProgram]) -> dict[str, float]:
        found = {}
        for name, program in programs.items():
            began = time.perf_counter()
            self._run(program, 0)
            found[name] = time.perf_counter() - began
        return found

    def _least_peaks(self, programs: Mapping[str, _CallProgram], ballast: int) -> dict[str, int]:
        # In turn, and of all that is allocated: what was there before a run may be freed in it.
        rounds = [
            {name: self._peak(program, ballast) for name, program in programs.items()}
            for _ in range(LEAST_OF)
        ]
        return {name: min(one[name] for one in rounds) for name in programs}

    def _peak(self, program: _CallProgram, ballast: int) -> int:
        memory.reset_peak()
        self._run(program, ballast)
        return memory.peak_bytes()

    def _built(self, layer: str, inputs: Any, treatment: Treatment) -> _CallProgram:
        feeds = Feeds(inputs)
        builder = self._builder
        with training.static_mode():
            with builder.program() as (main, startup):
                model = builder.model(recompute=False)
                anchor = paddle.create_parameter([1], "float32", name="anchor")
                block = dict(model.named_sublayers(include_self=True))[layer]
                treatment(block)
                args, kwargs = _with_gradients(feeds.variables(), inputs, anchor)
                with builder.mixed_precision():
                    outputs = block(*args, **kwargs)
                loss = _sum_of(outputs, layer) + _ballast()
                self._strategy.recompute = has_marks(main)
                with _silent():
                    append_gradients(loss, self._strategy, [anchor, *trained_parameters(block)])
            if self._state is None:  # all Programs have the same parameters
                self._state = ScopeState.started(startup, {}, {}, exchanges=False)
        return _CallProgram(loss, feeds.arrays(inputs), main)

    def _run(self, program: _CallProgram, ballast: int) -> None:
        assert self._state is not None
        feed = {**program.feed, _BALLAST: np.array([max(1, ballast // 4)], "int32")}
        self._state.run(program.main, feed, [program.loss], exchanges=False)


@dataclass
class _CallProgram:
    """PIR values must die before their Program, so they are first."""

    loss: Any
    feed: dict[str, Any]
    main: paddle.static.Program


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """That a treatment has no effect is no news here: it takes as long as the plain call."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger("paddle_recompute")
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def _with_gradients(variables: Any, inputs: Any, anchor: Any) -> Any:
    """`variables`, out of an operator of `anchor` where the Tensors of `inputs` need gradients."""
    given = iter([one for _, one in _nested.named_leaves(inputs)])

    def give(leaf: Any) -> Any:
        tensor = next(given)
        needs = _nested.is_tensor(tensor) and not tensor.stop_gradient
        if not needs or not tensor.is_floating_point():
            return leaf
        return leaf + anchor.astype(leaf.dtype)

    return _nested.map_leaves(give, variables)


def _ballast() -> Any:
    """Zero, float32; of as many zeros as are fed, which are gone when it is there."""
    size = paddle.static.data(_BALLAST, [1], "int32")
    return paddle.full(size, 0, "float32").max()


def _sum_of(outputs: Any, layer: str) -> Any:
    """A scalar whose backward needs the outputs, as that of the next Layer does."""
    terms = [
        one.astype("float32").square().sum()
        for _, one in _nested.named_leaves(outputs)
        if training.is_variable(one)
        and not one.stop_gradient
        and "float" in training.dtype_name(one.dtype)
    ]
    if not terms:
        raise StaticGraphError(f"no output of '{layer}' needs a gradient; it has no backward")
    return paddle.add_n(terms)
