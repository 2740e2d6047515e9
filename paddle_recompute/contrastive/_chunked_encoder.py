"""One encoder and its batch during one step: encoded in chunks, and later once more with a graph.

The second forward of a chunk repeats the first: the random streams, AMP state, train/eval flags and
buffers are those that the first one saw, and it leaves no marks. BatchNorm's running statistics
take in each chunk once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddle_recompute._nested import is_tensor, map_leaves, named_leaves, tensors_in
from paddle_recompute.contrastive._chunks import Chunk, cut_axes, cut_to, joined, padded, rows_of
from paddle_recompute.errors import DataError, RecomputeError
from paddle_recompute.replay import ReplayState, StateWatch, layers_of

# Both forwards of a chunk are the same operations on the same numbers. Kernels of a GPU may add
# them up in another order (a percent, in bfloat16); another dropout mask changes much more.
REPETITION_TOLERANCE = 0.05

_CONSTANTS = (type(None), bool, int, float, str)


class ChunkedEncoder:
    """An encoder with the rows that it encodes in one step.

    Args:
        encoder: A Layer or any callable.
        batch: A Tensor or a structure of them.
        chunks: How `batch` is cut; every row is in one of them.
        name: How errors call the batch.
    """

    def __init__(
        self, encoder: Callable[..., Any], batch: Any, chunks: Sequence[Chunk], name: str
    ) -> None:
        self.encoder = encoder
        self.num_chunks = len(chunks)
        self._batch = batch
        self._chunks = chunks
        self._name = name
        self._moments: list[ReplayState] = []
        self._paths: list[str] = []
        self._trained: list[int] = []  # the heads (places among the outputs) that need a gradient
        self._cut: dict[int, tuple[int, ...]] = {}  # by head: the axes that are a chunk's length
        self._gradients: dict[int, paddle.Tensor] = {}
        self._first: dict[int, _Kept] = {}  # by head: what the first forwards returned
        self._deviations: list[paddle.Tensor] = []

    def encode(self, when_reached: Callable[[], None]) -> Any:
        """The first forward of every chunk.

        Args:
            when_reached: Called when the backward of the loss reaches an output, once for each
                that needs a gradient.

        Returns:
            What the encoder returns, with all rows in every tensor.
        """
        watch = StateWatch(layers_of(self.encoder, ()))
        structure: Any = None
        parts: list[list[paddle.Tensor]] = []
        trained: set[int] = set()
        undecided = True
        for number, chunk in enumerate(self._chunks):
            self._moments.append(watch.moment())
            # With a graph until every output was seen to depend on something that is trained: that
            # is one chunk, but for an encoder with a frozen or detached path. What a Layer's
            # parameters say would miss those that it holds in other ways.
            with paddle.set_grad_enabled(undecided), watch.forward():
                output = self._call(chunk)
            leaves = self._leaves(output, chunk)
            if number == 0:
                structure = map_leaves(lambda leaf: None if is_tensor(leaf) else leaf, output)
            else:
                self._check_constants(structure, output)
            floating = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point()]
            trained.update(i for i in floating if not leaves[i].stop_gradient)
            undecided = len(trained) < len(floating)
            del output
            # Copies: the output may be a view, hidden[:, 0], of something large.
            parts.append([leaf.detach().clone() for leaf in leaves])
            del leaves
        self._trained = sorted(trained)
        if not trained:
            self._moments = []
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
        """The chunks that need a second forward: none of a frozen encoder."""
        return range(self.num_chunks if self._gradients else 0)

    def replay(self, number: int) -> None:
        """The second forward of a chunk, and its backward into ``.grad`` of the parameters."""
        chunk, moment = self._chunks[number], self._moments[number]
        with moment.replayed():
            outputs = self._leaves(self._call(chunk), chunk, again=True)
        with _amp_off():
            heads: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}
            for place, gradient in self._gradients.items():
                head = outputs[place]
                axes = self._cut[place]
                self._note_deviation(head, self._first[place], chunk, axes)
                if head.stop_gradient:
                    continue  # this chunk took a path on which nothing is trained
                part = cut_to(rows_of(gradient, chunk.rows), axes, head)
                # The engine refuses the same tensor twice.
                part = heads[id(head)][1] + part if id(head) in heads else part
                heads[id(head)] = head, part
            del outputs, head
            if heads:
                tensors, gradients = zip(*heads.values(), strict=True)
                del heads, part
                paddle.autograd.backward(list(tensors), list(gradients))

    def check_repetition(self) -> None:
        """Compare the second forwards since the last call with the first; waits for the device.

        Raises:
            RecomputeError: A second forward returned other numbers.
        """
        if not self._deviations:
            return
        with paddle.no_grad(), _amp_off():
            worst = float(paddle.stack(self._deviations).max().item())
        self._deviations = []
        if worst > REPETITION_TOLERANCE:
            raise RecomputeError(
                f"the encoder of {self._name} returned other numbers in the second forward of a "
                f"chunk (they differ by {worst:.0%}), so its gradient would be wrong. An encoder "
                "must do the same thing twice: look for state that it changes, a global that it "
                "reads, or randomness outside Paddle, NumPy and Python's random."
            )

    def _call(self, chunk: Chunk) -> Any:
        batch = chunk.of(self._batch)
        versions = [(tensor, tensor.inplace_version) for tensor in tensors_in(batch)]
        arguments, named = arguments_for(self.encoder, batch)
        output = self.encoder(*arguments, **named)
        if any(tensor.inplace_version != version for tensor, version in versions):
            raise RecomputeError(
                f"the encoder of {self._name} changes its input in place, so a second forward "
                "would not see the values that the first one saw; let it change a copy"
            )
        return output

    def _leaves(self, output: Any, chunk: Chunk, *, again: bool = False) -> list[paddle.Tensor]:
        """The tensors of an output, checked."""
        leaves = list(named_leaves(output, "output"))
        tensors = {path: leaf for path, leaf in leaves if is_tensor(leaf)}
        expected = len(chunk.rows)
        for path, tensor in tensors.items():
            if not tensor.shape or tensor.shape[0] != expected:
                raise DataError(
                    f"the encoder of {self._name} got {expected} rows and returned {path} of shape "
                    f"{list(tensor.shape)}; the first axis of every tensor that it returns must be "
                    "the batch, because the chunks are put together along it"
                )
        if not any(tensor.is_floating_point() for tensor in tensors.values()):
            raise DataError(
                f"the encoder of {self._name} returned no floating-point Tensor, so there is no "
                "embedding to give to the loss"
            )
        paths = list(tensors)
        if self._paths and paths != self._paths:
            error = RecomputeError if again else DataError
            raise error(
                f"the encoder of {self._name} returned {', '.join(self._paths)} for its first "
                f"chunk and {', '.join(paths)} for another one; it must always return the same "
                "structure"
            )
        self._paths = paths
        return list(tensors.values())

    def _joined(self, parts: list[list[paddle.Tensor]]) -> list[paddle.Tensor]:
        heads = []
        with paddle.no_grad(), _amp_off():
            for place in range(len(self._paths)):
                pieces = [part[place] for part in parts]
                what = f"what the encoder of {self._name} returns as {self._paths[place]}"
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

    @paddle.no_grad()
    def _note_deviation(
        self, now: paddle.Tensor, first: _Kept, chunk: Chunk, axes: tuple[int, ...]
    ) -> None:
        """Look at every number of every row of a chunk; on the device."""
        if first.is_changed:
            return
        then = cut_to(rows_of(first.tensor, chunk.rows), axes, now)
        if now.dtype in (paddle.float16, paddle.bfloat16):
            then, now = then.astype("float32"), now.astype("float32")
        same = (now == then) | (paddle.isnan(now) & paddle.isnan(then))
        change = paddle.where(same, paddle.zeros_like(now), (now - then).abs())
        change, size = (
            one.reshape([len(chunk.rows), -1]).max(axis=1) for one in (change, then.abs())
        )
        # A row of zeros has changed if it is anything else; 0 / 0 must be 0 here.
        share = change / size.clip(min=float(np.finfo(np.float32).tiny))
        share = paddle.where(change == 0, paddle.zeros_like(share), share)
        # Infinity against a number, or against the other one, is no number here.
        share = paddle.where(paddle.isnan(share), paddle.full_like(share, math.inf), share)
        self._deviations.append(share.max().astype("float32"))

    def _check_constants(self, first: Any, output: Any) -> None:
        """What is no tensor is handed on as the first chunk has it, so all must have the same."""
        then, now = (
            {path: leaf for path, leaf in named_leaves(value, "output") if path not in self._paths}
            for value in (first, output)
        )
        for path in [*then, *now]:
            missing = path not in then or path not in now
            if missing or not _same_constant(then[path], now[path]):
                raise DataError(
                    f"the encoder of {self._name} returned {path} = {then.get(path)!r} for its "
                    f"first chunk and {now.get(path)!r} for another one; what is no Tensor is not "
                    "put together from the chunks, so it must always be the same. Return a Tensor "
                    "with one row per row."
                )


def _same_constant(one: Any, other: Any) -> bool:
    """Whether they are equal, of the types of which that can be told."""
    if one is other or not (isinstance(one, _CONSTANTS) and isinstance(other, _CONSTANTS)):
        return True
    return bool(one == other or (one != one and other != other))


class _Kept:
    """An embedding as the first forward returned it, to compare the second one with.

    The memory is the one that the loss is given. What the loss changes in place cannot be compared.
    """

    def __init__(self, embedding: paddle.Tensor) -> None:
        self.tensor = embedding.detach()
        self._version = self.tensor.inplace_version

    @property
    def is_changed(self) -> bool:
        """Whether somebody has written to it."""
        return bool(self.tensor.inplace_version != self._version)


class _Source(paddle.autograd.PyLayer):
    """The start of the graph over an embedding; its backward calls a function.

    A leaf would do too, but for the order: the engine takes care of leaves before all others, and
    of this node when it would of the concatenation of the chunks in a plain step.
    """

    @classmethod
    def of(cls, embedding: paddle.Tensor, receive: Callable[[paddle.Tensor], None]) -> Any:
        """`embedding` with a graph; `receive` is called with its gradient."""
        anchor = paddle.zeros([1])  # a PyLayer without an input that needs a gradient has no graph
        anchor.stop_gradient = False
        # In a holder: Paddle would take a tensor among the arguments that is returned
        # for one that is changed in place.
        source = cls.apply(anchor, _Holder(embedding, receive))
        # A copy: what a hook on the output of a PyLayer, or on a view of it, returns is dropped
        # (2.6.2, 3.3.1).
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
    """An argument that Paddle does not look into."""

    embedding: paddle.Tensor
    receive: Callable[[paddle.Tensor], None]


def arguments_for(
    encoder: Callable[..., Any], batch: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How `batch` is given to the encoder: (positional arguments, keyword arguments).

    A dict becomes keyword arguments if the encoder takes arguments of these names, a tuple or list
    positional ones if it takes so many; everything else, and what the encoder does not take in
    this way, is one argument.
    """
    if isinstance(batch, dict) and all(isinstance(key, str) for key in batch):
        if _takes(encoder, (), batch):
            return (), batch
    elif type(batch) in (tuple, list) and _takes(encoder, tuple(batch), {}):
        return tuple(batch), {}
    return (batch,), {}


def _takes(encoder: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    function = encoder.forward if isinstance(encoder, paddle.nn.Layer) else encoder
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled code has none: believe that it takes what it gets
        return True
    try:
        signature.bind(*args, **named)
    except TypeError:
        return False
    return True


def _filled(structure: Any, paths: list[str], tensors: list[paddle.Tensor]) -> Any:
    """`structure` with the tensors at the places where it had tensors."""
    by_path = dict(zip(paths, tensors, strict=True))
    order: Iterator[str] = (path for path, _ in named_leaves(structure, "output"))
    return map_leaves(lambda leaf: by_path.get(next(order), leaf), structure)


def _amp_off() -> contextlib.AbstractContextManager[None]:
    """Disable ``paddle.amp.auto_cast``, as for the backward of a plain step."""
    off: contextlib.AbstractContextManager[None] = paddle.amp.auto_cast(enable=False)
    return off
