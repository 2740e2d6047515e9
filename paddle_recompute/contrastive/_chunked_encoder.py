"""An encoder that runs in chunks: first without a graph, later once more with a graph.

The second forward of a chunk repeats the first: random streams, AMP state, train/eval flags and
buffers are those of the first forward and are restored afterwards. BatchNorm's running statistics
are updated once per chunk.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddle_recompute._nested import DICTS, is_tensor, map_leaves, named_leaves
from paddle_recompute._paddle.amp import amp_off
from paddle_recompute._paddle.backward import set_gradients
from paddle_recompute.contrastive._chunks import (
    Chunk,
    cut_axes,
    cut_to,
    joined,
    padded,
    rows_of,
    rows_of_all,
)
from paddle_recompute.errors import DataError, RecomputeError
from paddle_recompute.replay import Call

# Both forwards of a chunk run the same operations on the same numbers. GPU kernels may sum in
# another order (a difference of 1 % in bfloat16); another dropout mask makes a larger difference.
REPETITION_TOLERANCE = 0.05

COMPARED_BYTES = 64 * 1024
"""Outputs of second forwards are kept up to this size, to be compared in one go: small ones, whose
kernels take less time than their launch."""

_CONSTANTS = (type(None), bool, int, float, str)


def check_repetition(deviations: Mapping[str, paddle.Tensor]) -> None:
    """Check that the second forwards returned what the first ones did; waits for the device.

    Args:
        deviations: By the name of a batch, what `ChunkedEncoder.deviation` returned.

    Raises:
        RecomputeError: One returned other numbers.
    """
    if not deviations:
        return
    with paddle.no_grad():
        shares = paddle.stack([*deviations.values()]).tolist()
    for name, share in zip(deviations, shares, strict=True):
        if share > REPETITION_TOLERANCE:
            raise RecomputeError(
                f"the encoder of {name} returned other values in the second forward of a chunk "
                f"(they differ by {share:.0%}), so its gradient was made NaN. An encoder must do "
                "the same thing twice: look for state that it changes, a global that it reads, or "
                "randomness outside Paddle, NumPy and Python's random."
            )


@paddle.no_grad()
def _nan_if_deviating(gradient: paddle.Tensor, deviation: paddle.Tensor) -> paddle.Tensor:
    """`gradient`, bit by bit; NaN where it would be wrong, as the host may not know for a while."""
    one = paddle.ones_like(deviation)
    factor = paddle.where(deviation > REPETITION_TOLERANCE, one * math.nan, one)
    if gradient.dtype == paddle.float16:  # a CPU does not multiply them
        return (gradient.astype("float32") * factor).astype("float16")
    return gradient * factor.astype(gradient.dtype)


class ChunkedEncoder:
    """An encoder and the rows that it encodes in one step.

    Args:
        encoder: A Layer or any callable.
        batch: A Tensor or a structure of Tensors.
        chunks: The chunks of `batch`; every row is in one of them.
        name: The name of the batch in errors.
        keeps_graph: The first forward of the only chunk keeps its graph; there is no second one.
    """

    def __init__(
        self,
        encoder: Callable[..., Any],
        batch: Any,
        chunks: Sequence[Chunk],
        name: str,
        *,
        keeps_graph: bool = False,
    ) -> None:
        self.encoder = encoder
        self.num_chunks = len(chunks)
        self._batch = batch
        self._chunks = chunks
        self.name = name
        self._called = f"the encoder of {name}"
        self._keeps_graph = keeps_graph
        self._outputs: list[paddle.Tensor] = []  # of the first forward, if it keeps its graph
        self._calls: list[Call] = []
        self._paths: list[str] = []
        self._trained: list[int] = []  # the heads (places among the outputs) that need a gradient
        self._cut: dict[int, tuple[int, ...]] = {}  # by head: the axes that are a chunk's length
        self._gradients: dict[int, paddle.Tensor] = {}
        self._first: dict[int, _Kept] = {}  # by head: the outputs of the first forwards
        self._again: list[tuple[Chunk, dict[int, paddle.Tensor]]] = []  # not compared yet, by head
        self._num_bytes = 0  # of these
        self._deviation: paddle.Tensor | None = None
        self._form: Form | None = None

    def encode(self, when_reached: Callable[[], None], before: ChunkedEncoder | None = None) -> Any:
        """The first forward of every chunk.

        Args:
            when_reached: Called when the backward of the loss reaches an output, once for each
                output that needs a gradient.
            before: What was encoded right before, if anything was.

        Returns:
            The encoder's output, with all rows in every tensor.
        """
        has_gradients = paddle.is_grad_enabled()
        # What a second forward would need is not looked at where there is none.
        is_repeated = has_gradients and not self._keeps_graph
        structure: Any = None
        first: dict[str, Any] = {}
        parts: list[list[paddle.Tensor]] = []
        trained: set[int] = set()
        undecided = True
        call: Call | None = None
        if before is not None and before.encoder is self.encoder and before._calls:
            call = before._calls[-1]
        for number, chunk in enumerate(self._chunks):
            # With a graph until each output was found to depend on a trained parameter: usually one
            # chunk, more for an encoder with a frozen or detached path. The parameters of a Layer
            # alone do not tell, because it may reach others.
            keeps = has_gradients and (undecided or self._keeps_graph)
            had = set_gradients(keeps)
            try:
                output = self._first_of(number, call) if is_repeated else self._call_once(number)
            finally:
                set_gradients(had)
            call = self._calls[-1] if self._calls else None
            leaves, constants = self._leaves(output, chunk)
            if number == 0:
                structure = map_leaves(lambda leaf: None if is_tensor(leaf) else leaf, output)
                first = constants
            elif first or constants:
                self._check_constants(first, constants)
            floating = [i for i, leaf in enumerate(leaves) if _is_floating(leaf)]
            trained.update(i for i in floating if not leaves[i].stop_gradient)
            undecided = len(trained) < len(floating)
            del output
            # Copies: the output may be a view, hidden[:, 0], of something large.
            parts.append([leaf.detach().clone() for leaf in leaves])
            if self._keeps_graph:
                self._outputs = leaves
            del leaves
        self._trained = sorted(trained)
        if not trained:
            self._calls, self._outputs = [], []
        heads = self._joined(parts)
        for place in self._trained:
            self._first[place] = _Kept(heads[place])
            receive = functools.partial(self._receive, place, when_reached)
            heads[place] = _Source.of(heads[place], receive)
        return _filled(structure, self._paths, heads)

    @property
    def is_trained(self) -> bool:
        """Whether an output needs a gradient."""
        return bool(self._trained)

    @property
    def replays(self) -> range:
        """The chunks that need a second forward; none for a frozen encoder."""
        return range(self.num_chunks if self._gradients else 0)

    def backward(self, number: int) -> None:
        """The backward of a chunk into ``.grad``; runs a second forward if no graph was kept."""
        chunk = self._chunks[number]
        outputs, self._outputs = self._outputs, []
        self._compare_if_due(number)
        if not self._keeps_graph:
            arguments, named = self._arguments(number)
            outputs = self._calls[number].repeat(arguments, named)
            outputs, _ = self._leaves(outputs, chunk, again=True)
        with amp_off():
            if not self._keeps_graph:
                self._note(outputs, chunk)
            deviation = self.deviation() if self._is_last(number) else None
            heads: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}
            for place, gradient in self._gradients.items():
                head = outputs[place]
                if head.stop_gradient:
                    continue  # nothing on the path of this chunk is trained
                part = cut_to(rows_of(gradient, chunk.rows), self._cut[place], chunk.columns)
                if deviation is not None:
                    part = _nan_if_deviating(part, deviation)
                # The engine refuses a tensor that is given twice.
                part = heads[id(head)][1] + part if id(head) in heads else part
                heads[id(head)] = head, part
            del outputs, head
            if heads:
                tensors, gradients = zip(*heads.values(), strict=True)
                del heads, part
                paddle.autograd.backward(list(tensors), list(gradients))
            elif deviation is not None:  # no gradient is left that could be made NaN
                check_repetition({self.name: deviation})

    def _is_last(self, number: int) -> bool:
        return number == self.num_chunks - 1

    def _compare_if_due(self, number: int) -> None:
        """To be called before the activations of a chunk are there, which need the memory."""
        if self._is_last(number) or self._num_bytes > COMPARED_BYTES:
            self.deviation()

    def deviation(self) -> paddle.Tensor | None:
        """How far the second forwards are from the first ones, at most: the share of the largest
        number of a row, in the worst row; float32, one number, not read.
        """
        if self._again:
            self._compare()
        return self._deviation

    def _arguments(self, number: int) -> Arguments:
        """For a forward of a chunk: new tensors, on which the encoder may put hooks."""
        batch = self._chunks[number].of(self._batch)
        if self._form is None:
            self._form = form_for(self.encoder, batch)
        return self._form(batch)

    def _call_once(self, number: int) -> Any:
        arguments, named = self._arguments(number)
        return self.encoder(*arguments, **named)

    def _first_of(self, number: int, before: Call | None) -> Any:
        """The first forward of a chunk, right after the call `before`."""
        arguments, named = self._arguments(number)
        call = Call(self.encoder, self._called, preserve_rng_state=True, check=False)
        self._calls.append(call)
        return call.first(arguments, named, before=before)

    def _leaves(
        self, output: Any, chunk: Chunk, *, again: bool = False
    ) -> tuple[list[paddle.Tensor], dict[str, Any]]:
        """The tensors of an output, after checks, and what else is in it, by path."""
        tensors: dict[str, paddle.Tensor] = {}
        constants: dict[str, Any] = {}
        for path, leaf in named_leaves(output, "output"):
            (tensors if is_tensor(leaf) else constants)[path] = leaf
        expected = len(chunk.rows)
        for path, tensor in tensors.items():
            shape = tensor.shape
            if not shape or shape[0] != expected:
                raise DataError(
                    f"the encoder of {self.name} got {expected} rows and returned {path} of shape "
                    f"{list(tensor.shape)}; the first axis of every returned tensor must be the "
                    "batch, because the chunks are joined along it"
                )
        if not any(map(_is_floating, tensors.values())):
            raise DataError(
                f"the encoder of {self.name} returned no floating-point Tensor, so the loss would "
                "get no embedding"
            )
        paths = list(tensors)
        if self._paths and paths != self._paths:
            error = RecomputeError if again else DataError
            raise error(
                f"the encoder of {self.name} returned {', '.join(self._paths)} for its first "
                f"chunk and {', '.join(paths)} for another one; it must always return the same "
                "structure"
            )
        self._paths = paths
        return list(tensors.values()), constants

    def _joined(self, parts: list[list[paddle.Tensor]]) -> list[paddle.Tensor]:
        heads = []
        with paddle.no_grad(), amp_off():
            for place in range(len(self._paths)):
                pieces = [part[place] for part in parts]
                what = f"what the encoder of {self.name} returns as {self._paths[place]}"
                axes, length = cut_axes(pieces, self._chunks, what)
                self._cut[place] = axes
                pieces = [padded(piece, axes, length) for piece in pieces]
                heads.append(joined(pieces, self._chunks))
        return heads

    def _receive(
        self, place: int, when_reached: Callable[[], None], gradient: paddle.Tensor
    ) -> None:
        self._gradients[place] = gradient
        when_reached()

    def _note(self, outputs: list[paddle.Tensor], chunk: Chunk) -> None:
        """Keep what a second forward returned, to be compared."""
        kept = {}
        for place in self._gradients:
            first, axes = self._first[place].tensor, self._cut[place]
            # A copy: the output may be a view, hidden[:, 0], of something large.
            head = outputs[place].detach().clone()
            if axes:
                head = padded(head, axes, first.shape[axes[0]])
            if head.shape[1:] != first.shape[1:]:
                raise RecomputeError(
                    f"the encoder of {self.name} returned {self._paths[place]} of shape "
                    f"{list(outputs[place].shape)} in the second forward of a chunk, another one "
                    "than in the first; an encoder must do the same thing twice"
                )
            kept[place] = head
            self._num_bytes += math.prod(head.shape) * head.element_size()
        self._again.append((chunk, kept))

    def _compare(self) -> None:
        """Find the largest relative change of a row in what was noted; on the device."""
        again, self._again, self._num_bytes = self._again, [], 0
        rows = rows_of_all([chunk for chunk, _ in again])
        with paddle.no_grad(), amp_off():
            for place in again[0][1]:
                if self._first[place].is_changed:
                    continue
                now = paddle.concat([heads[place] for _, heads in again])
                worst = _largest_change(rows_of(self._first[place].tensor, rows), now)
                before = self._deviation
                self._deviation = worst if before is None else paddle.maximum(before, worst)

    def _check_constants(self, first: dict[str, Any], now: dict[str, Any]) -> None:
        """Check that outputs other than Tensors are equal for all chunks; the first is returned."""
        for path in {**first, **now}:
            missing = path not in first or path not in now
            if missing or not _same_constant(first[path], now[path]):
                raise DataError(
                    f"the encoder of {self.name} returned {path} = {first.get(path)!r} for its "
                    f"first chunk and {now.get(path)!r} for another one; only Tensors are joined "
                    "over the chunks, so any other value must be the same for all of them. Return "
                    "a Tensor with one row per row."
                )


def _largest_change(then: paddle.Tensor, now: paddle.Tensor) -> paddle.Tensor:
    """The largest relative change of a row; a row's largest number is 1."""
    if now.dtype in (paddle.float16, paddle.bfloat16):
        then, now = then.astype("float32"), now.astype("float32")
    if now.ndim != 2:
        then, now = (one.reshape([len(now), -1]) for one in (then, now))
    same = (now == then) | ((now != now) & (then != then))
    change = paddle.where(same, paddle.zeros_like(now), (now - then).abs()).max(axis=1)
    # 0 / 0 must be 0: a row of zeros that is still zero has not changed.
    share = change / then.abs().max(axis=1).clip(min=float(np.finfo(np.float32).tiny))
    share = paddle.where(change == 0, paddle.zeros_like(share), share)
    # Infinity minus infinity is NaN: count it as infinite change.
    share = paddle.where(share != share, paddle.full_like(share, math.inf), share).max()
    return share if share.dtype == paddle.float32 else share.astype("float32")


