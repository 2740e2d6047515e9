"""Cut a batch into chunks: by number of rows, or by number of tokens.

If a text is padded to the longest of 4096 texts, most of it is padding. With `by_length` the rows
of a chunk have about the same length and are padded to the longest of the chunk, so the encoder
reads little padding. The results are in the caller's order.

Rows may be NumPy arrays: they stay in host memory or in a mapped file (``numpy.memmap``), and only
the rows of one chunk become a Tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute._nested import is_tensor, map_leaves, named_leaves
from paddle_recompute._paddle import device
from paddle_recompute.contrastive._texts import LengthOf, lengths_of, texts_of
from paddle_recompute.errors import DataError

# Without uint16, which Paddle reads as the bits of bfloat16.
_ARRAY_TYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


@dataclass(frozen=True)
class Chunk:
    """Some rows of a batch.

    Attributes:
        rows: Their places in the batch: a range, or an array of them.
        columns: How many tokens the longest has; None leaves the padding as it is.
        cut: The axes that have these columns, by the path of the tensor.
    """

    rows: range | NDArray[np.int64]
    columns: int | None = None
    cut: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def of(self, batch: Any, *, arrays: bool = False) -> Any:
        """These rows of every tensor in `batch`, without unneeded padding.

        Views of the caller's memory if the tensor is a Tensor and the rows are a range, else
        copies.

        Args:
            batch: A Tensor, an array or a structure of them.
            arrays: Whether arrays stay arrays.
        """
        if not self.cut and is_tensor(batch):
            return rows_of(batch, self.rows)
        paths = (path for path, _ in named_leaves(batch)) if self.cut else itertools.repeat("")
        order: Iterator[str] = iter(paths)
        return map_leaves(lambda leaf: self._of_leaf(next(order), leaf, arrays), batch)

    def _of_leaf(self, path: str, leaf: Any, arrays: bool) -> Any:
        if isinstance(leaf, np.ndarray):
            rows = self.rows
            part = leaf[rows.start : rows.stop] if isinstance(rows, range) else leaf[rows]
            part = self._trimmed(path, part)
            return np.array(part) if arrays else device.put(part)  # copies both
        return self._trimmed(path, rows_of(leaf, self.rows)) if is_tensor(leaf) else leaf

    def _trimmed(self, path: str, leaf: Any) -> Any:
        return cut_to(leaf, self.cut.get(path, ()), self.columns)


def by_rows(num_rows: int, chunk_size: int) -> list[Chunk]:
    """Chunks of `chunk_size` rows in order; the last chunk has the rest."""
    return [
        Chunk(range(first, min(first + chunk_size, num_rows)))
        for first in range(0, num_rows, chunk_size)
    ]


def by_length(
    batch: Any, chunk_tokens: int, length_of: LengthOf | None, num_rows: int, name: str
) -> list[Chunk]:
    """Rows of about the same length, with at most `chunk_tokens` tokens, padding included.

    The shortest come first and the longest last. A row that is longer than `chunk_tokens` is a
    chunk of its own. Chunks are filled from the longest row on: the last chunk, whose backward
    overlaps with communication, is full, and the first chunk has the rest.

    Args:
        batch: Tensors with the same number of rows.
        chunk_tokens: The most tokens of a chunk: rows times tokens of its longest row.
        length_of: Returns the lengths; None: they are read from the tensors of `texts_of`.
        num_rows: Rows of `batch`.
        name: The name of `batch` in errors.
    """
    texts = texts_of(batch, name)
    given = length_of(batch) if length_of is not None else None
    lengths = lengths_of(texts, given, num_rows, name).clip(1, texts.width)
    order = np.argsort(-lengths, kind="stable")
    chunks = []
    first = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        behind = first + max(1, chunk_tokens // longest)
        chunks.append(Chunk(np.sort(order[first:behind]), longest, texts.cut))
        first = behind
    return chunks[::-1]


def num_rows_of(batch: Any, name: str) -> int:
    """The number of rows of every tensor in `batch`.

    Raises:
        DataError: There is no tensor or no row; the numbers of rows differ; a tensor needs a
            gradient; or an array has a dtype that Tensors do not have.
    """
    found: tuple[str, int] | None = None
    for path, leaf in named_leaves(batch, name):
        if isinstance(leaf, np.ndarray) and leaf.dtype.name not in _ARRAY_TYPES:
            raise DataError(
                f"{path} is a NumPy array of {leaf.dtype}; allowed are {', '.join(_ARRAY_TYPES)}"
            )
        if not (is_tensor(leaf) or isinstance(leaf, np.ndarray)):
            continue
        if not leaf.shape:
            raise DataError(
                f"{path} is a tensor without axes; every tensor needs the batch as its first axis. "
                "A number that all rows share can be a Python number."
            )
        if is_tensor(leaf) and not leaf.stop_gradient:
            raise DataError(
                f"{path} needs a gradient (stop_gradient is False), but gradients end at the "
                "encoder's inputs, because the encoder gets copies of chunks. Make what computes "
                "it part of the encoder, or detach it."
            )
        if found is not None and found[1] != leaf.shape[0]:
            raise DataError(
                f"{path} has {leaf.shape[0]} rows and {found[0]} has {found[1]}; the first axis of "
                "every tensor is the batch and must be the same"
            )
        found = path, leaf.shape[0]
    if found is None:
        raise DataError(
            f"{name} ({type(batch).__name__}) contains no Tensor and no array; give a Tensor, an "
            "array, or a tuple, list, dict, UserDict or dataclass of them"
        )
    if found[1] == 0:
        raise DataError(f"{found[0]} has 0 rows; a batch needs at least one")
    return int(found[1])


def rows_of(tensor: paddle.Tensor, rows: range | NDArray[np.int64]) -> paddle.Tensor:
    """The given rows of `tensor`, in the order of `rows`."""
    if isinstance(rows, range):
        return tensor[rows.start : rows.stop]
    places = device.put(rows)
    carrier = _CARRIERS.get(tensor.dtype)
    if carrier is None:
        return paddle.gather(tensor, places, axis=0)
    return paddle.gather(tensor.astype(carrier), places, axis=0).astype(tensor.dtype)


# On CPU, gather does not support float16 (2.6, 3.x) and bool (2.6); these dtypes are exact copies.
_CARRIERS = {paddle.float16: "float32", paddle.bool: "int32"}


def order_of(chunks: Sequence[Chunk]) -> NDArray[np.int64] | None:
    """The rows of the batch in the order of the chunks; None where that is the batch's own."""
    if all(isinstance(chunk.rows, range) for chunk in chunks):
        return None
    return np.concatenate([chunk.rows for chunk in chunks])


