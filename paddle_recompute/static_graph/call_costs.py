"""How long single calls of a model's Layers take as Programs, plain and recomputed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle.static import native, training
from paddle_recompute._paddle.static.marks import has_marks
from paddle_recompute.config import Config
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.replay import RngState
from paddle_recompute.static_graph._building import Recipe
from paddle_recompute.static_graph._feeds import Feeds
from paddle_recompute.static_graph._trained_program import ScopeState
from paddle_recompute.static_graph.minimize import append_gradients
from paddle_recompute.static_graph.strategy import distributed_strategy

Treatment = Callable[[paddle.nn.Layer], object]
LEAST_ROUNDS, MOST_ROUNDS = 2, 20
AFFORDABLE = 0.5
"""Seconds for the rounds of a call beyond the least; a round runs it once under each treatment."""


class ProgramCalls:
    """Times calls of the Layers of a model, each as a Program of its own.

    A Program has the forward and the backward of one call. The ranks exchange nothing. The weights
    are drawn: the model is in memory once more. The random streams stay as they are.

    Args:
        config: Of the `StaticTrainStep` whose calls they are.
        model_fn: As that of `StaticTrainStep`; called once for each Program, and once more.
    """

    def __init__(self, config: Config, model_fn: Callable[[], paddle.nn.Layer]) -> None:
        self._recipe = Recipe(config, model_fn, 0.0, None)
        self._strategy = distributed_strategy(config)
        self._strategy.recompute_configs = {"checkpoints": []}
        self._state: ScopeState | None = None

    def seconds(
        self, layer: str, inputs: Any, treatments: Mapping[str, Treatment]
    ) -> dict[str, float]:
        """The least time of forward and backward under each treatment; one run of each in turn.

        The start of a run, equal under all treatments, is part of it.

        Args:
            layer: The name of the Layer in the model.
            inputs: ``(args, kwargs)`` of the call, nested, with Tensors; those that need gradients
                get them.
            treatments: By name; each wraps parts of the Layer, or nothing.

        Returns:
            Seconds, by the names of `treatments`.

        Raises:
            StaticGraphError: The call cannot be built, or no output of it needs a gradient.
        """
        streams = RngState.capture()
        try:
            programs = {
                name: self._built(layer, inputs, treatment)
                for name, treatment in treatments.items()
            }
            self._round(programs)  # the executor prepares a Program in its first run
            began = time.perf_counter()
            rounds = [self._round(programs) for _ in range(LEAST_ROUNDS)]
            while len(rounds) < MOST_ROUNDS and time.perf_counter() - began < AFFORDABLE:
                rounds.append(self._round(programs))
        finally:
            streams.restore()
        return {name: min(one[name] for one in rounds) for name in treatments}

    def _round(self, programs: Mapping[str, _CallProgram]) -> dict[str, float]:
        found = {}
        for name, program in programs.items():
            began = time.perf_counter()
            self._run(program)
            found[name] = time.perf_counter() - began
        return found

    def _built(self, layer: str, inputs: Any, treatment: Treatment) -> _CallProgram:
        feeds = Feeds(inputs)
        recipe = self._recipe
        with training.static_mode():
            with recipe.program() as (main, startup):
                model = recipe.model(recompute=False)
                anchor = paddle.create_parameter([1], "float32", name="anchor")
                block = dict(model.named_sublayers(include_self=True))[layer]
                treatment(block)
                args, kwargs = _with_gradients(feeds.variables(), inputs, anchor)
                with recipe.mixed_precision():
                    outputs = block(*args, **kwargs)
                loss = _sum_of(outputs, layer)
                self._strategy.recompute = has_marks(native(), main)
                trained = [p for p in block.parameters() if not p.stop_gradient]
                with _silent():
                    append_gradients(loss, self._strategy, [anchor, *trained])
            if self._state is None:  # all Programs have the same parameters
                self._state = ScopeState.started(startup, {})
        return _CallProgram(loss, feeds.arrays(inputs), main)

    def _run(self, program: _CallProgram) -> None:
        assert self._state is not None
        self._state.run(program.main, program.feed, [program.loss], exchanges=False)


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
    needed = iter([one for _, one in _nested.named_leaves(inputs) if _nested.is_tensor(one)])

    def give(leaf: Any) -> Any:
        if not training.is_variable(leaf):
            return leaf
        tensor = next(needed)
        if tensor.stop_gradient or not tensor.is_floating_point():
            return leaf
        return leaf + anchor.astype(leaf.dtype)

    return _nested.map_leaves(give, variables)


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
