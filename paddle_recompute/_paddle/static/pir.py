"""PIR, the representation of Paddle 3.3: every private call that reading and changing one needs.

Nothing here decides anything about recompute; `recompute.program.pir` does. What is used, and
why no public API serves: ``paddle.pir`` (operations, values, insertion points, ``IrMapping``) is
the only way to look at or change a PIR Program, and Paddle documents none of it;
``paddle._C_ops`` appends single operators without the layers of Python above them. Can go, name by
name, when Paddle documents a way to edit a Program.
The tests of ``tests/static_graph`` call all of it.

Two traps, both of 3.3: ``==`` between Values appends an ``equal`` operator (so they are compared
by `key`), and a Value that is still in a Python variable when its Program dies aborts the process
if an operator made that way uses it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import paddle
from paddle.base import core
from paddle.base.libpaddle import pir as libpir

from paddle_recompute._paddle.static.attributes import (
    CLAIMED,
    OWN_ATTRIBUTES,
    SCOPE,
    refusing_unclaimed,
)

Operation = Any
"""A ``paddle.pir.Operation``."""
Value = Any
"""A ``paddle.pir.Value``."""

VARIABLE = paddle.pir.Value
HAS_FLEET = False
BATCH_NORM = "pd_op.batch_norm_"
SHARE_DATA = "pd_op.share_data_"
"""Gives a second name to memory, and changes nothing."""

SOURCES = ("builtin.parameter", "builtin.constant", "pd_op.data", "pd_op.feed")
"""Operators that compute nothing: what they return was there before the Program ran."""

_CHECKPOINT = "recompute_checkpoint_"  # and the number of the result


# -------------------------------------------------------------------------------- reading


def operations(program: paddle.static.Program) -> list[Operation]:
    """The top-level operators of `program`, in its order."""
    return list(program.global_block().ops)


def program_of(value: Value) -> paddle.static.Program:
    """The Program that `value` belongs to."""
    return value.block.program


def identity(operation: Operation) -> int:
    """What tells `operation` from others."""
    return int(operation.id())


def kind(operation: Operation) -> str:
    """What `operation` is called in Paddle: ``pd_op.matmul``."""
    return str(operation.name())


def computes(operation: Operation) -> bool:
    """Whether `operation` is none of `SOURCES`."""
    return operation.name() not in SOURCES


def key(value: Value) -> str:
    """What tells `value` from others; ``==`` would append an operator."""
    return str(value.id)


def results_of(operation: Operation) -> list[Value]:
    """The results of `operation` that it really has (optional ones may be missing)."""
    return [value for value in operation.results() if value.initialized()]


def operands_of(operation: Operation) -> list[Value]:
    """The operands of `operation` that it really has."""
    return [value for value in operation.operands_source() if value.initialized()]


def defining_operation(value: Value) -> Operation | None:
    """The operator that returns `value`; None for an argument of the block."""
    return value.get_defining_op()


def users_of(value: Value) -> list[Operation]:
    """The top-level operators that use `value`, themselves or in a body (cond, while)."""
    return list(value.all_used_ops_in_same_block())


def reads_values_of(operation: Operation, value: Value) -> bool:
    """Whether `operation` reads the numbers in `value`, not only its shape.

    The executor frees a tensor before an operator that declares "no need of the buffer" runs.
    """
    places = [key(operand) for operand in operands_of(operation)]
    if places.count(key(value)) != 1:
        return True
    return not bool(operation.is_no_need_buffer(value))


def with_bodies(operation: Operation) -> Iterator[Operation]:
    """`operation`, and the operators in its bodies (cond, while) at any depth."""
    yield operation
    for block in operation.blocks():
        for inner in block.ops:
            yield from with_bodies(inner)


def in_place(operation: Operation) -> list[tuple[Value, Value]]:
    """The operands of `operation` whose memory it returns, each with the result that has it."""
    operands, results = operation.operands_source(), operation.results()
    pairs = [
        (operands[operand], results[result])
        for result, operand in libpir.get_op_inplace_info(operation).items()
    ]
    return [(a, b) for a, b in pairs if a.initialized() and b.initialized()]


def lost_write(program: paddle.static.Program) -> str:
    """Where the forward in `program` writes to a tensor, and a backward will not know of it; "" if
    it does so nowhere.

    After ``h[:, 0] = y`` and ``assign(y, h)`` what follows has the variable from before as its
    operand (3.3): the gradient passes by the write. `to_static` mends the first of the two. The
    gradient of ``set_value_``, which writes numbers, is all of that of its result, also what was
    overwritten. Whether the data of a step show it or not, such a backward is wrong.
    """
    written: dict[str, Operation] = {}
    for top in operations(program):
        for operation in with_bodies(top):
            for operand in operands_of(operation):
                if key(operand) in written:
                    return _line_of(written[key(operand)])
            for before, now in in_place(operation):
                has_none = before.stop_gradient and now.stop_gradient
                if has_none or before.persistable or not is_dense(before):
                    continue
                if operation.name() == "pd_op.set_value_":
                    return _line_of(operation)
                if operation.name() != SHARE_DATA:
                    written[key(before)] = operation
    return ""


def _line_of(operation: Operation) -> str:
    """The user's line that has appended `operation`; else what it is called."""
    stack = operation.attrs().get("op_callstack", [])
    theirs = str(Path(paddle.__file__).parent), str(Path(__file__).parents[2])
    lines = [
        code.strip()
        for file, code in pairwise(stack)
        if "File " in file and not any(folder in file for folder in theirs)
    ]
    return f"'{lines[-1]}'" if lines else operation.name()


