"""What ``paddle.jit.to_static(full_graph=True)`` makes of a Layer, before it is called.

``ASTStaticFunction.get_concrete_program`` (2.6, 3.x) converts, and returns the layer that runs the
Program. Its ``train_program`` (3.x; 2.6: ``program``) appends the backward. Without these names
a conversion begins in the middle of the first call, where its errors are mixed with those of
operators. Can go when ``to_static`` converts on request.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.jit.dy2static.program_translator import ASTStaticFunction, StaticFunction
from paddle.jit.dy2static.utils import Dygraph2StaticException

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
        has_loops: Loops over tensors. Their backward raises "The variable middle_0 should exist",
            or gives no gradient at all where the loop fills a list (3.3.1); 2.6.2 is right in some
            of them only.
        in_place: An operator that changes a tensor in eager execution (``add_``) and does not in a
            Program, as a warning of Paddle says (``paddle.utils.inplace_utils``; 2.6, 3.x); "" if
            there is none.
        num_outputs: How many tensors it returns.
    """

    calls_fleet: bool
    has_loops: bool
    in_place: str
    num_outputs: int


def is_compiled(layer: paddle.nn.Layer) -> bool:
    """Whether ``paddle.jit.to_static`` has replaced the forward of `layer`."""
    return isinstance(layer.forward, StaticFunction)


def compile_layer(
    layer: paddle.nn.Layer, input_spec: list[paddle.static.InputSpec], *, train: bool
) -> Conversion:
    """Replace the forward of `layer` by its Program, and append the Program's backward.

    ``to_static`` runs operators that are ready first, first (3.3.1): two branches that draw random
    numbers get other ones than in eager execution. So the Program's calls are in its order;
    ``FLAGS_new_executor_sequential_run`` is read when Paddle prepares one.
    """
    paddle.jit.to_static(layer, input_spec=input_spec, full_graph=True)
    layer.forward.__class__ = _InProgramOrder
    with _warned_of() as messages:
        program, runner = layer.forward.get_concrete_program(*input_spec, is_train=train)
    operators = list(_operators(program.main_program))
    has_loops = any(_name(operator) in ("pd_op.while", "while") for operator in operators)
    # Each of them is made when it is looked at. Of a loop it is of no use, as the caller refuses
    # it, and the process crashes at times while it is made (3.3.1: SIGSEGV).
    if not has_loops:
        runner.program if train else runner.infer_program  # noqa: B018
    leaves = paddle.utils.flatten(program.outputs)
    outputs = [leaf for leaf in leaves if hasattr(leaf, "stop_gradient")]
    return Conversion(
        calls_fleet=any(operator.has_attr("fwd_recompute_id") for operator in operators),
        has_loops=has_loops,
        in_place=next((one[1] for one in map(_NOT_IN_PLACE.search, messages) if one), ""),
        num_outputs=len(outputs),
    )


_NOT_IN_PLACE = re.compile(r"(\w+)\(\) is the same as \w+\(\) and does not perform inplace")

_shown: dict[Any, Any] = {}


@contextlib.contextmanager
def _warned_of() -> Iterator[list[str]]:
    """The messages of the warnings inside, which are shown as usual."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield messages
    for one in found:
        messages.append(str(one.message))
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno, registry=_shown)


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


class _InProgramOrder(ASTStaticFunction):
    def __deepcopy__(self, memo: Any) -> Any:
        """Refused: Paddle's copy (2.6, 3.x) would run the Program of the original's parameters."""
        raise StaticGraphError(
            "a compiled model cannot be copied: its Program holds its own parameters. Call "
            "model.forward.rollback(), copy it, and compile_model each of the two again"
        )

    def _perform_call(self, *args: Any, **kwargs: Any) -> Any:
        with in_program_order():
            return super()._perform_call(*args, **kwargs)
