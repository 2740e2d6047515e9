"""Which tensors were written to since a forward, told without reading any.

``Tensor.inplace_version`` counts in-place operators alone: the kernels of optimizers,
``set_value``, ``set_state_dict``, ``copy_`` and ``assign`` of an array do not raise it (2.6.2,
3.3.1). Raising it for them would make plain backwards fail that Paddle lets through today, so these
writes are counted here, by address: a clock ticks at each, and each address knows its last tick.

Not seen are writes past Paddle's Python API: through ``get_tensor()``, DLPack, collectives and
operators of others that write to their inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import paddle

from paddle_recompute import _paddle


class Stamp(NamedTuple):
    """A moment in the life of a tensor."""

    version: int
    tick: int


_tick = 0
_last_write: dict[int, int] = {}
"""Address -> tick of the last write there. Addresses are used again, so this stays small."""


def _written(tensor: paddle.Tensor) -> None:
    global _tick
    _tick += 1
    address = _paddle.address_of(tensor)
    if address is not None:
        _last_write[address] = _tick


def watch_writes() -> None:
    """Count writes from now on."""
    _paddle.watch_writes(_written)


def stamp(tensor: paddle.Tensor) -> Stamp:
    """What `is_written_since` needs to know of `tensor` now."""
    return Stamp(tensor.inplace_version, _tick)


def is_written_since(tensor: paddle.Tensor, then: Stamp) -> bool:
    """Whether something was written into `tensor` since the `stamp` `then`.

    A tensor that has moved to another address with its value unchanged was not written to.
    """
    if tensor.inplace_version != then.version:
        return True
    if then.tick == _tick:  # nobody wrote anything, nearly always
        return False
    address = _paddle.address_of(tensor)
    return address is not None and _last_write.get(address, 0) > then.tick