def written_parameters(program: paddle.static.Program) -> set[str]:
    """The variables that live from run to run and that operators of `program` write: statistics."""
    names: dict[str, str] = {}  # by key of a value: whose memory it has
    written = set()
    for operation in operations(program):
        if operation.name() == "builtin.parameter":
            names[key(operation.result(0))] = attribute(operation, "parameter_name")
        for before, now in in_place(operation):
            name = names.get(key(before))
            if name is not None:
                names[key(now)] = name
                written.add(name)
    return written


def is_dense(value: Value) -> bool:
    """Whether `value` is one ordinary tensor, not a list, a sparse tensor or a stack."""
    return bool(value.is_dense_tensor_type())


def dtype_name(value: Value) -> str:
    """``float32``, ``bfloat16``, ...; empty for what is not one tensor."""
    return str(value.dtype).rpartition(".")[2] if is_dense(value) else ""


def num_bytes(value: Value) -> int:
    """Size of `value` in bytes; a dimension that is not known yet counts as 1."""
    shape = shape_of(value)
    if shape is None:
        return 0
    count: int = math.prod(max(1, size) for size in shape)
    return count * int(value.element_size())


def shape_of(value: Value) -> tuple[int, ...] | None:
    """The shape of `value`, -1 where it is not known until a batch is fed; None: no tensor."""
    return tuple(value.shape) if is_dense(value) else None


def text_attribute(operation: Operation, name: str) -> str | None:
    """The string that we wrote on `operation` under `name`, if any."""
    return operation.str_attr(name) if operation.has_attr(name) else None


def write_text(operation: Operation, name: str, text: str) -> None:
    """Write an attribute of our own on `operation`; the executor does not look at it."""
    operation.set_str_attr(name, text)


def attribute(operation: Operation, name: str) -> Any:
    """A built-in attribute of `operation`."""
    return operation.attrs()[name]


def has_body(operation: Operation) -> bool:
    """Whether `operation` is control flow."""
    return bool(operation.num_regions()) or operation.name().startswith("cf.")


def mask_of(dropout: Operation) -> str:
    """The `key` of the mask that ``pd_op.dropout`` returns."""
    return key(dropout.result(1))


def statistics_of(batch_norm: Operation) -> list[str]:
    """The `key` of the running statistics that ``pd_op.batch_norm_`` reads and writes."""
    return [key(batch_norm.operand_source(index)) for index in (1, 2)]


# ---------------------------------------------------------------------------------- marks


def write_checkpoint(value: Value, name: str) -> None:
    """Write the checkpoint name `name` on the operator that returns `value`.

    Names of intermediate Values do not exist in PIR.
    """
    operation = value.get_defining_op()
    index = [key(result) for result in results_of(operation)].index(key(value))
    names = _names(operation, index)
    if name not in names:
        write_text(operation, f"{_CHECKPOINT}{index}", "\n".join([*names, name]))


def _names(operation: Operation, index: int) -> list[str]:
    """The checkpoint names of a result; it may have several."""
    return (text_attribute(operation, f"{_CHECKPOINT}{index}") or "").splitlines()


