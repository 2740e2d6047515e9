"""``detach()`` made safe: its result gets memory of its own.

``share_data`` (2.6) gives a second name to the memory of its input. Paddle's in-place pass, which
runs on every Program, ignores second names: ``h.detach() * 2`` may overwrite ``h``, and the
backward then reads doubled values of ``h``, also without recompute. In dygraph both keep their
values. If neither is written to on purpose, a copy is equivalent. Can go with Paddle 2.6.
"""

from __future__ import annotations

from collections import Counter

import paddle

from paddle_recompute._paddle.static import old_ir


def copy_detached(program: paddle.static.Program) -> None:
    """Replace ``share_data`` in `program` by copies; call this before its backward is appended.

    A variable that is changed in place on purpose is skipped, because both names must change.
    Costs one copy of each detached variable.
    """
    operators = [op for block in program.blocks for op in block.ops if old_ir.is_forward(op)]
    writers = Counter(name for operator in operators for name in old_ir.outputs_of(operator))
    shared = [operator for operator in operators if operator.type == "share_data"]
    written = {name for name, count in writers.items() if count > 1}
    for _ in shared:  # names may be shared in a chain: repeat for the longest one
        for alias in shared:
            names = {*old_ir.inputs_of(alias), *old_ir.outputs_of(alias)}
            if names & written:
                written |= names
    for alias in shared:
        if not written.intersection(old_ir.inputs_of(alias)):
            old_ir.copy_instead(alias)
