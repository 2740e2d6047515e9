"""What ``paddle.jit.to_static(full_graph=True)`` makes of a Layer, under a `Keeper`.

``ASTStaticFunction.get_concrete_program`` (2.6, 3.x) converts, by ``ProgramCache._build_once``, and
returns what runs the Program, a ``PartialProgramLayer``. Its ``program`` appends the backward.
Without these names a conversion begins in the middle of a call, where its errors are mixed with
those of operators. Can go when ``to_static`` converts on request, and lets a caller look at each
Program before it runs.
"""

from __future__ import annotations

import contextlib
import re
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import paddle
from paddle.jit.dy2static.program_translator import (
    ASTStaticFunction,
    ProgramCache,
    StaticFunction,
)
from paddle.jit.dy2static.utils import Dygraph2StaticException

try:
    from paddle.jit.dy2static import parameter_recorder as recorders
except ImportError:  # 2.6, whose Programs name their parameters
    recorders = None

from paddle_recompute._paddle.layers import non_trained_state
from paddle_recompute._paddle.static import native
from paddle_recompute._paddle.static.training import in_program_order
from paddle_recompute.errors import StaticGraphError

CONVERSION_ERRORS = (
    Dygraph2StaticException,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What the conversion of a user's code raises; 2.6 and 3.x have no common base for it."""


@dataclass(frozen=True)
class Conversion:
    """What is in a Program.

    Attributes:
        calls_fleet: Calls of fleet's recompute (3.x), which Paddle marks with the attribute
            ``fwd_recompute_id`` and does not repeat.
        has_branches: Branches on the value of a tensor.
        has_loops: Loops over tensors. Their backward raises "The variable middle_0 should exist",
            or gives no gradient at all where the loop fills a list (3.3.1); 2.6.2 is right in some
            of them only.
        in_place: An operator that changes a tensor in eager execution (``add_``) and does not in a
            Program, as a warning of Paddle says (``paddle.utils.inplace_utils``; 2.6, 3.x); "" if
            there is none.
        lost_write: Where it writes to a tensor without its backward knowing; "" if it has none.
        num_outputs: How many tensors it returns.
    """

    calls_fleet: bool
    has_branches: bool
    has_loops: bool
    in_place: str
    lost_write: str
    num_outputs: int


def is_compiled(layer: paddle.nn.Layer) -> bool:
    """Whether ``paddle.jit.to_static`` has replaced the forward of `layer`."""
    return isinstance(layer.forward, StaticFunction)


class Keeper(Protocol):
    """Decides over the Programs of one Layer."""

    def converting(self) -> contextlib.AbstractContextManager[None]:
        """Around each conversion, which runs the forward with symbols and appends a backward."""

    def check(self, made: Conversion) -> None:
        """Raise what speaks against a Program, before its backward is appended."""

    def call(self, forward: CompiledForward, args: Any, kwargs: Any) -> Any:
        """What the forward returns."""


def compile_layer(
    layer: paddle.nn.Layer, input_spec: list[paddle.static.InputSpec], keeper: Keeper
) -> None:
    """Replace the forward of `layer`, in training, by its Program, with the Program's backward.

    Each further Program (of another Python argument, or for evaluation) is made as this one.
    """
    paddle.jit.to_static(layer, input_spec=input_spec, full_graph=True)
    forward = layer.forward
    forward.__class__ = CompiledForward
    forward.keeper = keeper
    forward._program_cache.__class__ = _Programs
    forward._program_cache.keeper = keeper
    forward.get_concrete_program(*input_spec, is_train=True)


class CompiledForward(ASTStaticFunction):
    """The forward of a compiled Layer."""

    keeper: Keeper

    def __deepcopy__(self, memo: Any) -> Any:
        """Refused: Paddle's copy (2.6, 3.x) would run the Program of the original's parameters."""
        raise StaticGraphError(
            "a compiled model cannot be copied: its Program holds its own parameters. Call "
            "model.forward.rollback(), copy it, and compile_model each of the two again"
        )

    def _perform_call(self, *args: Any, **kwargs: Any) -> Any:
        return self.keeper.call(self, args, kwargs)

    def program(self, args: Any, kwargs: Any) -> tuple[Program, tuple[Any, ...]]:
        """The Program for such arguments, and the arguments in its order; converts it if it is new.

        Raises:
            StaticGraphError: The keeper does not accept it.
            CONVERSION_ERRORS: It cannot be converted.
        """
        args, kwargs = self._function_spec.unified_args_and_kwargs(args, kwargs)
        _, program = self.get_concrete_program(*args, **kwargs, is_train=self._is_train_mode())
        return program, args

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The forward in dygraph, that of compiled sublayers too."""
        switch = self._program_trans  # as `paddle.jit.enable_to_static`, which cannot be asked
        before = switch.enable_to_static
        switch.enable_to_static = False
        try:
            return self._call_dygraph_function(*args, **kwargs)
        finally:
            switch.enable_to_static = before


class _Programs(ProgramCache):
    keeper: Keeper

    def _build_once(self, key: Any) -> tuple[Any, Program]:
        trains = bool(key.kwargs["is_train"])
        with self.keeper.converting(), paddle.enable_grad():
            with _warned_of() as messages, _without_remains():
                concrete, runner = super()._build_once(key)
            operators = list(_operators(concrete.main_program))
            outputs = paddle.utils.flatten(concrete.outputs)
            made = Conversion(
                calls_fleet=any(operator.has_attr("fwd_recompute_id") for operator in operators),
                has_branches=any(_name(operator) in _BRANCHES for operator in operators),
                has_loops=any(
                    _name(operator) in ("pd_op.while", "while") for operator in operators
                ),
                in_place=next((o[1] for o in map(_NOT_IN_PLACE.search, messages) if o), ""),
                lost_write=native().lost_write(concrete.main_program) if trains else "",
                num_outputs=sum(hasattr(output, "stop_gradient") for output in outputs),
            )
            self.keeper.check(made)
            runner.training = trains
            runner.program  # noqa: B018  its backward is appended when it is looked at
        return concrete, Program(runner, key.class_instance, has_branches=made.has_branches)


@contextlib.contextmanager
def _without_remains() -> Iterator[None]:
    """Drop what a conversion that fails inside leaves in the tables of `recorders` (3.x).

    Their keys are ids of Programs. A later Program at the same address took over the parameters of
    the failed one, whose memory is freed, and the process died (SIGSEGV in ``get_value_name``). Can
    go when Paddle clears them in a ``finally``.
    """
    before = [{*table} for table in tables_of_conversions()]
    try:
        yield
    except BaseException:
        for table, keys in zip(tables_of_conversions(), before, strict=True):
            for left in table.keys() - keys:
                del table[left]
        raise


def tables_of_conversions() -> list[dict[int, Any]]:
    """What Paddle's conversions have recorded, by the id of their Program."""
    if recorders is None:
        return []
    recorder = recorders._global_parameter_recorder
    in_place = recorders._global_inplace_map
    return [recorder.params_dict, recorder.tensor2value, in_place.params_dict]


_BRANCHES = ("pd_op.if", "conditional_block")


class Program:
    """One Program of a compiled Layer.

    ``PartialProgramLayer._params`` (2.6, 3.x) are the parameters and buffers that it reads, in the
    order in which each run is given them.

    Attributes:
        has_branches: Whether it has branches on the value of a tensor.
    """

    def __init__(self, runner: Any, layer: paddle.nn.Layer, *, has_branches: bool) -> None:
        self.has_branches = has_branches
        self._runner = runner
        self._layer = weakref.ref(layer)
        self._tensors: list[paddle.Tensor] = list(runner._params)
        places = {
            id(holder[key]): (holder, key)
            for sublayer in layer.sublayers(include_self=True)
            for holder, keys in non_trained_state(sublayer)
            for key in keys
        }
        self._buffers = [
            (index, tensor, *places[id(tensor)])
            for index, tensor in enumerate(self._tensors)
            if id(tensor) in places
        ]

    def misfit(self) -> str:
        """Why the buffers that the Layer has now are not for the Program; "" if they are."""
        for _, buffer, holder, key in self._buffers:
            now = holder.get(key)
            if now is not buffer and (
                not isinstance(now, paddle.Tensor) or _kind(now) != _kind(buffer)
            ):
                return (
                    f"the buffer '{key}' was replaced by something else than a tensor of its "
                    "shape, dtype and stop_gradient; call model.forward.rollback() and "
                    "compile_model again"
                )
        return ""

    def tensors(self) -> list[paddle.Tensor]:
        """What the Program reads: its parameters, and the buffers that the Layer has now, as eager
        execution does. A forward that is repeated reads copies of them.
        """
        now = self._tensors
        for index, buffer, holder, key in self._buffers:
            if holder.get(key) is not buffer:
                now = list(now) if now is self._tensors else now
                now[index] = holder.get(key)
        return now

    def run(self, args: Any, instead: list[paddle.Tensor] | None = None) -> Any:
        """What the Program returns.

        ``to_static`` runs operators that are ready first, first (3.3.1): two branches that draw
        random numbers get other ones than in eager execution. So the Program's calls are in its
        order; ``FLAGS_new_executor_sequential_run`` is read when Paddle prepares one.

        Args:
            args: In the order of the forward's parameters.
            instead: Leaves to read instead of `tensors`.
        """
        runner, layer = self._runner, self._layer()
        assert layer is not None
        runner.training = layer.training
        now = self.tensors() if instead is None else instead
        if now is not self._tensors:
            runner._params = [*map(_as, now, self._tensors)]
            if instead is not None and runner.training:
                # A backward asks the .grad of a parameter for its kind.
                runner._set_grad_type(runner._params, runner.program)
        try:
            with in_program_order():
                return runner(args)
        finally:
            runner._params = self._tensors


def _kind(tensor: paddle.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stop_gradient


def _as(tensor: paddle.Tensor, known: paddle.Tensor) -> paddle.Tensor:
    """`tensor` with the name of `known`, by which a Program knows it (2.6)."""
    if tensor is known:
        return known
    alias = tensor if tensor.is_leaf and not tensor.stop_gradient else tensor.detach()
    alias.name = known.name
    return alias


_NOT_IN_PLACE = re.compile(r"(\w+)\(\) is the same as \w+\(\) and does not perform inplace")

_shown: dict[Any, Any] = {}


@contextlib.contextmanager
def _warned_of() -> Iterator[list[str]]:
    """The messages of the warnings inside, which are shown as usual."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield messages
    for candidate in found:
        messages.append(str(candidate.message))
        warnings.warn_explicit(
            candidate.message,
            candidate.category,
            candidate.filename,
            candidate.lineno,
            registry=_shown,
        )


def _operators(program: Any) -> Iterator[Any]:
    """All of `program`, those of branches and loops too: a Program of PIR has one block, whose
    operators have blocks.
    """
    for block in program.blocks:
        yield from _with_inner(block.ops)


def _with_inner(operators: Iterable[Any]) -> Iterator[Any]:
    for operator in operators:
        yield operator
        for block in operator.blocks() if hasattr(operator, "blocks") else ():
            yield from _with_inner(block.ops)


def _name(operator: Any) -> str:
    """Of PIR with its dialect, ``pd_op.while``."""
    return str(operator.name() if hasattr(operator, "blocks") else operator.type)