def checkpoints(program: paddle.static.Program) -> dict[str, str]:
    """The keys of what was marked in `program`, in the order of its operators."""
    found = {}
    for operation in operations(program):
        for index, value in enumerate(results_of(operation)):
            found.update(dict.fromkeys(_names(operation, index), key(value)))
    return found


def other_than_intermediate(value: Any) -> str | None:
    """What `value` is, in words; None: an intermediate variable of a Program."""
    if not isinstance(value, paddle.pir.Value):
        return f"a {type(value).__name__}"
    operation = defining_operation(value)
    if operation is not None and computes(operation):
        return None
    kind = "an argument of a block" if operation is None else f"what {operation.name()} returns"
    return f"{kind} (a parameter or what is fed)"


def is_in_a_body(value: Value) -> bool:
    """Whether `value` is made in the body of a cond or while."""
    return bool(value.get_defining_op().get_parent_block() != program_of(value).global_block())


def builds_a_body() -> bool:
    """Whether operators are added to the body of a cond or while now."""
    block = paddle.pir.get_current_insertion_point().block()
    return bool(block != paddle.static.default_main_program().global_block())


# ------------------------------------------------------------------------------- changing


@contextlib.contextmanager
def editing(program: paddle.static.Program) -> Iterator[None]:
    """Inside, operators are added to `program` as they are, without automatic mixed precision.

    Afterwards new operators go to its end again: `insert_before` leaves Paddle elsewhere.
    """
    with paddle.static.program_guard(program), paddle.amp.auto_cast(enable=False):
        try:
            yield
        finally:
            paddle.pir.reset_insertion_point_to_end()


def insert_before(operation: Operation) -> None:
    """From now on, inside `editing`, new operators go before `operation`."""
    paddle.pir.set_insertion_point(operation)


def clone(operation: Operation, operands: Mapping[str, Value]) -> Operation:
    """A copy of `operation` at the insertion point, with other operands.

    Args:
        operation: What to copy; without a body.
        operands: The copy's operand by the `key` of the original's; the same if left out.
    """
    mapping = paddle.pir.IrMapping()
    for operand in operands_of(operation):
        mapping.add(operand, operands.get(key(operand), operand))
    regions, operand_list, successors = False, True, True
    copy = operation.clone(mapping, paddle.pir.CloneOptions(regions, operand_list, successors))
    for name in (*OWN_ATTRIBUTES, *(f"{_CHECKPOINT}{i}" for i in range(copy.num_results()))):
        if copy.has_attr(name):
            copy.erase_attr(name)
    return copy


def replace_uses(value: Value, other: Value, users: Iterable[Operation]) -> None:
    """Let `users` take `other` where they took `value`."""
    value.replace_grad_users_with(other, set(users))


def zero_after(value: Value) -> Value:
    """A zero, ``[]`` int64, that cannot be computed before `value` is.

    It is made of the count of elements alone, so no NaN or inf of `value` comes through. Paddle
    has an operator for the purpose, ``depend``, but its CPU kernel fails in PIR (3.3.1: "Input(X)
    and Output(Out) variable should be the same").
    """
    return paddle._C_ops.scale(paddle._C_ops.numel(value), 0.0, 0.0, True)


def can_wait(value: Value) -> bool:
    """Whether `after` has an operator for `value`."""
    return is_dense(value) and value.dtype in (*_FLOATS, *_INTEGERS)


def after(value: Value, zero: Value) -> Value:
    """A copy of `value`, to the last bit, that cannot be made before `zero` is.

    Subtracting +0.0 changes no float (adding it would turn -0.0 into +0.0); or-ing 0 changes no
    integer. Costs one copy of `value`, or nothing if `value` has no other use: the executor
    then makes the copy in its memory, without asking whether other variables have it too.
    """
    zero = paddle._C_ops.cast(zero, value.dtype)
    if value.dtype in _FLOATS:
        return paddle._C_ops.subtract(value, zero)
    return paddle._C_ops.bitwise_or(value, zero)


def copy_after(value: Value, zero: Value | None) -> Value:
    """As `after`, in memory of its own, whoever shares that of `value`.

    The executor makes a result in the memory of the first operand only, and of its size. What
    `can_wait` refuses is copied, but does not wait.
    """
    if not can_wait(value):
        return paddle._C_ops.transpose(value, list(range(len(value.shape))))
    if zero is None:
        zero = paddle._C_ops.full([], 0, paddle.int64, core.Place())
    if value.dtype in _FLOATS:
        one = paddle._C_ops.scale(zero, 1.0, 1.0, True)
        return paddle._C_ops.multiply(paddle._C_ops.cast(one, value.dtype), value)
    return paddle._C_ops.bitwise_or(paddle._C_ops.cast(zero, value.dtype), value)


