"""The class of parameters whose memory is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import paddle
from paddle.base import framework

gradient_of: Callable[[paddle.Tensor], paddle.Tensor | None] = framework.EagerParamBase.grad.__get__
"""What is in the ``.grad`` of a parameter itself, guarded or not."""


class Guarded(framework.EagerParamBase):
    """The class of a parameter that is offloaded, with the methods of `replace_methods`.

    ``parameter.__class__`` is set to it and back (``EagerParamBase``; 2.6, 3.x). It stays a
    parameter, with all of its attributes. Nothing of Paddle is changed: an operator that is given
    the parameter finds no memory and raises by itself. Can go when a tensor can refuse its methods.
    """

    @staticmethod
    def _is_initialized() -> bool:  # or set_state_dict of 2.6 would leave it out
        return True


def replace_methods(methods: Mapping[str, Any]) -> None:
    """Give `Guarded` these attributes, by name, in place of those of a parameter."""
    for name, method in methods.items():
        setattr(Guarded, name, method)


def in_place_methods() -> list[str]:
    """The names of the methods that write to their tensor; ``add_`` of 2.6 makes memory with
    arbitrary values for a tensor that has none.
    """
    return [
        name
        for name in dir(framework.EagerParamBase)
        if name.endswith("_") and not name.startswith("_")
    ]


def is_guarded(value: object) -> bool:
    """Whether `value` is a parameter that is guarded now."""
    return type(value) is Guarded


def guard(parameter: paddle.Tensor) -> None:
    """From now on, `parameter` has the methods of `Guarded`."""
    parameter.__class__ = Guarded


def unguard(parameter: paddle.Tensor) -> None:
    """End of `guard`."""
    parameter.__class__ = framework.EagerParamBase
