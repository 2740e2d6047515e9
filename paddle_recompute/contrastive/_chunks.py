"""Cut a batch into chunks: so many rows each, or rows of about the same length.

A text that is padded to the longest of 4096 is mostly padding. With `by_length` the rows of a chunk
have about the same length and are padded to the longest of these, so the encoder reads few pads;
the caller's order is restored afterwards, and nobody else sees the sorting.

Rows may be NumPy arrays, too: they stay where they are, in host memory or in a file that is mapped
(``numpy.memmap``), and only those of a chunk become a Tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute._nested import is_tensor, map_leaves, named_leaves
from paddle_recompute.errors import ConfigError, DataError

LengthOf = Callable[[Any], Any]

_WHOLE_NUMBERS = (paddle.bool, paddle.uint8, paddle.int8, paddle.int16, paddle.int32, paddle.int64)
# Without uint16, which Paddle takes for the bits of bfloat16.
_ARRAY_TYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


@dataclass(frozen=True)
class Chunk:
    """Some rows of a batch.

    Attributes:
        rows: Their places in the batch: a range, or an array of them.
        columns: How many tokens the longest has; None leaves the padding as it is.
        width: How many columns, padding included, the batch has.
    """

    rows: range | NDArray[np.int64]
    columns: int | None = None
    width: int | None = None

    def of(self, batch: Any) -> Any:
        """These rows of every tensor in `batch`, without the padding that they do not need.

        Views of the caller's memory where it is a Tensor's and the rows are a range, else copies.
        """
        return map_leaves(self._of_leaf, batch)

    def _of_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            rows = self.rows
            part = leaf[rows.start : rows.stop] if isinstance(rows, range) else leaf[rows]
            # A copy in any case: Paddle may use the memory of an array as it is.
            return paddle.to_tensor(np.array(self._trimmed(part)))
        return self._trimmed(rows_of(leaf, self.rows)) if is_tensor(leaf) else leaf

    def _trimmed(self, leaf: Any) -> Any:
        if self.columns == self.width or not _is_text(leaf) or leaf.shape[1] != self.width:
            return leaf
        return leaf[:, : self.columns]


def by_rows(num_rows: int, chunk_size: int) -> list[Chunk]:
    """`chunk_size` rows at a time, in order; the last chunk has what is left."""
    return [
        Chunk(range(first, min(first + chunk_size, num_rows)))
        for first in range(0, num_rows, chunk_size)
    ]


def by_length(batch: Any, chunk_tokens: int, length_of: LengthOf | None, name: str) -> list[Chunk]:
    """Rows of about the same length, with at most `chunk_tokens` tokens, padding included.

    The shortest come first and the longest last. A row that is longer than `chunk_tokens` is a
    chunk of its own. Chunks are filled from the longest row on, so that the last chunk, whose
    backward hides the communication, is a full one, and what is left over is at the beginning.

    Args:
        batch: Tensors with the same number of rows.
        chunk_tokens: Rows times tokens of the longest of them.
        length_of: See `lengths_of`.
        name: How errors call `batch`.
    """
    width = next((leaf.shape[1] for _, leaf in named_leaves(batch) if _is_text(leaf)), None)
    if width is None:
        raise ConfigError(
            f"chunk_tokens: {name} has no integer or boolean tensor of shape [batch, length], so "
            "there are no tokens to count and no padding to cut off; use chunk_size"
        )
    lengths = lengths_of(batch, length_of, name).clip(1, width)
    order = np.argsort(-lengths, kind="stable")
    chunks = []
    first = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        behind = first + max(1, chunk_tokens // longest)
        chunks.append(Chunk(np.sort(order[first:behind]), longest, int(width)))
        first = behind
    return chunks[::-1]


def lengths_of(batch: Any, length_of: LengthOf | None, name: str) -> NDArray[np.int64]:
    """How many columns each row needs: up to its last token that is no padding.

    Args:
        batch: Where `length_of` is None, the mask is looked at, an integer or boolean tensor of
            shape ``[batch, length]`` with "mask" in its name and 0 for padding; where there is
            none, the first such tensor of any name, the ids, whose padding is 0.
        length_of: Called with `batch`, returns the lengths, whole numbers ``[batch]``, for
            padding that is not 0.
        name: How errors call `batch`.

    Returns:
        ``[batch]``; 0 for a row that is padding alone.
    """
    if length_of is not None:
        return _checked_lengths(length_of(batch), num_rows_of(batch, name), name)
    texts = [(path, leaf) for path, leaf in named_leaves(batch) if _is_text(leaf)]
    masks = [leaf for path, leaf in texts if "mask" in path.lower()]
    read = (masks or [leaf for _, leaf in texts])[0]
    lengths: NDArray[np.int64]
    if isinstance(read, np.ndarray):
        filled = read[:, ::-1] != 0
        lengths = (read.shape[1] - filled.argmax(axis=1)) * filled.any(axis=1)
        return lengths
    with paddle.no_grad():
        place = paddle.arange(1, read.shape[1] + 1, dtype="int64")
        lengths = ((read != 0).astype("int64") * place).max(axis=1).numpy()
    return lengths


def num_rows_of(batch: Any, name: str) -> int:
    """The number of rows of every tensor in `batch`.

    Raises:
        DataError: There is no tensor or no row, the tensors do not have the same number of rows,
            one needs a gradient, or an array has a dtype that Tensors do not have.
    """
    found: tuple[str, int] | None = None
    for path, leaf in named_leaves(batch, name):
        if isinstance(leaf, np.ndarray) and leaf.dtype.name not in _ARRAY_TYPES:
            raise DataError(
                f"{path} is a NumPy array of {leaf.dtype}; allowed are {', '.join(_ARRAY_TYPES)}"
            )
        if not _has_rows(leaf):
            continue
        if not leaf.shape:
            raise DataError(
                f"{path} is a tensor without axes; every tensor needs the batch as its first axis. "
                "A number that all rows share can be a Python number."
            )
        if is_tensor(leaf) and not leaf.stop_gradient:
            raise DataError(
                f"{path} needs a gradient (stop_gradient is False), and gradients end at the "
                "encoder's inputs: they are given to it chunk by chunk. Make what computes it part "
                "of the encoder, or detach it."
            )
        if found is not None and found[1] != leaf.shape[0]:
            raise DataError(
                f"{path} has {leaf.shape[0]} rows and {found[0]} has {found[1]}; the first axis of "
                "every tensor is the batch and must be the same"
            )
        found = path, leaf.shape[0]
    if found is None:
        raise DataError(f"{name} holds no Tensor and no array; give one, or a structure of them")
    if found[1] == 0:
        raise DataError(f"{found[0]} has 0 rows; a batch needs at least one")
    return int(found[1])


def rows_of(tensor: paddle.Tensor, rows: range | NDArray[np.int64]) -> paddle.Tensor:
    """Those rows of `tensor`, in the order of `rows`."""
    if isinstance(rows, range):
        return tensor[rows.start : rows.stop]
    places = paddle.to_tensor(rows)
    carrier = _CARRIERS.get(tensor.dtype)
    if carrier is None:
        return paddle.gather(tensor, places, axis=0)
    return paddle.gather(tensor.astype(carrier), places, axis=0).astype(tensor.dtype)


# On CPU, gather knows no float16 (2.6, 3.x) and no bool (2.6); these carry their values exactly.
_CARRIERS = {paddle.float16: "float32", paddle.bool: "int32"}


def joined(parts: Sequence[paddle.Tensor], chunks: Sequence[Chunk]) -> paddle.Tensor:
    """The rows of all chunks as one tensor, in the order of the batch."""
    whole = paddle.concat(list(parts), axis=0)
    if all(isinstance(chunk.rows, range) for chunk in chunks):
        return whole
    return rows_of(whole, np.argsort(np.concatenate([chunk.rows for chunk in chunks])))


def _has_rows(leaf: Any) -> bool:
    return is_tensor(leaf) or isinstance(leaf, np.ndarray)


def _is_text(leaf: Any) -> bool:
    """Whether it is ``[batch, length]``: ids, a mask, token types."""
    if isinstance(leaf, np.ndarray):
        return leaf.ndim == 2 and leaf.dtype.kind in "biu"
    return is_tensor(leaf) and len(leaf.shape) == 2 and leaf.dtype in _WHOLE_NUMBERS


def _checked_lengths(given: Any, num_rows: int, name: str) -> NDArray[np.int64]:
    lengths = given.numpy() if is_tensor(given) else np.asarray(given)
    if lengths.shape != (num_rows,) or lengths.dtype.kind not in "iu":
        raise DataError(
            f"length_of({name}) returned {lengths.dtype} of shape {list(lengths.shape)}; allowed "
            f"is one whole number per row, [{num_rows}]"
        )
    return lengths.astype(np.int64)
