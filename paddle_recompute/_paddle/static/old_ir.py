"""The old representation of a Program (Paddle 2.6): what reading and changing one needs.

Nothing here decides anything about recompute; `recompute.program.old_ir` does. What is used, and
why no public API serves: ``Block.ops`` and ``Operator`` (names of inputs and outputs, attributes)
are half documented, and inserting or renaming in the middle (``Block._insert_op_without_sync``,
``Operator._rename_input``, the ``OpDesc`` behind them) is not at all. Everything here can go
with Paddle 2.6. The tests of ``tests/static_graph`` call all of it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle.base import core, framework

from paddle_recompute._paddle.static.attributes import (
    CLAIMED,
    OWN_ATTRIBUTES,
    SCOPE,
    refusing_unclaimed,
)

Operator = Any
"""A ``paddle.base.framework.Operator``."""
Block = Any
Variable = Any

VARIABLE = framework.Variable
HAS_FLEET = True
BATCH_NORM = "batch_norm"

EMPTY = "@EMPTY@"
"""Stands for an output that is not needed (``core.empty_var_name``)."""

_FORWARD = (0, 256)  # OpRole.Forward, and OpRole.Forward | OpRole.Loss
_BACKWARD = 1  # a bit of OpRole
_OPTIMIZE = 2  # a bit of OpRole
_CHECKPOINT = "recompute_checkpoint:"  # and the name; the value is that of the variable
FLOAT32 = "stays_in_float32"


# -------------------------------------------------------------------------------- reading


def main_block(program: paddle.static.Program) -> Block:
    """The block of `program` that is run; the bodies of cond and while are others."""
    return program.global_block()


def operations(program: paddle.static.Program) -> list[Operator]:
    """The operators of the `main_block` of `program`, in its order."""
    return list(main_block(program).ops)


def identity(operator: Operator) -> int:
    """What tells `operator` from others."""
    return id(operator)


def kind(operator: Operator) -> str:
    """What `operator` is called in Paddle: ``matmul_v2``."""
    return str(operator.type)


def computes(operator: Operator) -> bool:
    """Parameters and what is fed are no operators here."""
    return True


def key(variable: Variable) -> str:
    """What tells `variable` from others of its Program: its name."""
    return str(variable.name)


def program_of(variable: Variable) -> paddle.static.Program:
    """The Program that `variable` belongs to."""
    return variable.block.program


def is_forward(operator: Operator) -> bool:
    """Whether `operator` computes the loss."""
    return operator.attr("op_role") in _FORWARD


def is_backward(operator: Operator) -> bool:
    """Whether `operator` computes gradients."""
    return bool(operator.attr("op_role") & _BACKWARD)


def is_update(operator: Operator) -> bool:
    """Whether `operator` belongs to an optimizer."""
    return bool(operator.attr("op_role") & _OPTIMIZE)


def has_body(operator: Operator) -> bool:
    """Whether `operator` is control flow."""
    return bool(operator.has_attr("sub_block"))


def attribute(operator: Operator, name: str) -> Any:
    """A built-in attribute of `operator`."""
    return operator.attr(name)


def mask_of(dropout: Operator) -> str:
    """The mask that ``dropout`` returns."""
    return str(dropout.output("Mask")[0])


def statistics_of(batch_norm: Operator) -> list[str]:
    """The running statistics that ``batch_norm`` reads and writes."""
    return [*batch_norm.input("Mean"), *batch_norm.input("Variance")]


def inputs_of(operator: Operator) -> list[str]:
    """Names of what `operator` reads."""
    return [name for name in operator.input_arg_names if name != EMPTY]


def outputs_of(operator: Operator) -> list[str]:
    """Names of what `operator` writes."""
    return [name for name in operator.output_arg_names if name != EMPTY]


def named_in_bodies(operator: Operator) -> tuple[set[str], set[str]]:
    """What the operators in the bodies of `operator`, at any depth, read and write."""
    read: set[str] = set()
    written: set[str] = set()
    if has_body(operator):
        body = operator.block.program.block(operator._block_attr_id("sub_block"))
        for inner in body.ops:
            inner_read, inner_written = named_in_bodies(inner)
            read |= inner_read.union(inputs_of(inner))
            written |= inner_written.union(outputs_of(inner))
    return read, written


def shape_only_outputs(operator: Operator) -> set[str]:
    """Outputs of `operator` that have a shape but no memory (``XShape`` of reshape2 and others)."""
    if "XShape" not in operator.output_names:
        return set()
    return set(operator.output("XShape"))


def reads_values_of(operator: Operator, name: str) -> bool:
    """Whether `operator` reads the numbers in the variable `name`, not only its shape.

    The executor frees a tensor before an operator that declares "no need of the buffer" runs.
    """
    inputs = {slot: operator.input(slot) for slot in operator.input_names}
    slots = [slot for slot, names in inputs.items() if name in names]
    outputs = {slot: operator.output(slot) for slot in operator.output_names}
    try:
        shape_only = core.infer_no_need_buffer_slots(
            operator.type, inputs, outputs, operator.all_attrs()
        )
    except (RuntimeError, ValueError, TypeError):  # some operators have attributes it cannot take
        return True
    return any(slot not in shape_only for slot in slots)


def variable_of(block: Block, name: str) -> Variable | None:
    """The variable called `name`; None if the block has none."""
    return block.vars.get(name)


def is_persistable(variable: Variable | None) -> bool:
    """Whether `variable` lives from run to run, such as a parameter."""
    return variable is not None and bool(variable.persistable)


def written_parameters(program: paddle.static.Program) -> set[str]:
    """The variables that live from run to run and that operators of `program` write: statistics."""
    block = main_block(program)
    names = {name for operator in operations(program) for name in outputs_of(operator)}
    return {name for name in names if is_persistable(variable_of(block, name))}


def num_bytes(variable: Variable | None) -> int:
    """Size of `variable` in bytes; a dimension that is not known yet counts as 1."""
    shape = shape_of(variable)
    if shape is None:
        return 0
    dtype = dtype_name(variable)
    item_size = 2 if dtype in ("uint16", "bfloat16") else np.dtype(dtype).itemsize
    return int(math.prod(max(1, size) for size in shape) * item_size)


def shape_of(variable: Variable | None) -> tuple[int, ...] | None:
    """The shape of `variable`, -1 where it is not known until a batch is fed; None: no tensor."""
    return tuple(variable.shape) if variable is not None and is_dense(variable) else None


def text_attribute(operator: Operator, name: str) -> str | None:
    """The string that we wrote on `operator` under `name`, if any."""
    return str(operator.attr(name)) if operator.has_attr(name) else None


# ---------------------------------------------------------------------------------- marks


def other_than_intermediate(variable: Any) -> str | None:
    """What `variable` is, in words; None: an intermediate variable of a Program."""
    is_variable = isinstance(variable, framework.Variable)
    if is_variable and _definer(variable) is not None:
        return None
    kind = "a parameter or what is fed" if is_variable else "none"
    return f"a {type(variable).__name__} ({kind})"


def is_in_a_body(variable: Variable) -> bool:
    """Whether `variable` is made in the body of a cond or while."""
    return bool(variable.block.idx != 0)


def builds_a_body() -> bool:
    """Whether operators are added to the body of a cond or while now."""
    return bool(paddle.static.default_main_program().current_block().idx != 0)


def write_checkpoint(variable: Variable, name: str) -> None:
    """Write the checkpoint name `name` on the operator that computes `variable`.

    Renaming the variable would leave the caller with a Variable of another name than its own.
    """
    write_text(_definer(variable), f"{_CHECKPOINT}{name}", variable.name)


def checkpoints(program: paddle.static.Program) -> dict[str, str]:
    """What was marked: ``{checkpoint name: variable name}``, in Program order."""
    found = {}
    for operator in main_block(program).ops:
        if is_forward(operator):
            for attribute in operator.attr_names:
                if attribute.startswith(_CHECKPOINT):
                    found[attribute.removeprefix(_CHECKPOINT)] = str(operator.attr(attribute))
    return found


def write_text(operator: Operator, name: str, value: str) -> None:
    """Write an attribute of our own on `operator`; the executor does not look at it."""
    operator._set_attr(name, value)


def _definer(variable: Variable) -> Operator | None:
    if variable.persistable:
        return None
    for operator in reversed(variable.block.ops):
        if variable.name in operator.output_arg_names and is_forward(operator):
            return operator
    return None


# ------------------------------------------------------------------------ recomputed calls


@functools.cache
def refuse_other_backwards() -> None:
    """From now on, a backward over unclaimed recomputed calls raises.

    ``optimizer.minimize``, ``append_backward`` and ``paddle.static.gradients`` would keep every
    activation silently. All of them find the operators between parameters and loss with
    ``backward._find_op_path_`` (2.6), which they look up at each call, so it is wrapped, once.
    """
    from paddle.base import backward

    backward._find_op_path_ = refusing_unclaimed(
        backward._find_op_path_,
        lambda block, *_, **__: (
            (text_attribute(op, SCOPE), text_attribute(op, CLAIMED)) for op in block.ops
        ),
    )


# ------------------------------------------------------------------------------- building


def building_in(dtype: str, **lists: list[str]) -> contextlib.AbstractContextManager[None]:
    """`minimize` inserts the casts, when all is built."""
    return contextlib.nullcontext()


def lost_write(program: paddle.static.Program) -> str:
    """Paddle 2.6 refuses ``h[0] = y`` while a Program is built, and `to_static` is right."""
    return ""


@contextlib.contextmanager
def refusing_truth() -> Iterator[None]:
    """Inside, ``bool(variable)`` raises.

    A ``Variable`` (2.6) has no ``__bool__``, so ``if x.mean() > 0`` would be true once and for all.
    Paddle's own code asks whether there is a variable, and is answered.
    """

    def refuse(variable: Variable) -> bool:
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("paddle."):
            return True
        raise TypeError(
            "bool() of a variable, as in `if x.mean() > 0`, has no value while a Program is built; "
            "use paddle.static.nn.cond, paddle.where or a mask"
        )

    framework.Variable.__bool__ = refuse
    try:
        yield
    finally:
        del framework.Variable.__bool__


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """What is added to the Program inside is marked for the casts that come later."""
    block = paddle.static.default_main_program().current_block()
    first = len(block.ops)
    yield
    for operator in block.ops[first:]:
        write_text(operator, FLOAT32, "yes")


def updating(program: paddle.static.Program) -> contextlib.AbstractContextManager[None]:
    """Inside, operators belong to the update: fleet goes by their roles."""
    return program._optimized_guard([])  # type: ignore[no-any-return]


def persistable(
    name: str, like: Variable, startup: paddle.static.Program, program: paddle.static.Program
) -> Variable:
    """A variable that lives from run to run: zeros of the shape of `like`."""
    with paddle.static.program_guard(program, startup):
        return paddle.static.create_global_var(
            list(like.shape), 0.0, str(dtype_name(like)), persistable=True, name=name
        )


def dtype_name(variable: Variable) -> str:
    """``float32``, ``bfloat16``, ..."""
    return str(paddle.base.data_feeder.convert_dtype(variable.dtype))


def is_dense(variable: Variable) -> bool:
    """Whether `variable` is one ordinary tensor, not a list of rows."""
    return bool(variable.type == core.VarDesc.VarType.LOD_TENSOR)


def variables_after(startup: paddle.static.Program, scope: Any) -> list[str]:
    """The names of what `startup`, which has just run, has left in `scope`."""
    return [var.name for var in startup.list_vars() if var.persistable and is_dense(var)]


def add_in_place(total: Variable, value: Variable) -> None:
    """``total += value``, in the memory of `total`."""
    total.block.append_op(
        type="elementwise_add", inputs={"X": [total], "Y": [value]}, outputs={"Out": [total]}
    )


def fill_in_place(value: Variable, number: float) -> None:
    """Write `number` to every element, in the memory of `value`."""
    paddle.assign(paddle.full(list(value.shape), number, dtype_name(value)), value)


def editing(program: paddle.static.Program) -> contextlib.AbstractContextManager[None]:
    """Inside, operators are added to `program`."""
    return paddle.static.program_guard(program)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------- changing


def copy_before(
    block: Block, position: int, operator: Operator, renamed: dict[str, str], **attributes: str
) -> Operator:
    """Insert a copy of `operator` at `position`, as part of the backward.

    Args:
        block: Where.
        position: The copy's index among ``block.ops``.
        operator: What to copy; without a body.
        renamed: Other names for what it reads and writes.
        **attributes: Strings to write on the copy.
    """
    description = block.desc._insert_op(position)
    description.copy_from(operator.desc)
    for name in {*inputs_of(operator)} & renamed.keys():
        description._rename_input(name, renamed[name])
    for name in {*outputs_of(operator)} & renamed.keys():
        description._rename_output(name, renamed[name])
    _forget_marks(operator, description)
    return _own(block, position, description, attributes)


def _forget_marks(operator: Operator, description: Any) -> None:
    for attribute in operator.attr_names:
        if attribute.startswith(_CHECKPOINT) or attribute in OWN_ATTRIBUTES:
            description.remove_attr(attribute)


def _own(block: Block, position: int, description: Any, attributes: dict[str, str]) -> Operator:
    """The Python side of an operator that was described at `position`."""
    for name, value in {**attributes, "op_role": _BACKWARD}.items():
        description._set_attr(name, value)
    operator = framework.Operator(block, description)
    block.ops.insert(position, operator)
    return operator


def dropout_again_before(
    block: Block, position: int, operator: Operator, renamed: dict[str, str], **attributes: str
) -> Operator:
    """Insert at `position` what computes the output of the dropout `operator` from its mask.

    The backward of dropout is the same arithmetic as its forward, applied to another tensor, so
    no random number is drawn.
    """
    (x,), (out,) = operator.input("X"), operator.output("Out")
    description = block.desc._insert_op(position)
    # Copied for its attributes, whose C++ types `_set_attr` would change.
    description.copy_from(operator.desc)
    description.set_type("dropout_grad")
    for slot in operator.input_names:
        description.remove_input(slot)
    for slot in operator.output_names:
        description.remove_output(slot)
    description.set_input("Mask", operator.output("Mask"))
    description.set_input(framework.grad_var_name("Out"), [renamed.get(x, x)])
    description.set_output(framework.grad_var_name("X"), [renamed.get(out, out)])
    _forget_marks(operator, description)
    return _own(block, position, description, attributes)


def hold_back_before(block: Block, position: int, name: str, gradients: list[str]) -> None:
    """From `position` on, the variable `name` cannot be read before `gradients` exist.

    ``depend`` (2.6) computes nothing: it tells the executor that it writes the variable and reads
    the gradients. Without it the multi-threaded executor runs every copy as soon as a thread is
    idle, in the middle of the forward, and the memory is full again. The flag
    ``FLAGS_new_executor_sequential_run`` would serve too, but for all Programs of the process.
    """
    block._insert_op_without_sync(
        position,
        type="depend",
        inputs={"X": [name], "Dep": gradients},
        outputs={"Out": [name]},
        attrs={"op_role": _BACKWARD},
    )


def assign_before(block: Block, position: int, name: str, copy: str) -> None:
    """From `position` on, the variable `copy` has the values that `name` has there."""
    block._insert_op_without_sync(
        position,
        type="assign",
        inputs={"X": [name]},
        outputs={"Out": [copy]},
        attrs={"op_role": _BACKWARD},
    )


def new_variable_like(block: Block, name: str, suffix: str) -> str:
    """Make a variable like `name` for a copy of it; returns the copy's name."""
    original = block.var(name)
    copy = paddle.utils.unique_name.generate(f"{name}@{suffix}")
    block.create_var(
        name=copy,
        shape=original.shape,
        dtype=original.dtype,
        type=original.type,
        persistable=False,
        stop_gradient=original.stop_gradient,
    )
    return str(copy)


def rename_inputs(operators: Iterable[Operator], renamed: dict[str, str]) -> None:
    """Let `operators` read other variables."""
    for operator in operators:
        for name in {*inputs_of(operator)} & renamed.keys():
            operator._rename_input(name, renamed[name])


def copy_instead(operator: Operator) -> None:
    """Let ``share_data`` `operator` copy what it shares; inputs and outputs have the same names."""
    operator.desc.set_type("assign")


def finish_changes(program: paddle.static.Program) -> None:
    """To be called after the last change, before the Program is run."""
    program._sync_with_cpp()
