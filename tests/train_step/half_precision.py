"""What stands in for a GPU where Paddle would switch mixed precision off on a CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import paddle
from paddle.base import core

from paddle_recompute._paddle.amp import AmpState, amp_state_of

_auto_cast_of_paddle = paddle.amp.auto_cast


@contextlib.contextmanager
def auto_cast(
    enable: bool = True,
    custom_white_list: Any = None,
    custom_black_list: Any = None,
    level: str = "O1",
    dtype: str = "float16",
    use_promote: bool = True,
) -> Iterator[None]:
    """Leaves on the tracer what ``paddle.amp.auto_cast`` leaves there on a GPU.

    Where a Program is being built there is no tracer, and Paddle's own has an effect on a CPU too.
    """
    if not paddle.in_dynamic_mode():
        lists = (custom_white_list, custom_black_list)
        with _auto_cast_of_paddle(enable, *lists, level, dtype, use_promote):
            yield
        return
    on = getattr(core.AmpLevel, level if enable else "O0")
    lists = (set(custom_white_list or ()), set(custom_black_list or ()))
    with amp_state_of(AmpState(on, dtype, lists, use_promote)):
        yield


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """``paddle.amp.auto_cast`` and ``paddle.amp.decorate`` take the CPU for a GPU that has all.

    Paddle's operators still compute in float32 on it, so float16 must be asked for where it is
    wanted (`rounded`); but `decorate` is Paddle's own and really casts the parameters.
    """

    class Place:
        def is_gpu_place(self) -> bool:
            return True

        def is_xpu_place(self) -> bool:
            return False

        def is_custom_place(self) -> bool:
            return False

    tracer = mock.Mock(_expected_place=Place())
    module = sys.modules["paddle.amp.auto_cast"]
    with (
        mock.patch.object(paddle.amp, "auto_cast", auto_cast),
        mock.patch.object(module, "_dygraph_tracer", lambda: tracer),
        mock.patch.object(module, "_is_gpu_float16_supported", lambda: True),
        mock.patch.object(module, "_is_gpu_bfloat16_supported", lambda: True),
    ):
        yield


def rounded(x: paddle.Tensor, dtype: str = "float16") -> paddle.Tensor:
    """`x` through half precision, as O1's casts do it; its gradient goes through it too, where it
    overflows beyond 65504 and is 0 below 3e-8.
    """
    return x.astype(dtype).astype("float32")
