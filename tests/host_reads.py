"""Count the tensors that Python code reads on the host.

Each such read makes the host wait until a device has computed the tensor, so that its queue runs
empty. On a CPU nothing waits; there the count says what a device would wait for.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import paddle

_READS = (
    *("numpy", "item", "tolist", "cpu", "pin_memory", "__array__"),
    *("__bool__", "__float__", "__int__", "__long__", "__index__", "__len__"),
    *("__complex__", "__format__", "__str__", "__repr__", "__contains__", "__nonzero__"),
)
_NO_READS = ("__len__",)  # of a shape


@dataclass
class HostReads:
    """What was read.

    Attributes:
        where: Of each read the method, and the lines of code that led to it.
    """

    where: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.where)


@contextlib.contextmanager
def counted() -> Iterator[HostReads]:
    """Inside, reads of any tensor are counted, in all threads."""
    reads = HostReads()
    before = {
        name: paddle.Tensor.__dict__[name]
        for name in _READS
        if name in paddle.Tensor.__dict__ and name not in _NO_READS
    }
    inside = threading.local()  # of a read that calls another one

    def counting(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "name", None) is not None:
                return read(*args, **kwargs)
            inside.name = name
            stack = traceback.extract_stack(limit=8)[:-1]
            lines = " < ".join(f"{one.filename}:{one.lineno}" for one in reversed(stack))
            reads.where.append(f"{name} at {lines}")
            try:
                return read(*args, **kwargs)
            finally:
                inside.name = None

        return call

    for name, read in before.items():
        setattr(paddle.Tensor, name, counting(name, read))
    try:
        yield reads
    finally:
        for name, read in before.items():
            setattr(paddle.Tensor, name, read)
