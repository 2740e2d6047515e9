"""Calls and checkpoints are marked on the operators of a Program, in either representation."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import paddle

from paddle_recompute._paddle.static import native
from paddle_recompute._paddle.static.attributes import CLAIMED, DISCARD_OUTPUTS, KEPT, SCOPE
from paddle_recompute.errors import StaticGraphError


def mark_checkpoint(variable: Any, name: str) -> None:
    """Give `variable` the checkpoint name `name`.

    Raises:
        StaticGraphError: It is not an intermediate of the main block, or the name is taken.
    """
    own = native()
    other = own.other_than_intermediate(variable)
    if other is not None:
        raise StaticGraphError(
            f"mark_checkpoint(..., {name!r}): only an intermediate variable of a Program can be a "
            f"checkpoint, not {other}"
        )
    if own.is_in_a_body(variable):
        raise StaticGraphError(
            f"mark_checkpoint(..., {name!r}) was called inside a branch or loop body (cond, while);"
            " mark what the cond or while returns"
        )
    key = own.key(variable)
    if own.checkpoints(own.program_of(variable)).get(name, key) != key:
        raise StaticGraphError(
            f"the checkpoint name {name!r} is taken by another variable of this Program; "
            "give each its own"
        )
    own.write_checkpoint(variable, name)


_inside_a_call = False


@contextlib.contextmanager
def recomputed_call(layer: str, *, continues: bool, discard_outputs: bool) -> Iterator[None]:
    """What is added to the Program inside is one call of the recomputed `layer`.

    A call inside another is part of that one. Nothing happens to what is added but an attribute
    with the call's name: that of the layer, ``layer#2`` for its second call, and so on.

    Args:
        layer: Its name.
        continues: Whether it is the next part of the last call with that name.
        discard_outputs: Whether what later operators take from it is computed again too.

    Raises:
        StaticGraphError: It is called inside a branch or loop body.
    """
    global _inside_a_call
    if _inside_a_call:
        yield
        return
    own = native()
    if own.builds_a_body():
        raise StaticGraphError(
            f"recompute('{layer}') was called inside a branch or loop body (cond, while), whose "
            "operators Paddle runs once; put recompute around the cond or while, or take it away"
        )
    own.refuse_other_backwards()
    before = own.operations(paddle.static.default_main_program())
    _inside_a_call = True
    try:
        with _added() as added:
            yield
    finally:
        _inside_a_call = False
    calls = {own.text_attribute(mark, SCOPE) for mark in before}
    name = _name_of_call(layer, calls, continues=continues)
    for operation in added:
        own.write_text(operation, SCOPE, name)
        if discard_outputs:
            own.write_text(operation, DISCARD_OUTPUTS, "yes")


@contextlib.contextmanager
def kept_operators() -> Iterator[None]:
    """What is added to the Program inside is not computed again in a recomputed call."""
    with _added() as added:
        yield
    for operation in added:
        native().write_text(operation, KEPT, "yes")


@contextlib.contextmanager
def _added() -> Iterator[list[Any]]:
    """The operators that are added to the Program inside, and compute something; filled behind."""
    own, program = native(), paddle.static.default_main_program()
    known = {own.identity(operation) for operation in own.operations(program)}
    added: list[Any] = []
    yield added
    added += [
        operation
        for operation in own.operations(program)
        if own.identity(operation) not in known and own.computes(operation)
    ]


def has_marks(program: paddle.static.Program) -> bool:
    """Whether something in `program` is to be recomputed: a wrapped Layer, or a checkpoint."""
    own = native()
    scopes = (own.text_attribute(operation, SCOPE) for operation in own.operations(program))
    return any(scope is not None for scope in scopes) or bool(own.checkpoints(program))


def claim_recomputed_calls(program: paddle.static.Program) -> None:
    """Tell `refusing_unclaimed` that a pass will recompute the calls in `program`."""
    own = native()
    for operation in own.operations(program):
        if own.text_attribute(operation, SCOPE) is not None:
            own.write_text(operation, CLAIMED, "yes")


def _name_of_call(layer: str, calls: Collection[str | None], *, continues: bool) -> str:
    """``layer`` for its first call, ``layer#2`` for its second, and so on.

    Args:
        layer: Its name.
        calls: The names that the Program's operators have.
        continues: Whether it is the next part of the last call with that name.
    """
    number = 1
    while _numbered(layer, number) in calls:
        number += 1
    return _numbered(layer, max(1, number - 1) if continues else number)


def _numbered(layer: str, number: int) -> str:
    return layer if number == 1 else f"{layer}#{number}"
