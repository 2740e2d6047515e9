"""Names for the intermediate variables of a Program at which recompute segments end."""

from __future__ import annotations

import itertools
from typing import Any

from paddle_recompute._paddle.static import marks, native
from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute.errors import StaticGraphError


def mark_checkpoint(variable: Any, name: str) -> Any:
    """Give `variable`, an intermediate of the Program being built, the checkpoint name `name`.

    Recompute keeps this variable from the forward to the backward and recomputes what lies between
    two of them. ``strategy.recompute_configs["checkpoints"]`` selects by these names. A Layer
    wrapped by `apply_recompute` marks its output itself, with its name in the model.

    Costs nothing: no operator is added.

    Args:
        variable: Any shape and dtype; an output of an operator (no feed, no parameter).
        name: Not empty, and not that of another variable of the Program.

    Returns:
        `variable` itself.

    Raises:
        StaticGraphError: No Program is being built, `variable` is not the output of an operator,
            or the name is taken.

    Examples:
        >>> import paddle
        >>> from paddle_recompute.static_graph import mark_checkpoint
        >>> paddle.enable_static()
        >>> program = paddle.static.Program()
        >>> with paddle.static.program_guard(program):
        ...     x = paddle.static.data("x", [8, 4])
        ...     hidden = mark_checkpoint(paddle.nn.Linear(4, 4)(x), "hidden")
        >>> paddle.disable_static()
    """
    if is_dygraph():
        raise StaticGraphError(
            f"mark_checkpoint(..., {name!r}) was called in dygraph, where variables have no "
            "checkpoint names; in dygraph wrap the Layer with recompute_wrapper or "
            "apply_recompute, which also marks its output while a Program is being built"
        )
    if not name:
        raise StaticGraphError("mark_checkpoint received an empty name; give a name")
    marks.mark_checkpoint(variable, name)
    return variable


def named(variable: Any) -> str:
    """A checkpoint name of `variable`: an existing one, or the next of ``checkpoint_0``, ...

    Raises:
        StaticGraphError: As `mark_checkpoint`.
    """
    taken = native().checkpoints(variable.block.program) if hasattr(variable, "block") else {}
    for name, key in taken.items():
        if key == native().key(variable):
            return str(name)
    name = next(name for i in itertools.count() if (name := f"checkpoint_{i}") not in taken)
    mark_checkpoint(variable, name)
    return name
