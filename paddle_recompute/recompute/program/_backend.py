"""The one place that asks which representation the installed Paddle builds Programs in."""

from __future__ import annotations

from types import ModuleType

from paddle_recompute._paddle.static import representation


def backend() -> ModuleType:
    """The package of the installed Paddle's representation, `pir` or `old_ir`.

    Both export four names:

    - ``Graph(program, before=None)``: the `graph.Graph` of a Program; `before` are its operators
      before the backward of this loss was appended, None if it has none or the pass was applied.
    - ``prepare(program)``: to be called before the backward is appended.
    - ``carry_out(plans, graph)``: inserts the copies of `plans` into the Program of `graph`.
    - ``prepare_to_static(layer, trains, change)``: `paddle.jit.to_static` appends its backward
      itself, so ``change(program, num_forward)`` is hooked in there, or the call of `layer`, if it
      ``trains``, is refused.

    Raises:
        StaticGraphError: This Paddle's static graph is not known.
    """
    if representation() == "pir":
        from paddle_recompute.recompute.program import pir

        return pir
    from paddle_recompute.recompute.program import old_ir

    return old_ir
