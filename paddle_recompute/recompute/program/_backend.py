"""The one place that asks which representation the installed Paddle builds Programs in."""

from __future__ import annotations

import importlib
from types import ModuleType

from paddle_recompute._paddle.static import representation


def backend() -> ModuleType:
    """The package of the installed Paddle's representation, `pir` or `old_ir`.

    Both export four names:

    - ``Graph(program, before=None)``: the `graph.Graph` of a Program; `before` are its operators
      before the backward of this loss was appended, None if it has none or the pass was applied.
    - ``prepare(program)``: to be called before the backward is appended.
    - ``carry_out(plans, graph)``: inserts the copies of `plans` into the Program of `graph`.
    - ``prepare_to_static(layer)``: prepares a recomputed call of `layer` for
      `paddle.jit.to_static`, which appends its backward itself; raises StaticGraphError where the
      call is inside it and would not be recomputed.

    Raises:
        StaticGraphError: This Paddle's static graph is not known.
    """
    return importlib.import_module(f"paddle_recompute.recompute.program.{representation()}")