def copy_operand(operation: Operation, value: Value) -> Value:
    """Let `operation` take a copy of its operand `value`; returns the copy."""
    insert_before(operation)
    copy = paddle._C_ops.assign(value)
    copy.stop_gradient = value.stop_gradient
    for name in OWN_ATTRIBUTES:
        if operation.has_attr(name):
            write_text(copy.get_defining_op(), name, operation.str_attr(name))
    replace_uses(value, copy, [operation])
    return copy


_FLOATS = (paddle.float32, paddle.bfloat16, paddle.float16, paddle.float64)
_INTEGERS = (paddle.bool, paddle.int32, paddle.int64, paddle.uint8, paddle.int8, paddle.int16)


def dropout_again(operation: Operation, operands: Mapping[str, Value]) -> Value:
    """What the ``pd_op.dropout`` `operation` returned, from its mask: no random number is drawn.

    The backward of dropout is the same arithmetic as its forward, applied to another tensor.
    """
    x, probability = (operation.operand_source(index) for index in (0, 2))
    attributes = operation.attrs()
    return paddle._C_ops.dropout_grad(
        operation.result(1),
        operands.get(key(x), x),
        operands.get(key(probability), probability),
        attributes["is_test"],
        attributes["mode"],
    )


# ------------------------------------------------------------------------------- building


def building_in(dtype: str, **lists: list[str]) -> contextlib.AbstractContextManager[None]:
    """Mixed precision at level O1 for what is built inside."""
    return paddle.amp.auto_cast(  # type: ignore[no-any-return]
        True, level="O1", dtype=dtype, **{name: value for name, value in lists.items() if value}
    )


def refusing_truth() -> contextlib.AbstractContextManager[None]:
    """``bool(variable)`` raises in PIR anyway."""
    return contextlib.nullcontext()


def in_float32() -> contextlib.AbstractContextManager[None]:
    """What is added to the Program inside is not cast by mixed precision."""
    return paddle.amp.auto_cast(enable=False)  # type: ignore[no-any-return]


def updating(program: paddle.static.Program) -> contextlib.AbstractContextManager[None]:
    """Operators have no roles in PIR."""
    return contextlib.nullcontext()


def persistable(
    name: str, like: Value | None, startup: paddle.static.Program, program: paddle.static.Program
) -> Value:
    """A variable that lives from run to run: zeros of the shape of `like`; int32 [1] if None."""
    dtype, shape = ("int32", [1]) if like is None else (like.dtype, list(like.shape))
    zeros = paddle.nn.initializer.Constant(0.0)
    with paddle.static.program_guard(program, startup):
        value = paddle.pir.core.create_persistable_value(dtype, shape, name, initializer=zeros)
    paddle.pir.reset_insertion_point_to_end()
    return value


def variables_after(startup: paddle.static.Program, scope: Any) -> list[str]:
    """The names of what `startup`, which has just run, has left in `scope`.

    ``Scope.local_var_names`` is public in name, not in the documentation (3.3).
    """
    return [str(name) for name in scope.local_var_names()]


def add_in_place(total: Value, value: Value) -> None:
    """``total += value``, in the memory of `total`."""
    paddle._C_ops.add_(total, value)


def fill_in_place(value: Value, number: float) -> None:
    """Write `number` to every element, in the memory of `value`."""
    paddle._C_ops.full_(value, list(value.shape), number, value.dtype, core.Place())


@functools.cache
def refuse_other_backwards() -> None:
    """From now on, a backward over unclaimed recomputed calls raises.

    ``optimizer.minimize``, ``append_backward`` and ``paddle.static.gradients`` would keep every
    activation silently. All go through ``ir_backward.calc_gradient_helper`` (3.3), which
    they look up at each call, so it is wrapped, once.
    """
    from paddle.autograd import ir_backward

    def marks(*_: Any, **__: Any) -> Iterator[tuple[str | None, str | None]]:
        for op in paddle.pir.get_current_insertion_point().block().ops:
            yield text_attribute(op, SCOPE), text_attribute(op, CLAIMED)

    ir_backward.calc_gradient_helper = refusing_unclaimed(ir_backward.calc_gradient_helper, marks)
