"""An encoder that runs in chunks: first without a graph, later once more with a graph.

The second forward of a chunk repeats the first: random streams, AMP state, train/eval flags and
buffers are those of the first forward and are restored afterwards. BatchNorm's running statistics
are updated once per chunk.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle

from paddle_recompute._nested import DICTS, is_tensor, map_leaves, named_leaves
from paddle_recompute._paddle.amp import amp_off
from paddle_recompute._paddle.backward import set_gradients
from paddle_recompute.contrastive._chunks import Chunk, cut_axes, cut_to, joined, padded, rows_of
from paddle_recompute.contrastive._repetition import Repetition, check_repetition, nan_unless
from paddle_recompute.errors import DataError, RecomputeError
from paddle_recompute.replay import Row, Stamp, is_written_since, stamp

_CONSTANTS = (type(None), bool, int, float, str)
_FLOATING = (paddle.float32, paddle.bfloat16, paddle.float16, paddle.float64)


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
        self._keeps_graph = keeps_graph
        self._outputs: list[paddle.Tensor] = []  # of the first forward, if it keeps its graph
        self._row: Row | None = None
        self._form: Form | None = None
        self._paths: list[str] = []
        self._cut: dict[int, tuple[int, ...]] = {}  # by head: the axes that are a chunk's length
        self.is_trained = False
        """After `encode`: whether an output needs a gradient."""
        self._is_reached = False  # by the backward of the loss
        self._gradients: dict[int, paddle.Tensor] = {}  # by head (place among the outputs)
        self._repetition: Repetition

    def encode(self, when_reached: Callable[[], None], before: ChunkedEncoder | None = None) -> Any:
        """The first forward of every chunk.

        Args:
            when_reached: Called when the backward of the loss reaches an output, once for each
                output that needs a gradient.
            before: What was encoded right before, if anything was.

        Returns:
            The encoder's output, with all rows in every tensor.
        """
        had_gradients = paddle.is_grad_enabled()
        stamps: list[tuple[str, paddle.Tensor, Stamp]] = []
        # What a second forward would need is not recorded where there is none.
        if had_gradients and not self._keeps_graph:
            self._begin_row(before)
            stamps = [(p, t, stamp(t)) for p, t in named_leaves(self._batch) if is_tensor(t)]
        structure: Any = None
        first: dict[str, Any] = {}
        parts: list[list[paddle.Tensor]] = []
        trained: set[int] = set()
        undecided = True
        for number, chunk in enumerate(self._chunks):
            # With a graph until each output was found to depend on a trained parameter: usually one
            # chunk, more for an encoder with a frozen or detached path. The parameters of a Layer
            # alone do not tell, because it may reach others.
            set_gradients(had_gradients and (undecided or self._keeps_graph))
            try:
                output = self._first(number)
            finally:
                set_gradients(had_gradients)
            leaves, constants = self._leaves(output, chunk)
            if number == 0:
                structure = map_leaves(lambda leaf: None if is_tensor(leaf) else leaf, output)
                first = constants
            elif first or constants:
                self._check_constants(first, constants)
            if undecided:
                floating = [i for i, leaf in enumerate(leaves) if leaf.dtype in _FLOATING]
                trained.update(i for i in floating if not leaves[i].stop_gradient)
                undecided = len(trained) < len(floating)
            del output
            # Copies: the output may be a view, hidden[:, 0], of something large.
            parts.append([leaf.detach().clone() for leaf in leaves])
            if self._keeps_graph:
                self._outputs = leaves
            del leaves
        for path, tensor, before_row in stamps:
            if is_written_since(tensor, before_row):
                raise RecomputeError(
                    f"the encoder of {self.name} changes its input {self.name}{path} in place, so "
                    "the second forward would read other values than the first. Let it change a "
                    "copy (x = x.clone() before the in-place operation)."
                )
        self.is_trained = bool(trained)
        heads = self._joined(parts)
        del parts
        if trained:
            firsts = {place: heads[place].detach() for place in sorted(trained)}
            for place in firsts:
                receive = functools.partial(self._receive, place, when_reached)
                firsts[place], heads[place] = _source(firsts[place], receive)
            self._repetition = Repetition(self.name, firsts, self._cut)
        else:
            self._row, self._outputs = None, []
        return _filled(structure, self._paths, heads)

    def backward(self, number: int) -> None:
        """The backward of a chunk into ``.grad``, outside of ``auto_cast``.

        Runs a second forward if no graph was kept.
        """
        chunk = self._chunks[number]
        is_equal: paddle.Tensor | None = None
        if self._keeps_graph:
            outputs, self._outputs = self._outputs, []
        else:
            assert self._row is not None
            self._repetition.compare_if_due()
            outputs = self._row.repeat(number, *self._arguments(number))
            outputs, _ = self._leaves(outputs, chunk, again=True)
            is_equal = self._note(outputs, number)
        heads: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}
        for place, gradient in self._gradients.items():
            head = outputs[place]
            if head.stop_gradient:
                continue  # nothing on the path of this chunk is trained
            part = cut_to(rows_of(gradient, chunk.rows), self._cut[place], chunk.columns)
            if is_equal is not None:
                part = nan_unless(is_equal, part)
            # The engine refuses a tensor that is given twice.
            part = heads[id(head)][1] + part if id(head) in heads else part
            heads[id(head)] = head, part
        del outputs, head
        if number == self.num_chunks - 1:
            self._gradients = {}
        if heads:
            tensors, gradients = zip(*heads.values(), strict=True)
            del heads, part
            paddle.autograd.backward(list(tensors), list(gradients))
        elif is_equal is not None:  # no gradient is left that could be made NaN
            check_repetition({self.name: is_equal})

    @property
    def replays(self) -> range:
        """The chunks that need a second forward; none for a frozen encoder."""
        return range(self.num_chunks if self._is_reached else 0)

    def is_repeated(self) -> paddle.Tensor | None:
        """Whether the second forwards returned what the first ones did: one bool, not read; None if
        there were none.
        """
        return self._repetition.answer() if self._is_reached else None

    def _begin_row(self, before: ChunkedEncoder | None) -> None:
        row = None if before is None else before._row
        self._row = Row(self.encoder, f"the encoder of {self.name}", row)

    def _first(self, number: int) -> Any:
        arguments, named = self._arguments(number)
        if self._row is None:
            return self.encoder(*arguments, **named)
        return self._row.first(arguments, named)

    def _arguments(self, number: int) -> Arguments:
        """For a forward of a chunk: new tensors, on which the encoder may put hooks."""
        batch = self._chunks[number].of(self._batch)
        if self._form is None:
            self._form = form_for(self.encoder, batch)
        return self._form(batch)

    def _note(self, outputs: list[paddle.Tensor], number: int) -> paddle.Tensor | None:
        """Note a second forward; returns, for the last chunk, whether all were repetitions."""
        for place in self._gradients:
            self._repetition.note(place, self._paths[place], outputs[place])
        self._repetition.add(self._chunks[number])
        if number < self.num_chunks - 1:
            return None
        answer = self._repetition.answer()
        self._repetition.end()
        return answer

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
        if not any(tensor.dtype in _FLOATING for tensor in tensors.values()):
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
        self._gradients[place], self._is_reached = gradient, True
        when_reached()

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


def _same_constant(one: Any, other: Any) -> bool:
    """Whether two constants are equal; True for types that cannot be compared."""
    if one is other or not (isinstance(one, _CONSTANTS) and isinstance(other, _CONSTANTS)):
        return True
    return bool(one == other or (one != one and other != other))


def _source(
    embedding: paddle.Tensor, receive: Callable[[paddle.Tensor], None]
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """`embedding` twice: without a graph, and with one at whose start `receive` gets its gradient.

    A leaf would have another order: the engine processes leaves first, and a node at the point at
    which a plain step would process the concatenation of the chunks.
    """
    leaf = embedding.detach()
    leaf.stop_gradient = False
    with amp_off():
        start = leaf.clone()
        start.register_hook(receive)
        # Hooks that the loss registers come before `receive`.
        return start.detach(), start.clone()


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
