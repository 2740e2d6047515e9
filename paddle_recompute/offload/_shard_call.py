"""One call of a shard's function: its boundary activations wait, its backward runs it again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle.autograd import PyLayer

from paddle_recompute import _nested
from paddle_recompute._paddle.backward import (
    Backward,
    backward_from,
    current_backward,
    raise_in_caller,
    watch_backward,
)
from paddle_recompute.captured_state import Call, Stamp, is_written_since, stamp, watch_writes
from paddle_recompute.errors import OffloadError, RecomputeError
from paddle_recompute.offload._chain import Chain
from paddle_recompute.recompute import InputStorage, innermost


def run(
    chain: Chain,
    index: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    kwargs: dict[str, Any] | None = None,
    storage: InputStorage,
    checkpoint: bool = True,
    num_microbatches: int = 1,
) -> Any:
    """``function(*args, **kwargs)``, which uses the parameters of shard `index` of `chain`.

    Args:
        chain: Has the shard.
        index: Its number.
        function: Runs the shard.
        args: Positional arguments of `function`.
        kwargs: Keyword arguments.
        storage: Where the tensors among the arguments wait for the backward.
        checkpoint: Whether the backward runs `function` again; otherwise its activations stay.
        num_microbatches: Into how many parts the first axis of the inputs is split.

    Raises:
        OffloadError: The call is inside of a recomputed function, or another thread trains the
            chain.
    """
    kwargs = kwargs or {}
    is_last = index == len(chain.shards) - 1
    has_backward = paddle.is_grad_enabled()
    shard = chain.shards[index]
    if shard.is_resident:
        return function(*args, **kwargs)
    name = shard.name
    following = [index + 1] if not is_last else [index - 1] if has_backward else [0]
    if not has_backward:
        with chain.use(index, following):
            parts = _Parts.of((args, kwargs), num_microbatches)
            return parts.joined([function(*a, **k) for a, k in parts.inputs], name)
    if innermost() is not None:
        raise OffloadError(
            f"{name} is offloaded and is called inside of a recomputed function; it is recomputed "
            "by itself. Take it out of what recompute wraps"
        )
    chain.train_in_this_thread()
    watch_backward()
    watch_writes()
    inputs = (args, kwargs)
    parts = _Parts.of(inputs, num_microbatches)
    call_of_shard = _ShardCall(chain, index, name, checkpoint)
    with chain.use(index, following):
        shard.gradients.begin_backward()
        outputs = call_of_shard.first(function, parts, storage)
    return call_of_shard.attach(inputs, outputs)


class _Parts:
    """Inputs split along their first axis."""

    def __init__(self, inputs: list[Any], sizes: list[int]) -> None:
        self.inputs = inputs
        self.sizes = sizes

    @classmethod
    def of(cls, inputs: Any, wanted: int) -> _Parts:
        first = next(_nested.tensors_in(inputs), None)
        length = int(first.shape[0]) if first is not None and first.ndim else 1
        number = min(wanted, length)
        if number <= 1:
            return cls([inputs], [length])
        sizes = [length // number + (part < length % number) for part in range(number)]
        offsets = [sum(sizes[:part]) for part in range(number)]

        def cut(offset: int, size: int) -> Any:
            return _nested.map_tensors(
                lambda t: t[offset : offset + size] if t.ndim and t.shape[0] == length else t,
                inputs,
            )

        return cls([cut(o, s) for o, s in zip(offsets, sizes, strict=True)], sizes)

    def joined(self, outputs: list[Any], name: str) -> Any:
        """The outputs of all parts as those of one call."""
        if len(outputs) == 1:
            return outputs[0]
        columns = [list(_nested.tensors_in(output)) for output in outputs]
        for tensors, size in zip(columns, self.sizes, strict=True):
            if len(tensors) != len(columns[0]) or any(
                t.ndim == 0 or t.shape[0] != size for t in tensors
            ):
                raise OffloadError(
                    f"{name} returns a tensor whose first axis is not the batch, so the outputs of "
                    "micro-batches cannot be joined; set num_microbatches=1"
                )
        joined = iter([paddle.concat(list(parts)) for parts in zip(*columns, strict=True)])
        return _nested.map_tensors(lambda _: next(joined), outputs[0])


class _ShardCall:
    """What the backward of one call needs."""

    def __init__(self, chain: Chain, index: int, name: str, checkpoint: bool) -> None:
        self._chain = chain
        self._index = index
        self._name = name
        self._checkpoint = checkpoint
        self._calls: list[tuple[Call, Any, Any]] = []  # with inputs, and outputs if they stay
        self._stamps: list[tuple[paddle.Tensor, Stamp]] = []
        self._passed: dict[int, int] = {}  # output -> the input that it is
        self._own: list[int] = []  # places of the outputs that are not inputs
        self._made: tuple[paddle.Tensor, ...] = ()
        self._has_run = False
        self._parts: _Parts | None = None

    def first(self, function: Callable[..., Any], parts: _Parts, storage: InputStorage) -> Any:
        """Run the call; returns its outputs, without a gradient history."""
        self._parts = parts
        outputs = []
        for inputs in parts.inputs:
            args, kwargs = detached = _detached(inputs)
            call = Call(function, self._name, preserve_rng_state=True, check=True)
            with paddle.set_grad_enabled(not self._checkpoint):
                output = call.first(args, kwargs)
            if self._checkpoint:
                kept = _nested.map_tensors(lambda t: _Waiting(t, storage, self._stamps), inputs)
                self._calls.append((call, kept, None))
            else:
                self._calls.append((call, detached, output))
            if len(parts.inputs) == 1:
                given = {id(t): i for i, t in enumerate(_nested.tensors_in(detached))}
                for index, tensor in enumerate(_nested.tensors_in(output)):
                    if id(tensor) in given:
                        self._passed[index] = given[id(tensor)]
            outputs.append(output)
        with paddle.no_grad():
            joined = parts.joined(outputs, self._name)
            return _nested.map_tensors(lambda t: t.detach(), joined)

    def attach(self, inputs: Any, outputs: Any) -> Any:
        """`outputs` with a gradient history that leads to `inputs` through this call."""
        tensors = list(_nested.tensors_in(inputs))
        made = list(_nested.tensors_in(outputs))
        self._own = [index for index in range(len(made)) if index not in self._passed]
        anchor = paddle.zeros([1])
        anchor.stop_gradient = False  # an input that needs a gradient, if no other does
        self._made = tuple(made[place] for place in self._own)
        results = _Boundary.apply(self, anchor, *tensors) if self._made else []
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        for index, result in enumerate(results):
            if not result.is_floating_point() and not result.is_complex():
                result.stop_gradient = True
            else:
                result.register_hook(self._refuse_a_second_backward)
                # Paddle (2.6, 3.x) drops what a hook on a PyLayer's output returns.
                results[index] = paddle.assign(result)
        by_place = dict(zip(self._own, results, strict=True))
        by_place.update({place: tensors[i] for place, i in self._passed.items()})
        return _nested.map_tensors(_next_of([by_place[p] for p in range(len(made))]), outputs)

    def backward(self, gradients: list[paddle.Tensor | None]) -> list[paddle.Tensor | None]:
        """The gradients of the inputs; those of the parameters are added to ``.grad``."""
        chain, index = self._chain, self._index
        chain.train_in_this_thread()
        self._check(current_backward())
        self._has_run = True
        with chain.use(index, [index - 1]):
            of_inputs = self._backward_of_parts(gradients)
        chain.note_backward(index)
        self._calls, self._stamps = [], []
        return self._joined(of_inputs)

    def _backward_of_parts(
        self, gradients: list[paddle.Tensor | None]
    ) -> list[list[paddle.Tensor | None]]:
        assert self._parts is not None
        of_inputs: list[list[paddle.Tensor | None]] = []
        offset = 0
        for (call, inputs, outputs), size in zip(self._calls, self._parts.sizes, strict=True):
            part = [
                g if g is None or len(self._calls) == 1 else g[offset : offset + size]
                for g in gradients
            ]
            offset += size
            of_inputs.append(self._backward_of(call, inputs, outputs, part))
        return of_inputs

    def _backward_of(
        self, call: Call, inputs: Any, outputs: Any, gradients: list[paddle.Tensor | None]
    ) -> list[paddle.Tensor | None]:
        if self._checkpoint:
            inputs = _nested.map_leaves(
                lambda leaf: leaf.load() if type(leaf) is _Waiting else leaf, inputs
            )
        given = list(_nested.tensors_in(inputs))  # before the function empties a list among them
        if self._checkpoint:
            args, kwargs = inputs
            outputs = call.repeat(args, kwargs)
        leaves = list(_nested.tensors_in(outputs))
        pairs: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}
        for place, gradient in zip(self._own, gradients, strict=True):
            leaf = leaves[place]
            if gradient is not None and not leaf.stop_gradient:
                # The engine refuses a tensor that is given twice.
                known = pairs.get(id(leaf))
                pairs[id(leaf)] = leaf, gradient if known is None else known[1] + gradient
        del outputs, leaves
        if pairs:
            tensors, of_tensors = zip(*pairs.values(), strict=True)
            del pairs, leaf
            with self._refusing_captured(call):
                backward_from(tensors, of_tensors)
        return [*map(_gradient_of, given)]

    @contextlib.contextmanager
    def _refusing_captured(self, call: Call) -> Iterator[None]:
        """Inside, a gradient of a captured tensor raises: the engine that runs around this backward
        may be on its way through the same graph.
        """

        def refuse(name: str, tensor: paddle.Tensor, _: paddle.Tensor) -> None:
            error = RecomputeError(
                f"{self._name}, which is offloaded, captures '{name}' ({_nested.describe(tensor)}),"
                " which was computed outside of it and needs a gradient; make it an input of the "
                "Layer, or detach() it"
            )
            raise_in_caller(error)
            raise error

        hooks = [
            tensor.register_hook(functools.partial(refuse, name, tensor))
            for name, tensor in call.captured_with_graph()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _joined(self, of_parts: list[list[paddle.Tensor | None]]) -> list[paddle.Tensor | None]:
        if len(of_parts) == 1:
            return of_parts[0]
        assert self._parts is not None
        joined: list[paddle.Tensor | None] = []
        for column in zip(*of_parts, strict=True):
            there = [g for g in column if g is not None]
            if not there:
                joined.append(None)
            elif all(
                g.ndim and g.shape[0] == n for g, n in zip(there, self._parts.sizes, strict=True)
            ):
                joined.append(paddle.concat(there))
            else:
                joined.append(paddle.add_n(there))
        return joined

    def _refuse_a_second_backward(self, gradient: paddle.Tensor) -> None:
        """A hook of the outputs: Paddle (2.6, 3.x) ends the process where a PyLayer's backward runs
        again after retain_graph=True, before it calls us.
        """
        if self._has_run:
            error = RecomputeError(
                f"the backward of {self._name}, which is offloaded, has run already, and its "
                "inputs are released, also with retain_graph=True. Call backward() once, on the "
                "sum of the losses"
            )
            raise_in_caller(error)
            raise error

    def _check(self, engine: Backward | None) -> None:
        if engine is not None and engine.partial:
            raise RecomputeError(
                f"paddle.grad was called through {self._name}, which is offloaded: its parameters' "
                "gradients are kept off the device, so only backward() can compute them"
            )
        if any(is_written_since(tensor, then) for tensor, then in self._stamps):
            raise RecomputeError(
                f"an input of {self._name} was changed in place between its forward and its "
                "backward, so the forward cannot be repeated; change a copy"
            )


def _gradient_of(tensor: paddle.Tensor) -> paddle.Tensor | None:
    """That of an input; zeros where nothing depends on it, because for None Paddle's engine (3.x)
    ends the process.
    """
    if tensor.grad is None and not tensor.stop_gradient:
        return paddle.zeros_like(tensor)
    return tensor.grad


class _Waiting:
    """An input that waits for the backward."""

    def __init__(
        self,
        tensor: paddle.Tensor,
        storage: InputStorage,
        stamps: list[tuple[paddle.Tensor, Stamp]],
    ) -> None:
        self._stop_gradient = tensor.stop_gradient
        self._kept = storage.keep(tensor)
        if isinstance(self._kept, paddle.Tensor):  # no copy
            stamps.append((self._kept, stamp(self._kept)))

    def load(self) -> paddle.Tensor:
        kept = self._kept
        tensor = kept.detach() if isinstance(kept, paddle.Tensor) else kept.load()
        tensor.stop_gradient = self._stop_gradient
        return tensor


def _detached(inputs: Any) -> Any:
    def detach(tensor: paddle.Tensor) -> paddle.Tensor:
        alone = tensor.detach()
        alone.stop_gradient = tensor.stop_gradient
        return alone

    return _nested.map_tensors(detach, inputs)


def _next_of(tensors: list[paddle.Tensor]) -> Callable[[paddle.Tensor], paddle.Tensor]:
    remaining = iter(tensors)
    return lambda _: next(remaining)


class _Boundary(PyLayer):
    """Where the graph of a shard's call would be."""

    @staticmethod
    def forward(
        ctx: Any, call_of_shard: _ShardCall, anchor: paddle.Tensor, *inputs: paddle.Tensor
    ) -> tuple[paddle.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call_of_shard = call_of_shard
        made, call_of_shard._made = call_of_shard._made, ()
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        try:
            of_inputs = ctx.call_of_shard.backward(list(gradients))
        except BaseException as error:
            raise_in_caller(error)
            raise
        return (None, *of_inputs)
