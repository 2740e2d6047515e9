"""A Program with its backward, as the pass sees it: forward operators, backward operators, uses."""

from __future__ import annotations

import paddle

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation, Value
from paddle_recompute.recompute.program.pir.operators import why_kept


class Graph:
    """The top-level operators of a Program at one moment, in order.

    Args:
        program: Any PIR Program.
        last_forward: Its last forward operator; what follows is backward. None: all is forward.

    Attributes:
        forward: Operators up to `last_forward`, an earlier loss's backward and update included.
        backward: Those after it.
    """

    def __init__(self, program: paddle.static.Program, last_forward: Operation | None) -> None:
        self.program = program
        operations = pir.operations(program)
        self._position = {operation.id(): i for i, operation in enumerate(operations)}
        # Paddle puts operators (stacks of a cond or while) in front of all others while it
        # appends the backward, so a count that was taken before would be wrong now.
        end = len(operations) if last_forward is None else self.position(last_forward) + 1
        self.forward = operations[:end]
        self.backward = operations[end:]
        self._constants: set[int] = set()
        for operation in self.forward:
            if why_kept(operation) is None and self._takes_constants_only(operation):
                self._constants.add(operation.id())

    def position(self, operation: Operation) -> int:
        """Where `operation` stands among the top-level operators."""
        return self._position[operation.id()]

    def forward_users(self, value: Value) -> list[Operation]:
        """The forward operators that use `value`."""
        return [user for user in self._users(value) if not self._is_backward(user)]

    def backward_users(self, value: Value) -> list[Operation]:
        """The backward operators that use `value`, in order."""
        users = [user for user in self._users(value) if self._is_backward(user)]
        return sorted(users, key=self.position)

    def backward_readers(self, value: Value) -> list[Operation]:
        """The backward operators that use the numbers in `value`, not its shape only."""
        return [user for user in self.backward_users(value) if pir.reads_values_of(user, value)]

    def definer(self, value: Value) -> Operation | None:
        """The operator that returns `value`, if it is one of these; None for what is given."""
        operation = pir.defining_operation(value)
        return operation if operation is not None and operation.id() in self._position else None

    def is_constant(self, operation: Operation) -> bool:
        """Whether forward `operation` depends on nothing that is fed, learned or random.

        Shapes, scales and probabilities do not: they are small, and kept.
        """
        return operation.id() in self._constants

    def is_given(self, value: Value) -> bool:
        """Whether `value` is a parameter or a constant, which is there all the time anyway."""
        operation = pir.defining_operation(value)
        if operation is None:
            return True
        return operation.name() == "builtin.parameter" or self.is_constant(operation)

    def _takes_constants_only(self, operation: Operation) -> bool:
        definers = map(pir.defining_operation, pir.operands_of(operation))
        return all(one is not None and one.id() in self._constants for one in definers)

    def _users(self, value: Value) -> list[Operation]:
        # Operators that were added since, for another segment, take only what is kept.
        return [user for user in pir.users_of(value) if user.id() in self._position]

    def _is_backward(self, operation: Operation) -> bool:
        return self.position(operation) >= len(self.forward)