def _is_floating(tensor: paddle.Tensor) -> bool:
    """What ``is_floating_point()`` says, without its frames."""
    return tensor.dtype in _FLOATING


_FLOATING = (paddle.float32, paddle.bfloat16, paddle.float16, paddle.float64)


def _same_constant(one: Any, other: Any) -> bool:
    """Whether two constants are equal; True for types that cannot be compared."""
    if one is other or not (isinstance(one, _CONSTANTS) and isinstance(other, _CONSTANTS)):
        return True
    return bool(one == other or (one != one and other != other))


class _Kept:
    """An embedding of the first forward, to compare with the second.

    It shares memory with the embedding that the loss gets. If the loss writes to it in place, it
    cannot be compared.
    """

    def __init__(self, embedding: paddle.Tensor) -> None:
        self.tensor = embedding.detach()
        self._version = self.tensor.inplace_version

    @property
    def is_changed(self) -> bool:
        """Whether the embedding was written to."""
        return bool(self.tensor.inplace_version != self._version)


class _Source(paddle.autograd.PyLayer):
    """The start of the graph on an embedding; its backward calls a function.

    A leaf would have another order: the engine processes leaves first, and this node at the point
    at which a plain step would process the concatenation of the chunks.
    """

    @classmethod
    def of(cls, embedding: paddle.Tensor, receive: Callable[[paddle.Tensor], None]) -> Any:
        """`embedding` with a graph; `receive` is called with its gradient."""
        anchor = paddle.zeros([1])  # a PyLayer without an input that needs a gradient has no graph
        anchor.stop_gradient = False
        # In a holder: Paddle takes an argument that is returned for one that was changed in place.
        source = cls.apply(anchor, _Holder(embedding, receive))
        # A copy: Paddle ignores the result of a hook on the output of a PyLayer, or on a view of
        # it (2.6.2, 3.3.1).
        return paddle.assign(source)

    @staticmethod
    def forward(ctx: Any, anchor: paddle.Tensor, holder: _Holder) -> paddle.Tensor:
        ctx.receive = holder.receive
        return holder.embedding

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        ctx.receive(gradient)
        return paddle.zeros([1])


