"""A Program of a compiled model is trusted after it was compared with eager execution.

Paddle's conversion is wrong in ways that no list of refusals covers. So each Program is compared at
its first step, at its 10th, 100th and 1,000th, with each new shape, and at its next step after a
sublayer, hook or number that the forward reads has become another, in a Layer, plain object, list,
dict, global or closure. Both run on copies, of parameters that are `displaced`: outputs, gradients
for a fixed random cotangent, buffers, attributes and random streams are those of the same state,
and nothing of the user's takes part.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle.amp import amp_state
from paddle_recompute._paddle.backward import is_last_backward, raise_in_caller, watch_backward
from paddle_recompute._paddle.flat import is_frozen
from paddle_recompute._paddle.layers import (
    is_initialized,
    own_parameters,
    statistics_among_parameters,
)
from paddle_recompute._paddle.saved_tensors import version_of
from paddle_recompute._paddle.static import compiled
from paddle_recompute._paddle.walk import ParameterWalk
from paddle_recompute.captured_state import ModelStamp, RngState
from paddle_recompute.comparison import (
    GRADIENT_OF,
    DifferenceError,
    ModelState,
    Occasions,
    Run,
    Seen,
    alias,
    clone,
    compare,
    cotangent,
    displaced,
    draws_elsewhere,
    isolated,
    moved,
    on_host,
)
from paddle_recompute.distributed import collective_fallback, is_distributed
from paddle_recompute.errors import StaticGraphError, first_sentence


class ProgramKeeper:
    """Makes, compares and refuses the Programs of `model`.

    Args:
        model: The compiled Layer.
        verify: Whether its Programs are compared.
        or_eager: Whether `model` goes on in eager execution when one is refused.

    Attributes:
        refusal: Why no Program runs any more; "" while they do.
    """

    def __init__(self, model: paddle.nn.Layer, *, verify: bool, or_eager: bool) -> None:
        self._model = weakref.ref(model)
        self._verify = verify
        self._or_eager = or_eager
        self._stamp: ModelStamp | None = None
        self._change = ""
        self._compared_since: set[Any] = set()
        self._made_for = _MadeFor(model)
        self._occasions: dict[Any, Occasions] = {}
        self.refusal = ""
        watch_backward()
        collective_fallback.take_part(model, self)

    @property
    def model(self) -> paddle.nn.Layer:
        """The compiled Layer."""
        model = self._model()
        assert model is not None
        return model

    @contextlib.contextmanager
    def converting(self) -> Iterator[None]:
        """Keep what the model has: the forward, run with symbols, would leave some in attributes,
        and a backward that is appended empties ``.grad`` (2.6, 3.x).
        """
        state = ModelState(self.model)
        try:
            yield
            if fault := draws_elsewhere(state.streams):
                raise StaticGraphError(fault)
        finally:
            state.restore()

    def check(self, made: compiled.Conversion) -> None:
        """Refuse what Paddle is known to convert wrongly, before it can crash.

        Raises:
            StaticGraphError: It is such a Program.
        """
        if made.has_loops:
            raise StaticGraphError(
                "its forward has a loop over tensors (while, or for over a tensor or one of its "
                "sizes), whose backward may fail or be wrong in a Program of Paddle; loop over "
                "numbers or Layers, or use an operator for the whole tensor"
            )
        if made.in_place:
            raise StaticGraphError(
                f"its forward calls {made.in_place}(), which changes nothing in a Program; use "
                f"{made.in_place[:-1]}() and its result"
            )
        if made.lost_write:
            raise StaticGraphError(
                f"{made.lost_write} writes to a tensor whose gradient is needed, and the backward "
                "of a Program of Paddle 3.3 passes by it; make a new tensor instead (paddle.where, "
                "paddle.concat)"
            )
        if made.num_outputs != 1:
            raise StaticGraphError(
                f"its forward returns {made.num_outputs} tensors, and Paddle (2.6, 3.3) may "
                "compute one of them in the memory of another, with wrong numbers; return one"
            )
        if made.calls_fleet:
            raise StaticGraphError(
                "it calls fleet's recompute, which to_static drops silently; call "
                "patch_fleet() before, or use recompute.engine: paddle_recompute"
            )

    def call(self, forward: compiled.CompiledForward, args: Any, kwargs: Any) -> Any:
        """What the forward of the model returns: of its Program, or of eager execution.

        Raises:
            StaticGraphError: The Program is refused, and the model does not go on without it.
        """
        reason = self.refusal or self._made_for.misfit(self.model)
        if not reason:
            try:
                program, args = forward.program(args, kwargs)
                kwargs = {}
            except (StaticGraphError, *compiled.CONVERSION_ERRORS) as error:
                reason = f"paddle.jit.to_static cannot convert it: {first_sentence(error)}"
            else:
                reason = program.misfit()
                if not reason and self._verify:
                    reason = self._reason_against(forward, program, args)
                if not reason:
                    return _watching_inputs(program.run(args), args)
            self.refusal = reason
        name = type(self.model).__name__
        if not self._or_eager:
            raise StaticGraphError(
                f"the Program of {name} is not its forward: {reason}. Change it, or use "
                "train.compile: auto (or_eager=True), which goes on in eager execution"
            )
        if is_distributed() and self.model.training and not collective_fallback.is_told():
            raise StaticGraphError(
                f"the Program of {name} is not its forward: {reason}. No GradientSync tells the "
                "other ranks to go on in eager execution; make one on all ranks, or do not compile"
            )
        self._go_on_without(reason)
        return forward.eager(*args, **kwargs)

    def follow(self) -> None:
        """Another rank has refused its Program; so does this one, from its next call on."""
        if not self.refusal:
            self.refusal = "another rank has refused its Program"
            if self._or_eager and self._model() is not None:
                self._go_on_without(self.refusal)

    def _go_on_without(self, reason: str) -> None:
        self.refusal = reason
        if not hasattr(self.model.forward, "rollback"):
            return  # the model is not compiled any more
        self.model.forward.rollback()
        said = f"{type(self.model).__name__} goes on in eager execution: {reason}"
        warnings.warn(said, stacklevel=3)

    def _reason_against(
        self, forward: compiled.CompiledForward, program: compiled.Program, args: Any
    ) -> str:
        """Why `program` is refused in this call; "" if it is equal, or not to be compared."""
        if self._stamp is not None and (change := self._stamp.change()):
            self._change, self._compared_since = change, set()
        mode = (program, self.model.training, paddle.is_grad_enabled())
        if mode not in self._occasions:
            self._occasions[mode] = Occasions(often=program.has_branches)
        kinds = [
            f"{leaf.shape}{leaf.dtype}"
            if _nested.is_tensor(leaf)
            else type(leaf)  # 1 is equal to True
            for leaf in _nested.leaves_of(args)
        ]
        is_due = self._occasions[mode].is_next_one(tuple(kinds))
        is_changed = bool(self._change) and mode not in self._compared_since
        if not is_due and not is_changed:
            return ""
        reason = _Comparison(self.model, forward, program, args).reason()
        self._stamp = ModelStamp(self.model)  # without what the eager run has changed
        self._compared_since.add(mode)
        return f"after '{self._change}' was changed, {reason}" if reason and is_changed else reason


def _watching_inputs(outputs: Any, args: Any) -> Any:
    """`outputs`; their backward raises if one of `args` was written to, as in eager execution."""
    trained = [tensor for tensor in _nested.tensors_in(outputs) if not tensor.stop_gradient]
    tensors = [*_nested.tensors_in(args)] if trained else []
    then = [*map(version_of, tensors)]

    def check(_: object) -> None:
        if [*map(version_of, tensors)] != then:
            error = StaticGraphError(
                "an input of a compiled model was changed in place between its forward and its "
                "backward, which may read other numbers; change a copy"
            )
            raise_in_caller(error)
            raise error
        if is_last_backward():  # `outputs` may live on
            tensors.clear()
            then.clear()

    for parameter in trained:
        parameter.register_hook(check)
    return outputs


class _MadeFor:
    """What a Program of `model` is made for: trained parameters, modes, mixed precision."""

    def __init__(self, model: paddle.nn.Layer) -> None:
        self._trained = _trained(model)
        self._modes = _modes(model)
        self._precision = _precision()
        self._walk = ParameterWalk(model)
        self._fitted: tuple[Any, Any] = None, None

    def misfit(self, model: paddle.nn.Layer) -> str:
        """Why no Program fits the model in this call; "" if one does."""
        if _precision() != self._precision:
            return (
                "it is called in another mixed precision than it was compiled in, and Paddle would "
                "run the same Program; call compile_model inside auto_cast, as the step does its "
                "forward"
            )
        parameters, layers = self._walk.parameters(), self._walk.layers
        flags = [*map(is_frozen, parameters), *map(attrgetter("training"), layers)]
        state = flags, paddle.is_grad_enabled()
        if layers and parameters is self._fitted[0] and state == self._fitted[1]:
            return ""
        fault = self._misfit(model)
        self._fitted = (None, None) if fault else (parameters, state)
        return fault

    def _misfit(self, model: paddle.nn.Layer) -> str:
        # Without a backward it does not matter what is frozen.
        known, now = self._trained, _trained(model)
        if not model.training:
            known, now = [(value, True) for value, _ in known], [(value, True) for value, _ in now]
        if now != known:
            return (
                "its parameters were replaced, frozen or unfrozen, and the Program does not know "
                "it; call model.forward.rollback() and compile_model again"
            )
        if not model.training and paddle.is_grad_enabled():
            return (
                "it is called in eval() with gradients on, and its Program for evaluation has no "
                "backward: call it under paddle.no_grad(); to train it without dropout, set the "
                "rates to 0 before compile_model"
            )
        expected = self._modes if model.training else [False] * len(self._modes)
        if _modes(model) != expected:
            return (
                "a sublayer of it was put into train() or eval() by itself, and the Program does "
                "not know it; call model.forward.rollback() and compile_model again"
            )
        return ""


def _trained(model: paddle.nn.Layer) -> list[tuple[int, bool]]:
    """Without the statistics of BatchNorms: a repeated forward reads them in copies."""
    return [
        (id(parameter), parameter.stop_gradient)
        for layer in model.sublayers(include_self=True)
        for name, parameter in own_parameters(layer).items()
        if parameter is not None and name not in statistics_among_parameters(layer)
    ]


def _modes(model: paddle.nn.Layer) -> list[bool]:
    return [layer.training for layer in model.sublayers(include_self=True)]


def _precision() -> tuple[Any, ...]:
    """The mixed precision in force; a Program is made for one."""
    state = amp_state()
    level = str(state.level)
    if level.endswith("O0"):
        return (level,)
    return (level, state.dtype, *map(frozenset, state.lists or ()), state.use_promote)


class _Comparison:
    """One call of `forward` in eager execution, and one of `program`."""

    def __init__(
        self,
        model: paddle.nn.Layer,
        forward: compiled.CompiledForward,
        program: compiled.Program,
        args: Any,
    ) -> None:
        self._model = model
        self._forward = forward
        self._program = program
        self._args = args
        self._backward = model.training and paddle.is_grad_enabled()
        self._state = ModelState(model)
        self._start = {
            name: _displaced(one, seed)
            for seed, (name, one) in enumerate(self._state.trained.items())
        }

    def reason(self) -> str:
        """Why the Program is not the forward; "" if it is."""
        try:
            compare(self._model, self._in_dygraph, self._in_program)
        except DifferenceError as difference:
            return str(difference)
        finally:
            self._state.restore()
        return ""

    def _in_dygraph(self, moved_by: int) -> Run:
        state = self._state
        with isolated({"": state}, values=self._start, moved_by=moved_by) as leaves:
            seen = self._run(self._forward.eager, leaves, state.buffers, moved_by)
            unseen = [
                f"eager execution sets '{name}', and a Program does not" for name in state.changes()
            ]
            fault = unseen[0] if unseen else draws_elsewhere(state.streams)
            return Run(seen, RngState.capture(), fault)

    def _in_program(self, expected: Seen) -> Seen:
        state, tensors = self._state, self._program.tensors()
        start = {id(state.trained[name]): tensor for name, tensor in self._start.items()}
        own = [
            clone(tensor)
            if tensor.stop_gradient and is_initialized(tensor)
            else alias(start.get(id(tensor), tensor))
            for tensor in tensors
        ]
        of = {id(tensor): other for tensor, other in zip(tensors, own, strict=True)}
        leaves = {
            name: of.get(id(parameter), alias(self._start[name]))
            for name, parameter in state.trained.items()
        }
        buffers = {name: of.get(id(buffer), buffer) for name, buffer in state.buffers().items()}
        state.streams.restore()
        try:
            return self._run(lambda *args: self._program.run(args, own), leaves, lambda: buffers)
        except compiled.CONVERSION_ERRORS as error:
            raise DifferenceError(f"it fails with {first_sentence(error)}") from error

    def _run(
        self,
        call: Callable[..., Any],
        leaves: Mapping[str, paddle.Tensor],
        buffers: Callable[[], Mapping[str, Any]],
        moved_by: int = 0,
    ) -> dict[str, Any]:
        """Everything that can be seen of a forward and, of a training step, of its backward."""
        args = _nested.map_tensors(lambda one: moved(one, moved_by), self._args)
        inputs = [*_nested.tensors_in(args)]
        outputs = [*_nested.tensors_in(call(*args))]
        seen = {f"output {number}": on_host(output) for number, output in enumerate(outputs)}
        if self._backward:
            roots = [output for output in outputs if not output.stop_gradient]
            if roots:
                paddle.autograd.backward(roots, [cotangent(root, moved_by) for root in roots])
            for number, tensor in enumerate(inputs):
                if not tensor.stop_gradient:
                    seen[f"{GRADIENT_OF}input {number}"] = on_host(tensor.grad)
            for name, leaf in leaves.items():
                seen[GRADIENT_OF + name] = on_host(leaf.grad, leaf.shape)
        for name, buffer in buffers().items():
            seen[f"the buffer '{name}'"] = on_host(buffer)
        for number, tensor in enumerate(inputs):
            seen[f"input {number} after the call"] = on_host(tensor)
        return seen


@paddle.no_grad()
def _displaced(parameter: paddle.Tensor, seed: int) -> paddle.Tensor:
    values = displaced(parameter.detach().astype("float32").numpy(), seed)
    other = paddle.to_tensor(values, place=parameter.place).astype(parameter.dtype)
    other.stop_gradient, other.name = parameter.stop_gradient, parameter.name
    return other
