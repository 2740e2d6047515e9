"""An encoder that runs in chunks: first without a graph, later once more with a graph.

The second forward of a chunk repeats the first: random streams, AMP state, train/eval flags and
buffers are those of the first forward and are restored afterwards. BatchNorm's running statistics
are updated once per chunk.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import paddle

from paddle_recompute._nested import DICTS, is_tensor, map_leaves, named_leaves
from paddle_recompute._paddle.amp import amp_off
from paddle_recompute._paddle.backward import backward_from, set_gradients
from paddle_recompute.captured_state import Call, Stamp, is_written_since, stamp, watch_writes
from paddle_recompute.contrastive._chunks import (
    Chunk,
    cut_axes,
    cut_to,
    in_batch_order,
    order_of,
    padded,
    rows_of,
)
from paddle_recompute.contrastive._recomputation_check import (
    RecomputationCheck,
    check_repetition,
    nan_unless,
)
from paddle_recompute.errors import DataError, RecomputeError

_CONSTANTS = (type(None), bool, int, float, str)
_FLOATING = (paddle.float32, paddle.bfloat16, paddle.float16, paddle.float64)
_TENSOR = object()
"""Stands for a tensor in the structure of an output."""


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
        self._order = order_of(chunks)
        self.name = name
        self._what = f"the encoder of {name}"
        self._keeps_graph = keeps_graph
        self._outputs: list[paddle.Tensor] = []  # of the first forward, if it keeps its graph
        self._calls: list[Call] = []  # one per chunk, if there is a second forward
        self._form: Form | None = None
        self._outline: list[str] = []  # of the outputs, equal for all chunks
        self._paths: list[str] = []  # of the tensors among them
        self._cut: dict[int, tuple[int, ...]] = {}  # by head: the axes that are a chunk's length
        self.is_trained = False
        """After `encode`: whether an output needs a gradient."""
        # By head (place among the outputs): of each chunk.
        self._gradients: dict[int, list[paddle.Tensor]] = {}
        self._recomputation_check: RecomputationCheck

    def encode(self, reached: list[ChunkedEncoder], before: ChunkedEncoder | None = None) -> Any:
        """The first forward of every chunk.

        Args:
            reached: Gets this object when the backward of the loss reaches an output, once for each
                output that needs a gradient.
            before: What was encoded right before, if anything was.

        Returns:
            The encoder's output, with all rows in every tensor.
        """
        had_gradients = paddle.is_grad_enabled()
        is_repeated = had_gradients and not self._keeps_graph
        inputs: list[tuple[str, paddle.Tensor, Stamp]] = []
        last: Call | None = None
        if is_repeated:
            watch_writes()
            # `Call` sees writes to the arguments, which may be copies.
            inputs = [(p, t, stamp(t)) for p, t in named_leaves(self._batch) if is_tensor(t)]
            if before is not None and before._calls and before.encoder is self.encoder:
                last = before._calls[-1]
        structure: Any = None
        parts: list[list[paddle.Tensor]] = []
        trained: set[int] = set()
        undecided = had_gradients
        try:
            for number in range(self.num_chunks):
                # With a graph until each output was found to depend on a trained parameter: usually
                # one chunk, more for an encoder with a frozen or detached path. The parameters of a
                # Layer alone do not tell, because it may reach others.
                set_gradients(undecided or (had_gradients and self._keeps_graph))
                output = self._first(number, last) if is_repeated else self._plain(number)
                leaves = self._leaves(output, number)
                if number == 0:
                    structure = map_leaves(
                        lambda leaf: _TENSOR if is_tensor(leaf) else leaf, output
                    )
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
        finally:
            set_gradients(had_gradients)
        for path, tensor, before_all in inputs:
            if is_written_since(tensor, before_all):
                raise RecomputeError(
                    f"{self._what} changes its input {self.name}{path} in place, so the second "
                    "forward would read other values than the first. Let it change a copy (x = "
                    "x.clone() before the in-place operation)."
                )
        self.is_trained = bool(trained)
        with amp_off():
            heads = self._joined(parts)
            del parts
            firsts = {place: heads[place] for place in sorted(trained)}
            heads = [in_batch_order(whole, self._order) for whole in heads]
            for place in firsts:
                receive = functools.partial(self._receive, place, reached)
                heads[place] = _source(heads[place], receive)
        if trained:
            self._recomputation_check = RecomputationCheck(self.name, firsts, self._cut)
        else:
            self._calls, self._outputs = [], []
        order = iter(heads)
        return map_leaves(lambda leaf: next(order) if leaf is _TENSOR else leaf, structure)

    def backward(self, number: int) -> None:
        """The backward of a chunk into ``.grad``, outside of ``auto_cast``.

        Runs a second forward if no graph was kept.
        """
        is_equal: paddle.Tensor | None = None
        if self._keeps_graph:
            outputs, self._outputs = self._outputs, []
        else:
            self._recomputation_check.compare_if_due()
            output = self._calls[number].repeat(*self._arguments(number))
            outputs = self._leaves(output, number, again=True)
            del output
            is_equal = self._note(outputs, number)
        heads: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}
        for place in self._gradients:
            head = outputs[place]
            if head.stop_gradient:
                continue  # nothing on the path of this chunk is trained
            part = self._gradient_of(place, number)
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
            backward_from(tensors, gradients)
        elif is_equal is not None:  # no gradient is left that could be made NaN
            check_repetition([(self.name, is_equal)])

    def is_repeated(self) -> paddle.Tensor | None:
        """Whether the second forwards returned what the first ones did: one bool, not read; None if
        there were none.
        """
        return self._recomputation_check.answer()

    def _first(self, number: int, last: Call | None) -> Any:
        """The first forward of a chunk, recorded; `last`: the call right before the first chunk."""
        call = Call(self.encoder, self._what, preserve_rng_state=True, check=False)
        arguments, named = self._arguments(number)
        output = call.first(arguments, named, previous=self._calls[-1] if self._calls else last)
        self._calls.append(call)
        return output

    def _plain(self, number: int) -> Any:
        arguments, named = self._arguments(number)
        return self.encoder(*arguments, **named)

    def _arguments(self, number: int) -> Arguments:
        """For a forward of a chunk: new tensors, on which the encoder may put hooks."""
        batch = self._chunks[number].of(self._batch)
        if self._form is None:
            self._form = form_for(self.encoder, batch)
        return self._form(batch)

    def _gradient_of(self, place: int, number: int) -> paddle.Tensor:
        """The gradient of the loss by an output of a chunk."""
        part = self._gradients[place][number]
        return cut_to(part, self._cut[place], self._chunks[number].columns)

    def _note(self, outputs: list[paddle.Tensor], number: int) -> paddle.Tensor | None:
        """Note a second forward; returns, for the last chunk, whether all were repetitions."""
        for place in self._gradients:
            self._recomputation_check.note(place, self._paths[place], outputs[place])
        if number < self.num_chunks - 1:
            return None
        answer = self._recomputation_check.answer()
        self._recomputation_check.end()
        return answer

    def _leaves(self, output: Any, number: int, *, again: bool = False) -> list[paddle.Tensor]:
        """The tensors of an output, after checks."""
        tensors: dict[str, paddle.Tensor] = {}
        outline = []
        for path, leaf in named_leaves(output, "output"):
            if is_tensor(leaf):
                tensors[path] = leaf
                outline.append(path)
            else:
                is_constant = isinstance(leaf, _CONSTANTS)
                outline.append(f"{path} = {leaf!r}" if is_constant else f"{path} ({type(leaf)})")
        expected = len(self._chunks[number].rows)
        for path, tensor in tensors.items():
            shape = tensor.shape
            if not shape or shape[0] != expected:
                raise DataError(
                    f"{self._what} got {expected} rows and returned {path} of shape "
                    f"{list(tensor.shape)}; the first axis of every returned tensor must be the "
                    "batch, because the chunks are joined along it"
                )
        if not self._outline:
            if not any(tensor.dtype in _FLOATING for tensor in tensors.values()):
                raise DataError(
                    f"{self._what} returned no floating-point Tensor, so the loss would get no "
                    "embedding"
                )
            self._outline, self._paths = outline, list(tensors)
        elif outline != self._outline:
            was, now = next(
                (a, b)
                for a, b in itertools.zip_longest(self._outline, outline, fillvalue="nothing")
                if a != b
            )
            error = RecomputeError if again else DataError
            raise error(
                f"{self._what} returned {was} for its first chunk and {now} for another one; "
                "tensors are joined over the chunks, and everything else must be the same for all "
                "of them. Return a Tensor with one row per row."
            )
        return list(tensors.values())

    def _joined(self, parts: list[list[paddle.Tensor]]) -> list[paddle.Tensor]:
        """All rows of each output, in the order of the chunks."""
        heads = []
        with paddle.no_grad():
            for index, path in enumerate(self._paths):
                pieces = [part[index] for part in parts]
                what = f"what {self._what} returns as {path}"
                self._cut[index], length = cut_axes(pieces, self._chunks, what)
                heads.append(
                    paddle.concat([padded(piece, self._cut[index], length) for piece in pieces])
                )
        return heads

    def _receive(self, place: int, reached: list[ChunkedEncoder], gradient: paddle.Tensor) -> None:
        with amp_off():
            if self._order is not None:
                gradient = rows_of(gradient, self._order)
            sizes = [len(chunk.rows) for chunk in self._chunks]
            self._gradients[place] = paddle.split(gradient, sizes) if sizes[1:] else [gradient]
        reached.append(self)


def _source(embedding: paddle.Tensor, receive: Callable[[paddle.Tensor], None]) -> paddle.Tensor:
    """`embedding` with a graph, at whose start `receive` gets its gradient.

    A leaf would have another order: the engine processes leaves first, and a node at the point at
    which a plain step would process the concatenation of the chunks.
    """
    leaf = embedding.detach()
    leaf.stop_gradient = False
    start = leaf.clone()
    start.register_hook(receive)
    # Hooks that the loss registers come before `receive`.
    return start.clone()


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