@dataclass
class _Holder:
    """An argument in which Paddle does not search for tensors."""

    embedding: paddle.Tensor
    receive: Callable[[paddle.Tensor], None]


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Form = Callable[[Any], Arguments]
"""Gives the positional and the keyword arguments for a batch."""


def form_for(encoder: Callable[..., Any], batch: Any) -> Form:
    """How a batch of this structure is passed to the encoder.

    A dict becomes keyword arguments if the encoder has arguments of these names; a tuple or list
    becomes positional arguments if the encoder has that many. Anything else is one argument.
    """
    if isinstance(batch, DICTS) and all(isinstance(key, str) for key in batch):
        if _takes(encoder, (), dict(batch)):
            return lambda batch: ((), dict(batch))
    elif type(batch) in (tuple, list) and _takes(encoder, tuple(batch), {}):
        return lambda batch: (tuple(batch), {})
    return lambda batch: ((batch,), {})


def _takes(encoder: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    function = encoder.forward if isinstance(encoder, paddle.nn.Layer) else encoder
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled code has no signature: assume that it fits
        return True
    try:
        signature.bind(*args, **named)
    except TypeError:
        return False
    return True


def _filled(structure: Any, paths: list[str], tensors: list[paddle.Tensor]) -> Any:
    """`structure` with its tensors replaced by `tensors`, in order."""
    by_path = dict(zip(paths, tensors, strict=True))
    order: Iterator[str] = (path for path, _ in named_leaves(structure, "output"))
    return map_leaves(lambda leaf: by_path.get(next(order), leaf), structure)
