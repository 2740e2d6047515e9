"""``detach()`` made safe: what it returns gets memory of its own.

``share_data`` (2.6) gives a second name to the memory of its input. Paddle's in-place pass, which
every Program goes through, does not ask for second names: ``h.detach() * 2`` may be written over
``h``, and what the backward takes for ``h`` then is its double, without recompute too. In dygraph
both keep their numbers. Where nobody writes to either on purpose, a copy gives just that. Can go
with Paddle 2.6.
"""

from __future__ import annotations

from collections import Counter

import paddle

from paddle_recompute._paddle.static import old_ir


def copy_detached(program: paddle.static.Program) -> None:
    """Let what was detached in `program` be a copy; to be called before its backward is appended.

    What somebody changes in place stays as it is, since the other variable has to change with it.
    Costs one copy of each variable that is detached.
    """
    operators = [one for block in program.blocks for one in block.ops if old_ir.is_forward(one)]
    writers = Counter(name for one in operators for name in old_ir.outputs_of(one))
    shared = [one for one in operators if one.type == "share_data"]
    written = {name for name, count in writers.items() if count > 1}
    for _ in shared:  # a name may be shared through others: as far as the longest chain
        for one in shared:
            names = {*old_ir.inputs_of(one), *old_ir.outputs_of(one)}
            if names & written:
                written |= names
    for one in shared:
        if not written.intersection(old_ir.inputs_of(one)):
            old_ir.copy_instead(one)
