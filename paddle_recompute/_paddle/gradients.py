"""Hooks around the accumulation of a leaf's gradient."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.base import core


@dataclass
class _HookedLeaf:
    """A leaf that has, or had, hooks; `number` is the id of the next one."""

    tensor: weakref.ref[paddle.Tensor]
    number: int = 0
    has_hooks: bool = False
    has_unwatched: bool = False


Hooks = list[tuple[paddle.Tensor, int]]
"""Tensors, and the numbers of hooks on them."""


class _Thread(threading.local):
    passing: Hooks | None = None
    """What was registered since `begin_temporary_hooks`."""


_register_grad_hook = core.eager.Tensor._register_grad_hook
_hooked: dict[int, _HookedLeaf] = {}
_muted = threading.local()
_thread = _Thread()


@functools.cache
def watch_hooks() -> None:
    """From now on, hooks that are registered on leaves can be made to wait (`muted_leaf_hooks`),
    and all hooks can be made to pass (`begin_temporary_hooks`).

    Paddle (2.6, 3.x) runs those of leaves at the end of each backward, and has no way to list them
    or to hold them back. ``Tensor.register_hook`` and fleet both end in ``_register_grad_hook`` of
    ``core.eager.Tensor``, which is wrapped, once. Can go when a backward through several graphs can
    add up before a parameter's hooks run.
    """

    def register(tensor: paddle.Tensor, hook: Callable[[Any], Any]) -> int:
        number = int(_register_grad_hook(tensor, hook))
        if (passing := _thread.passing) is not None:
            passing.append((tensor, number))
        return number

    @functools.wraps(_register_grad_hook)
    def watched(tensor: paddle.Tensor, hook: Callable[[Any], Any]) -> int:
        if tensor.stop_gradient or not tensor.is_leaf:
            return register(tensor, hook)
        key = id(tensor)

        def unless_muted(gradient: Any) -> Any:
            return getattr(_muted, "instead", {}).get(key, hook)(gradient)

        leaf = _hooked_leaf(tensor)
        leaf.number, leaf.has_hooks = leaf.number + 1, True
        return register(tensor, unless_muted)

    core.eager.Tensor._register_grad_hook = watched


def _hooked_leaf(tensor: paddle.Tensor) -> _HookedLeaf:
    key = id(tensor)
    if key not in _hooked:
        _hooked[key] = _HookedLeaf(weakref.ref(tensor, lambda _: _hooked.pop(key, None)))
    return _hooked[key]


def has_unwatched_hooks(tensor: paddle.Tensor) -> bool:
    """Whether `tensor` has had a hook before `watch_hooks` was called, even if it is gone.

    Paddle numbers the hooks of a tensor from 0 on (2.6, 3.x), so the number of one more tells.
    """
    leaf = _hooked_leaf(tensor)
    number = int(_register_grad_hook(tensor, lambda gradient: None))
    tensor._remove_grad_hook(number)
    leaf.has_unwatched = leaf.has_unwatched or number > leaf.number
    leaf.number = number + 1
    return leaf.has_unwatched


def leaves_with_hooks() -> list[paddle.Tensor]:
    """The leaves that have had a hook since `watch_hooks`, in the order of the first ones."""
    found = [leaf.tensor() for leaf in list(_hooked.values()) if leaf.has_hooks]
    return [
        tensor
        for tensor in found
        if tensor is not None and tensor.is_leaf and not tensor.stop_gradient
    ]


@contextlib.contextmanager
def muted_leaf_hooks(instead: Mapping[int, Callable[[Any], None]]) -> Iterator[None]:
    """Inside, in this thread, the function of a leaf, by its id, gets the gradient in place of each
    of its hooks. The gradient is added up as it is.
    """
    before: dict[int, Callable[[Any], Any]] = getattr(_muted, "instead", {})
    _muted.instead = {**before, **instead}
    try:
        yield
    finally:
        _muted.instead = before


def begin_temporary_hooks() -> Hooks | None:
    """Let the hooks that this thread registers last until `remove_temporary_hooks`, which gets what
    this returns. `watch_hooks` must have been called.
    """
    before, _thread.passing = _thread.passing, []
    return before


def remove_temporary_hooks(before: Hooks | None) -> None:
    """Remove the hooks; see `begin_temporary_hooks`."""
    passing, _thread.passing = _thread.passing, before
    for tensor, number in passing or ():
        tensor._remove_grad_hook(number)


def on_gradient_added(parameter: paddle.Tensor, call: Callable[[], object]) -> None:
    """Call ``call()`` after each time that a backward has added to ``parameter.grad``.

    ``_register_backward_hook`` (2.6, 3.x) is what Paddle's own sharding uses; the public
    ``register_hook`` runs *before* the addition and never for the PyLayer form's inner backward.
    Such a hook cannot be removed. Paddle refuses it on what is frozen; one that is there fires
    again after a freeze.
    """
    is_frozen = parameter.stop_gradient
    parameter.stop_gradient = False
    parameter._register_backward_hook(call)
    parameter.stop_gradient = is_frozen


def end_call(call: functools.partial[Any]) -> None:
    """Let `call`, which hooks have, call nothing of ours any more, nor keep anything alive."""
    call.__setstate__((int, (), {}, {}))  # type: ignore[attr-defined]


@functools.cache
def make_unscaling_visible() -> None:
    """From now on, what `paddle.amp.GradScaler` unscales in place has another ``inplace_version``.

    ``_legacy_C_ops.check_finite_and_unscale`` (2.6, 3.x; fleet's scaler calls it too) writes to the
    gradients without raising it, unlike other operators. It is looked up at each call, so it is
    wrapped, once. Can go when the kernel raises the version.
    """
    unscale = paddle._legacy_C_ops.check_finite_and_unscale

    @functools.wraps(unscale)
    def run(gradients: list[paddle.Tensor], *args: Any, **kwargs: Any) -> Any:
        result = unscale(gradients, *args, **kwargs)
        for gradient in gradients:
            gradient._bump_inplace_version()
        return result

    paddle._legacy_C_ops.check_finite_and_unscale = run


def keeps_main_grad(parameter: paddle.Tensor) -> bool:
    """Whether fleet's ``MixPrecisionLayer`` (2.6, 3.x) keeps the gradient of `parameter` in its
    attribute ``main_grad``, and ``.grad`` None.
    """
    return hasattr(parameter, "main_grad")
