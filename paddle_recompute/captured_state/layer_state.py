"""Buffers and parameters of the Layers that a function calls, restored for the second forward.

The second forward must read the buffers of the first and must not update them again: BatchNorm's
running statistics are updated once per step, a spectral norm iterates once.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle.layers import (
    BATCH_NORMS,
    BUFFERS,
    STATISTICS,
    is_initialized,
    kernel_reads_statistics,
    layers_below,
    non_trained_state,
    own_parameters,
    set_own_parameters,
)
from paddle_recompute.captured_state import writes as _writes
from paddle_recompute.captured_state.called_layers import begin_reporting, end_reporting
from paddle_recompute.captured_state.detached_values import detach_value, is_same, original_of
from paddle_recompute.captured_state.flags import flag_of
from paddle_recompute.captured_state.locations import ABSENT, fill_dict
from paddle_recompute.captured_state.snapshot import Undo
from paddle_recompute.errors import RecomputeError

SMALL_BYTES = 64 * 1024
"""A copy of a buffer up to this size is kept until the backward, changed or not."""


class _Buffer:
    """A tensor that a Layer holds and does not train, in the state before one forward.

    It is copied before the forward. The copy is kept if it is small or if the forward changed the
    buffer. For a large unchanged buffer only a reference is kept, with a stamp that detects later
    writes.
    """

    def __init__(self, tensor: paddle.Tensor, mode: bool) -> None:
        self._held = detach_value(tensor)
        self._mode = mode
        self._stamp, self._flag = _writes.stamp(tensor), flag_of(tensor)
        self._copy: paddle.Tensor | None = _copy(tensor)

    def after_forward(self, now: paddle.Tensor | None) -> None:
        """Drop the copy if it is large and the present tensor of the Layer, `now`, is unchanged."""
        copy = self._copy
        assert copy is not None
        if _is_small(copy):
            return
        if self.is_unchanged(now):
            self._copy = None

    def is_unchanged(self, now: paddle.Tensor | None) -> bool:
        """Whether `now`, the present tensor of the Layer, is the recorded one with its value."""
        if now is None or not is_same(self._held, now):
            return False
        return is_unwritten(now, self._mode, self._stamp, now if self._copy is None else self._copy)

    def as_it_was(self, name: str) -> paddle.Tensor:
        """A copy of the value before the forward; the caller may write to it."""
        copy = _copy(self._unwritten(name))
        copy.stop_gradient = self._flag
        # For a nested recomputed function: what is known of the tensor holds for its copy.
        known = _is_unwritten.get((id(original_of(self._held)), self._mode))
        if known is not None:
            _remember(copy, self._mode, known[1])
        return copy

    def _unwritten(self, name: str) -> paddle.Tensor:
        if self._copy is not None:
            return self._copy
        tensor: paddle.Tensor = original_of(self._held)
        if not is_initialized(tensor):
            raise RecomputeError(_writes.released(f"The buffer '{name}'"))
        if _writes.is_written_since(tensor, self._stamp):
            raise RecomputeError(
                f"the buffer '{name}' ({list(tensor.shape)}) was changed between the "
                "forward and the backward, so the forward cannot be repeated; assign a new tensor "
                "instead of writing into this one"
            )
        return tensor


_is_unwritten: dict[tuple[int, bool], tuple[weakref.ref[paddle.Tensor], bool]] = {}
"""Whether the first forward left a buffer unchanged, by id and mode of its Layer."""


def is_unwritten(
    tensor: paddle.Tensor, mode: bool, before: _writes.Stamp, copy: paddle.Tensor
) -> bool:
    """Whether a forward has not changed a buffer since the stamp `before`; False if unknown.

    The first time, the values are compared, which reads one number on the host, because kernels may
    write without raising ``inplace_version`` (BatchNorm's do). The result is remembered: later, an
    unchanged buffer counts as unchanged until a write is counted (`_writes`), and a changed one as
    changed.

    Args:
        tensor: The buffer.
        mode: Whether its Layer is in training mode.
        before: Its stamp before the forward.
        copy: Its value then.
    """
    if _writes.is_written_since(tensor, before):
        return False
    key = (id(tensor), mode)
    if key not in _is_unwritten:
        _remember(tensor, mode, same_values(tensor, copy))
    return _is_unwritten[key][1]


def _remember(tensor: paddle.Tensor, mode: bool, left_alone: bool) -> None:
    key = (id(tensor), mode)

    def forget(_: object) -> None:
        _is_unwritten.pop(key, None)

    _is_unwritten[key] = weakref.ref(tensor, forget), left_alone


@paddle.no_grad()
def same_values(one: paddle.Tensor, other: paddle.Tensor) -> bool:
    """Whether two tensors of one dtype have equal shapes and values; reads one bool on the host."""
    if one.shape != other.shape:
        return False
    one, other = _comparable(one), _comparable(other)
    return bool(paddle.equal_all(one, other))


def _comparable(tensor: paddle.Tensor) -> paddle.Tensor:
    """The same values in a dtype that every device can compare."""
    if tensor.dtype in (paddle.complex64, paddle.complex128):
        return paddle.as_real(tensor)
    if tensor.dtype in _COMPARED_AS_THEY_ARE:
        return tensor
    return tensor.astype("float32")  # of 16 bits or fewer: exact


_COMPARED_AS_THEY_ARE = (
    paddle.bool, paddle.int32, paddle.int64, paddle.float32, paddle.float64,
)  # fmt: skip


@dataclass
class _Holder:
    """One dict of a Layer with buffers, and the recorded buffers; None: not copied.

    Attributes:
        empty: Entries without memory: None, or a tensor that is not initialized.
    """

    layer: paddle.nn.Layer
    tensors: dict[str, Any]
    before: dict[str, _Buffer | None]
    empty: dict[str, Any]

    def is_unchanged(self) -> bool:
        """Whether names, copied buffers and empty entries are as recorded."""
        now = self.tensors
        return (
            now.keys() == self.before.keys()
            and all(now[name] is entry for name, entry in self.empty.items())
            and all(
                buffer is None or buffer.is_unchanged(now[name])
                for name, buffer in self.before.items()
            )
        )

    def restore(self) -> None:
        """Fill the dict with copies of the recorded buffers."""
        now = self.tensors
        for name, buffer in self.before.items():
            if buffer is not None:
                now[name] = buffer.as_it_was(f"{self.layer.full_name()}.{name}")
            elif name in self.empty and now.get(name, ABSENT) is not self.empty[name]:
                now[name] = self.empty[name]
            elif is_initialized(now.get(name)):
                now[name] = _copy(now[name])
        if now is self.layer.__dict__.get(BUFFERS):
            for name in set(now) - set(self.before):
                del now[name]  # registered in the first forward or later


class LayerState:
    """Buffers and parameter versions of Layers.

    Attributes:
        known: The Layers, by id.
    """

    __slots__ = ("_bare", "_holders", "_stamps", "_with_statistics", "known")

    def __init__(self, layers: list[paddle.nn.Layer], *, with_statistics: bool = False) -> None:
        """The state of `layers`, without their sublayers, before a forward; call `after_forward`
        next.

        A training BatchNorm does not read its statistics, so they are copied only
        `with_statistics`: other code reads them, or what the kernel saves is compared.
        """
        self._with_statistics = with_statistics
        self.known: dict[int, paddle.nn.Layer] = {}
        self._bare: list[dict[str, Any]] = []  # dicts of buffers that were empty
        self._holders: list[_Holder] = []
        self._stamps: list[_writes.Stamps] = []
        self._add(layers)

    def add_called(self, layer: paddle.nn.Layer, *, with_statistics: bool) -> None:
        """Record `layer`, which the forward calls and the search did not find, before it runs."""
        self._with_statistics |= with_statistics
        self._add([below for below in layers_below(layer) if id(below) not in self.known])

    def refuse_new_layers(self, call: Any, undo: Undo) -> None:
        """In the second forward of `call`, until `undo`, raise RecomputeError if it calls a Layer
        that the first forward neither reached nor called. A Layer that it constructs is allowed.
        """
        made: dict[int, paddle.nn.Layer] = {}

        def refuse_new(layer: paddle.nn.Layer) -> None:
            if id(layer) not in made:
                raise RecomputeError(
                    f"the second forward of {call.name} calls the Layer '{layer.full_name()}', "
                    "which the first one did not call: the Layer was replaced between forward and "
                    "backward. Run the backward before you replace it"
                )

        begin_reporting(self.known, refuse_new, lambda layer: made.update({id(layer): layer}))
        undo.append(end_reporting)

    def _add(self, layers: list[paddle.nn.Layer]) -> None:
        self.known.update(zip(map(id, layers), layers, strict=True))
        dicts = [*map(vars, layers)]
        parameters, buffers = [*map(_parameters_of, dicts)], [*map(_buffers_of, dicts)]
        norms: set[int] = set()  # the BatchNorms, several of which may share their statistics
        statistics: set[int] = set()
        if any(map(operator.contains, parameters, itertools.repeat(STATISTICS[0]))):
            for layer, own in zip(layers, parameters, strict=True):
                if STATISTICS[0] in own and isinstance(layer, BATCH_NORMS):
                    norms.add(id(layer))
                    statistics.update(id(own[name]) for name in STATISTICS)
        if not norms and not any(buffers):  # mostly
            self._bare += buffers
        else:
            for layer, own in zip(layers, buffers, strict=True):
                if own or id(layer) in norms:
                    self._add_buffers(layer, is_norm=id(layer) in norms)
                else:
                    self._bare.append(own)
        values = _flat(map(dict.values, filter(None, parameters)))
        trained = [p for p in values if p is not None]
        if statistics:
            trained = [p for p in trained if id(p) not in statistics]
        self._stamps.append(_writes.Stamps(trained))

    def _add_buffers(self, layer: paddle.nn.Layer, *, is_norm: bool) -> None:
        is_read = not is_norm or self._with_statistics or kernel_reads_statistics(layer)
        unread = () if is_read else STATISTICS
        for tensors, names in non_trained_state(layer):
            before = {
                name: _Buffer(tensors[name], layer.training)
                if name not in unread and is_initialized(tensors[name])
                else None
                for name in names
            }
            empty = {name: tensors[name] for name in names if not is_initialized(tensors[name])}
            self._holders.append(_Holder(layer, tensors, before, empty))

    def after_forward(self) -> None:
        """Drop copies that are not needed, and note parameters that the forward itself wrote to."""
        for stamps in self._stamps:
            stamps.after_forward()
        for holder in self._holders:
            for name, buffer in holder.before.items():
                if buffer is not None:
                    buffer.after_forward(holder.tensors.get(name))

    def is_unchanged(self) -> bool:
        """Whether parameters and copied buffers are as recorded."""
        return (
            not any(self._bare)
            and not any(stamps.written() for stamps in self._stamps)
            and all(holder.is_unchanged() for holder in self._holders)
        )

    def restore(self, undo: Undo, *, may_change_flags: bool) -> None:
        """Restore ``stop_gradient`` of parameters, and replace every buffer by a copy of its
        recorded value, which the second forward may write to; until `undo`.

        Raises:
            RecomputeError: A large buffer, or a parameter that the forward reads, was changed.
        """
        filled = [(buffers, dict(buffers)) for buffers in filter(None, self._bare)]
        undo.append(functools.partial(self._empty_all_but, filled))
        if filled:
            self._empty_all_but(())
        for holder in self._holders:
            undo.append(functools.partial(fill_dict, holder.tensors, dict(holder.tensors)))
            holder.restore()
        for stamps in self._stamps:
            stamps.restore_flags(undo, may_change=may_change_flags)
        written = {id(tensor) for stamps in self._stamps for tensor in stamps.written()}
        if written:
            by_forward = set[int]().union(*(stamps.by_forward for stamps in self._stamps))
            for layer in self.known.values():
                _guard(layer, written, by_forward, undo)

    def _empty_all_but(self, filled: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Empty the dicts of buffers that were empty, except those in `filled`."""
        for buffers in filter(None, self._bare):
            buffers.clear()
        for buffers, content in filled:
            buffers.update(content)


class StateAfter:
    """What a part of a forward writes to the Layers that it calls: buffers, and attributes with
    tensors.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[paddle.nn.Layer, dict[str, Any]]] = {}
        self._after: list[tuple[paddle.nn.Layer, dict[str, Any], str, Any, bool]] = []

    def begin(self, owner: object) -> None:
        """Before the part, whose function may be a method of `owner`; `end` must follow."""
        if isinstance(owner, paddle.nn.Layer):
            self._note(owner)
        begin_reporting(self._before, self._note)

    def _note(self, layer: paddle.nn.Layer) -> None:
        before: dict[str, Any] = {name: (value, None) for name, value in vars(layer).items()}
        for tensors, names in non_trained_state(layer):
            for name in names:
                is_there = is_initialized(tensors[name])
                before[name] = tensors[name], _writes.stamp(tensors[name]) if is_there else None
        self._before[id(layer)] = layer, before

    def end(self) -> None:
        """After the part. Large buffers are copied only if they have changed."""
        end_reporting()
        for layer, before in self._before.values():
            for entries, names in (*non_trained_state(layer), (vars(layer), [*vars(layer)])):
                for name in names:
                    value, (was, stamp) = entries[name], before.get(name, (None, None))
                    is_written = value is was
                    if is_written and (stamp is None or _is_large_and_unwritten(value, stamp)):
                        continue
                    if any(map(is_initialized, _nested.tensors_in(value))):
                        copy = _nested.map_tensors(_copy, value)
                        self._after.append((layer, entries, name, copy, is_written))
        self._before = {}

    def write(self, known: dict[int, paddle.nn.Layer]) -> None:
        """In the second forward, which skips the part: write the same values into the Layers of
        `known`, which are restored after it.
        """
        for layer, entries, name, value, is_written in self._after:
            if id(layer) not in known:
                continue
            if is_written:  # in place: operators may have saved this tensor
                entries[name].copy_(value, False)
            else:
                vars(layer).pop(name, None)  # a None there hides a buffer
                entries[name] = _nested.map_tensors(_copy, value)


_flat = itertools.chain.from_iterable
_parameters_of, _buffers_of = map(operator.itemgetter, ("_parameters", BUFFERS))


# ------------------------------------------------------------------------- changed parameters


def _guard(
    layer: paddle.nn.Layer, written: AbstractSet[int], by_forward: AbstractSet[int], undo: Undo
) -> None:
    """Let parameters of `layer` that were written to raise when the second forward reads them.

    They do not raise earlier: between forward and backward one of two optimizers may step, as in
    GAN training, and the function may not read the parameters that it changed.

    Args:
        layer: The Layer.
        written: The ids of all parameters that were written to.
        by_forward: The ids of those that the first forward itself wrote to.
        undo: Gets the function that ends it.
    """
    parameters = own_parameters(layer)
    changed = {name for name, p in dict.items(parameters) if id(p) in written}
    if changed:
        set_own_parameters(layer, _Guarded(parameters, changed, by_forward))
        undo.append(functools.partial(set_own_parameters, layer, parameters))


class _Guarded(collections.OrderedDict):  # type: ignore[type-arg]
    """A dict of parameters, some of which raise when they are read."""

    def __init__(
        self, parameters: dict[str, Any], changed: AbstractSet[str], by_forward: AbstractSet[int]
    ) -> None:
        super().__init__(parameters)
        self._changed, self._by_forward = changed, by_forward

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if name not in self._changed:
            return parameter
        what = f"the parameter '{parameter.name}' ({list(parameter.shape)})"
        if id(parameter) in self._by_forward:
            raise RecomputeError(
                f"the recomputed forward itself changes {what}, so it cannot be repeated. If it "
                "does so in its first call alone, as ActNorm does, call the Layer once under "
                "paddle.no_grad() first; otherwise make the change outside of the recomputed Layer."
            )
        if not is_initialized(parameter):
            raise RecomputeError(_writes.released(f"The parameter '{parameter.name}'"))
        raise RecomputeError(
            f"{what} was changed between the forward and the backward (by an optimizer, set_value, "
            "set_state_dict or in place), so the forward cannot be repeated. Run the backward "
            "before the change."
        )

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if super().__contains__(name) else default

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


def _is_large_and_unwritten(tensor: paddle.Tensor, then: _writes.Stamp) -> bool:
    return not (_is_small(tensor) or _writes.is_written_since(tensor, then))


def _is_small(tensor: paddle.Tensor) -> bool:
    return bool(math.prod(tensor.shape) * tensor.element_size() <= SMALL_BYTES)


def _copy(tensor: paddle.Tensor) -> paddle.Tensor:
    with paddle.no_grad():
        copy = tensor.clone()
    copy.stop_gradient = tensor.stop_gradient
    return copy
