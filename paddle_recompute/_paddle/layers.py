"""What a Layer and an optimizer hold, where Paddle has no public way to ask."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container
from typing import Any, ClassVar

import paddle
from paddle.base import framework

BATCH_NORMS = (
    paddle.nn.BatchNorm,
    paddle.nn.BatchNorm1D,
    paddle.nn.BatchNorm2D,
    paddle.nn.BatchNorm3D,
    paddle.nn.SyncBatchNorm,
)


def is_parameter(value: object) -> bool:
    """Whether `value` is a dygraph parameter (``EagerParamBase``; 2.6, 3.x)."""
    return isinstance(value, framework.EagerParamBase)


def parameters_of_optimizer(optimizer: Any) -> list[paddle.Tensor]:
    """The parameters that `optimizer` updates; none where it cannot be told, as with a wrapper.

    ``Optimizer._parameter_list`` (2.6, 3.x) holds parameters, or one dict per group of them. Can go
    when an optimizer says it publicly.
    """
    listed = getattr(optimizer, "_parameter_list", None) or []
    if dict not in {*map(type, listed)}:
        return [*listed]
    groups = [entry["params"] if isinstance(entry, dict) else [entry] for entry in listed]
    return [parameter for group in groups for parameter in group]


def with_inner_optimizers(optimizer: Any) -> list[Any]:
    """`optimizer` and those inside of it, as ``LookAhead`` has one (2.6, 3.x)."""
    inner = [
        attribute
        for attribute in vars(optimizer).values()
        if isinstance(attribute, paddle.optimizer.Optimizer)
    ]
    return [optimizer, *(each for attribute in inner for each in with_inner_optimizers(attribute))]


def clips_of_optimizer(optimizer: Any) -> list[Any]:
    """What `optimizer`, its parameter groups and the optimizers inside of it clip gradients with:
    ``_grad_clip`` and ``_param_groups`` of an ``Optimizer`` (2.6, 3.x). Can go when an optimizer
    says it publicly.
    """
    clips = []
    for inner in with_inner_optimizers(optimizer):
        groups = getattr(inner, "_param_groups", None) or []
        clips.append(getattr(inner, "_grad_clip", None))
        clips += [group.get("grad_clip") for group in groups if isinstance(group, dict)]
    return [clip for clip in clips if clip is not None]


@functools.cache
def attributes_of_every_layer() -> frozenset[str]:
    """What ``Layer.__init__`` itself (2.6, 3.x) puts into the ``__dict__`` of a Layer."""
    with paddle.utils.unique_name.guard():  # or the names of the user's Layers would shift
        return frozenset(vars(paddle.nn.Layer()))


def own_parameters(layer: paddle.nn.Layer) -> dict[str, Any]:
    """The dict in which `layer` itself (not its sublayers) keeps its parameters (2.6, 3.x)."""
    return layer.__dict__["_parameters"]  # type: ignore[no-any-return]


def set_own_parameters(layer: paddle.nn.Layer, parameters: dict[str, Any]) -> None:
    """Let `layer` look its parameters up in another dict; ``setattr`` would refuse one."""
    layer.__dict__["_parameters"] = parameters


def own_sublayers(layer: paddle.nn.Layer) -> dict[str, Any]:
    """The dict in which `layer` keeps its direct sublayers (2.6, 3.x)."""
    return layer.__dict__["_sub_layers"]  # type: ignore[no-any-return]


def layers_below(root: paddle.nn.Layer) -> list[paddle.nn.Layer]:
    """`root` and all Layers below it, each once, those of one depth side by side.

    What ``root.sublayers(include_self=True)`` (public) gives in ten times the time.
    """
    found, known = [root], {id(root)}
    for layer in found:
        if below := layer.__dict__["_sub_layers"]:
            for sublayer in below.values():
                if sublayer is not None and id(sublayer) not in known:
                    known.add(id(sublayer))
                    found.append(sublayer)
    return found


MEMBER_DICTS = ("_sub_layers", "_parameters", "_forward_pre_hooks", "_forward_post_hooks")
"""Where the ``__dict__`` of a Layer keeps its sublayers, parameters and hooks (2.6, 3.x)."""
SUBLAYERS_AND_HOOKS = (MEMBER_DICTS[0], *MEMBER_DICTS[2:])
BUFFERS = "_buffers"
"""Where it keeps its buffers, as which a Layer takes every tensor that is assigned to it."""


def forward_pre_hooks(layer: paddle.nn.Layer) -> dict[Any, Any]:
    """The hooks before the forward of `layer` itself (2.6, 3.x)."""
    return layer._forward_pre_hooks  # type: ignore[no-any-return]


def forward_post_hooks(layer: paddle.nn.Layer) -> dict[Any, Any]:
    """The hooks behind the forward of `layer` itself (2.6, 3.x)."""
    return layer._forward_post_hooks  # type: ignore[no-any-return]


def non_trained_state(layer: paddle.nn.Layer) -> list[tuple[dict[str, Any], list[str]]]:
    """Where `layer` itself (not its sublayers) keeps tensors that a forward may write to.

    Dicts of the Layer with the keys in question, so that a caller can put another tensor there;
    ``Layer.register_buffer`` (public) refuses a name that exists. BatchNorms keep their statistics
    among the parameters, with ``stop_gradient`` set (2.6, 3.x).
    """
    slots = [(layer._buffers, list(layer._buffers))]
    statistics = statistics_among_parameters(layer)
    if statistics:
        slots.append((layer._parameters, statistics))
    return slots


STATISTICS = ("_mean", "_variance")
"""Of a BatchNorm; a subclass may have other buffers, which its forward reads."""


def statistics_among_parameters(layer: paddle.nn.Layer) -> list[str]:
    """The names under which a BatchNorm keeps its statistics among its parameters (2.6, 3.x)."""
    return [*STATISTICS] if isinstance(layer, BATCH_NORMS) else []


def kernel_reads_statistics(layer: Any) -> bool:
    """Whether the kernel of a BatchNorm reads its statistics, not those of the batch alone
    (``_use_global_stats``; 2.6, 3.x).
    """
    return not layer.training or bool(layer._use_global_stats)


def saved_buffers(layer: paddle.nn.Layer) -> dict[str, paddle.Tensor]:
    """What `layer` itself (not its sublayers) keeps besides its parameters and saves, by name.

    ``Layer._non_persistable_buffer_names_set`` (2.6, 3.x) lists the buffers that a Layer does not
    save. Can go when a Layer says publicly which of its buffers are saved.
    """
    left_out = layer._non_persistable_buffer_names_set
    return {
        name: values[name]
        for values, names in non_trained_state(layer)
        for name in names
        if name not in left_out and is_initialized(values[name])
    }


def children_of(layer: paddle.nn.Layer) -> list[tuple[str, paddle.nn.Layer]]:
    """The direct sublayers of `layer` under every name that it has for them.

    ``Layer.named_children`` (public) gives a Layer that has two names there under the first only.
    """
    return [(name, child) for name, child in layer._sub_layers.items() if child is not None]


def is_initialized(tensor: object) -> bool:
    """Whether `tensor` is a tensor that has memory; ``nn.LSTM`` keeps a buffer that has none.

    ``_is_initialized`` (2.6, 3.x); the public ``is_initialized`` is deprecated.
    """
    return isinstance(tensor, paddle.Tensor) and bool(tensor._is_initialized())


LayerCallback = Callable[[paddle.nn.Layer], None]


class Watches(threading.local):
    """Observers of the calls and constructions of Layers.

    Attributes:
        everywhere: Told of each call of a Layer, in all threads.
        called: Told in this thread, each with the ids of the Layers of which it is not told.
        built: Told in this thread of each Layer that was constructed.
    """

    everywhere: ClassVar[list[LayerCallback]] = []

    def __init__(self) -> None:
        self.called: list[tuple[Container[int], LayerCallback]] = []
        self.built: list[LayerCallback] = []


@functools.cache
def watch_layers() -> Watches:
    """Tell what `Watches` holds before each call of a Layer, and after a Layer is made.

    Paddle (2.6, 3.x) has hooks of one Layer alone, so ``Layer.__call__`` and ``Layer.__init__`` are
    wrapped, once. Can go when there are hooks of all Layers.
    """
    call, init, watches = paddle.nn.Layer.__call__, paddle.nn.Layer.__init__, Watches()
    everywhere = watches.everywhere  # to read an attribute of a thread takes long

    @functools.wraps(init)
    def made(self: paddle.nn.Layer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for tell in watches.built:
            tell(self)

    @functools.wraps(call)
    def told(self: paddle.nn.Layer, *args: Any, **kwargs: Any) -> Any:
        for known, tell in watches.called:
            if id(self) not in known:
                tell(self)
        if everywhere:
            for tell in list(everywhere):
                tell(self)
        return call(self, *args, **kwargs)

    paddle.nn.Layer.__call__, paddle.nn.Layer.__init__ = told, made
    return watches