def in_batch_order(whole: paddle.Tensor, order: NDArray[np.int64] | None) -> paddle.Tensor:
    """`whole`, whose rows are in the given `order_of` chunks, in that of the batch."""
    return whole if order is None else rows_of(whole, np.argsort(order))


def cut_axes(
    parts: Sequence[paddle.Tensor], chunks: Sequence[Chunk], what: str
) -> tuple[tuple[int, ...], int]:
    """The axes along which what an encoder returned is as long as the chunk, not as the batch.

    Args:
        parts: What it returned for each chunk.
        chunks: The chunks.
        what: How errors call it.

    Returns:
        The axes, none where all parts have one shape, and the length of the longest chunk.

    Raises:
        DataError: The parts differ along another axis.
    """
    shapes = [list(part.shape[1:]) for part in parts]
    if all(shape == shapes[0] for shape in shapes):
        return (), 0
    columns = [chunk.columns for chunk in chunks]
    axes = []
    for axis, sizes in enumerate(itertools.zip_longest(*shapes), 1):
        if list(sizes) == columns and None not in sizes:
            axes.append(axis)
        elif len(set(sizes)) > 1:
            first = next(index for index, size in enumerate(sizes) if size != sizes[0])
            raise DataError(
                f"{what} has shape {[parts[0].shape[0], *shapes[0]]} for one chunk and "
                f"{[parts[first].shape[0], *shapes[first]]} for another; chunks can be put "
                "together if only the first axis differs, or one that is the length of the text "
                "(chunk_tokens). Return a vector per row"
            )
    return tuple(axes), max(size for size in columns if size is not None)


def padded(part: paddle.Tensor, axes: Sequence[int], length: int) -> paddle.Tensor:
    """`part` with zeros behind it, so that it is `length` long along `axes`."""
    for axis in axes:
        shape = list(part.shape)
        shape[axis] = length - shape[axis]
        if shape[axis]:
            part = paddle.concat([part, paddle.zeros(shape, part.dtype)], axis=axis)
    return part


def cut_to(whole: Any, axes: Sequence[int], length: int | None) -> Any:
    """`whole`, a tensor or an array, without what is behind `length` along `axes`."""
    for axis in axes:
        if whole.shape[axis] != length:
            whole = whole[tuple([slice(None)] * axis + [slice(length)])]
    return whole
