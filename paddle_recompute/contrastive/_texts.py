"""Find the tensors of a batch that are texts ``[batch, length]``: to read lengths from, and to cut.

Names and widths decide, never the order of keys. A tensor with an unknown name is cut only where it
contains zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute._nested import is_tensor, named_leaves
from paddle_recompute._paddle.amp import amp_off
from paddle_recompute.errors import ConfigError, DataError

LengthOf = Callable[[Any], Any]

_MASKS = ("attention_mask", "input_mask", "mask")
_IDS = ("input_ids", "token_ids", "ids", "tokens")
_DECIDING = (*_MASKS, *_IDS)
"""The names from which lengths are read; in each dict the first of them is used."""

_ALONGSIDE = (
    *_DECIDING,
    "token_type_ids",
    "segment_ids",
    "task_type_ids",
    "position_ids",
    "special_tokens_mask",
    "global_attention_mask",
)
"""The names of tensors with one value per token; they are cut whatever their padding is."""

_WHOLE_NUMBERS = (paddle.bool, paddle.uint8, paddle.int8, paddle.int16, paddle.int32, paddle.int64)
_SMALL = (paddle.uint8, paddle.int8, paddle.int16)
_HALF = (paddle.float16, paddle.bfloat16)


@dataclass(frozen=True)
class _Leaf:
    """A tensor or an array, with its path and name."""

    path: str
    values: Any

    @property
    def container(self) -> str:
        """The path of its container."""
        return _LAST.sub("", self.path)

    @property
    def name(self) -> str:
        """Its key or field, lower case; empty in a tuple or list."""
        found = _LAST.search(self.path)
        return (found[1] or found[2] or "").lower() if found else ""

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    @property
    def is_text(self) -> bool:
        """Ids, token types and masks; floating-point numbers only if their name is a mask's."""
        if len(self.values.shape) != 2:
            return False
        if isinstance(self.values, np.ndarray):
            whole = self.values.dtype.kind in "biu"
        else:
            whole = self.values.dtype in _WHOLE_NUMBERS
        return whole or "mask" in self.name


# ['key'], .field, or [0], which is not a name
_LAST = re.compile(r"""\[['"]([^'"\]]*)['"]\]$|\.(\w+)$|\[[^\[\]]*\]$""")


@dataclass(frozen=True)
class Texts:
    """The texts of a batch.

    Attributes:
        width: Columns, padding included.
        read: The tensors in which a token may be seen; a row is as long as the longest says.
        cut: The axes that have these columns, by the path of the tensor.
    """

    width: int
    read: tuple[_Leaf, ...]
    cut: Mapping[str, tuple[int, ...]]


def has_texts(batch: Any) -> bool:
    """Whether `batch` has a tensor of tokens; an image has none."""
    return any(leaf.is_text for leaf in _leaves_of(batch))


def texts_of(batch: Any, name: str) -> Texts:
    """The tensors of `batch` to read and to cut; errors call the batch `name`.

    Raises:
        ConfigError: There is none, or it is not clear which.
    """
    leaves = _leaves_of(batch)
    texts = [leaf for leaf in leaves if leaf.is_text]
    if not texts:
        raise ConfigError(
            f"chunk_tokens: {name} has no integer or boolean tensor of shape [batch, length], so "
            "there are no tokens to count and no padding to cut; use chunk_size"
        )
    named = [leaf for leaf in texts if leaf.name in _DECIDING]
    widths = {leaf.width for leaf in named or texts}
    if len(widths) > 1:
        raise ConfigError(
            f"chunk_tokens: {name} has tensors of different lengths, and it is not clear which is "
            f"the text: {_listed(named or texts, name)}. Give the batch as a dict in which the "
            "text, and nothing of another length, is called 'attention_mask' or 'input_ids', or "
            "use chunk_size"
        )
    [width] = widths
    same = [leaf for leaf in texts if leaf.width == width]
    # In each container, the text with the first name of `_DECIDING`.
    first: dict[str, _Leaf] = {}
    for leaf in sorted(named, key=lambda leaf: _DECIDING.index(leaf.name)):
        first.setdefault(leaf.container, leaf)
    # A tensor with an unknown name may have this width by chance.
    unknown = [leaf for leaf in same if leaf.name not in _ALONGSIDE]
    read = [*first.values(), *unknown] if named else same
    cut: dict[str, tuple[int, ...]] = {leaf.path: (1,) for leaf in same}
    for leaf in leaves:
        axes = _axes_of_mask(leaf, width, name)
        if axes:
            cut[leaf.path] = axes
    return Texts(width, tuple(read), cut)


def _leaves_of(batch: Any) -> list[_Leaf]:
    return [
        _Leaf(path, leaf)
        for path, leaf in named_leaves(batch)
        if is_tensor(leaf) or isinstance(leaf, np.ndarray)
    ]


def _axes_of_mask(leaf: _Leaf, width: int, name: str) -> tuple[int, ...]:
    """The axes of a mask of more than two axes, such as ``[batch, 1, 1, length]``, to be cut.

    The last axis, and the one before it where that is the length, too. A tensor without a name is
    taken for a mask only where it can hardly be anything else.
    """
    shape = list(leaf.values.shape)
    if len(shape) < 3 or shape[-1] != width:
        return ()
    last = len(shape) - 1
    if "mask" in leaf.name:
        return (last - 1, last) if shape[-2] == width and last > 1 else (last,)
    if leaf.name or set(shape[1:-2]) - {1}:
        return ()
    if shape[-2] == 1:
        return (last,)
    if shape[-2] == width and len(shape) == 4:
        raise ConfigError(
            f"chunk_tokens: {name}{leaf.path} has shape {shape} and no name, so it may be a mask "
            "that is cut like the text, or an image that is not. Give the batch as a dict in which "
            "a mask has 'mask' in its key, or use chunk_size"
        )
    return ()


def lengths_of(texts: Texts, given: Any, num_rows: int, name: str) -> NDArray[np.int64]:
    """The number of columns that each row needs: up to its last token.

    Args:
        texts: In which 0 is padding, if nothing is `given`.
        given: What ``length_of(batch)`` has returned: whole numbers ``[batch]``.
        num_rows: Rows of the batch.
        name: The name of the batch in errors.

    Returns:
        ``[batch]``; 0 for a row of padding.

    Raises:
        DataError: A mask contains scores to add, or `length_of` returned something else.
    """
    if given is not None:
        return _checked_lengths(given, num_rows, name)
    read = texts.read
    found = [_of_array(leaf) for leaf in read if isinstance(leaf.values, np.ndarray)]
    if tensors := [leaf for leaf in read if is_tensor(leaf.values)]:
        with paddle.no_grad(), amp_off():
            # One copy to the host for all of them.
            found.extend(paddle.stack([_of_tensor(leaf) for leaf in tensors]).numpy())
    for leaf, bounds in zip(
        sorted(read, key=lambda leaf: is_tensor(leaf.values)), found, strict=True
    ):
        if bounds[-1]:
            raise DataError(
                f"chunk_tokens: {name}{leaf.path} is not a mask of 1 for tokens and 0 for padding: "
                "it has negative values, or only 0, like a mask that is added to scores. Give a "
                "mask of 1 and 0, or length_of"
            )
    lengths: NDArray[np.int64] = np.max(found, axis=0)[:-1]
    return lengths


def _listed(leaves: list[_Leaf], name: str) -> str:
    return ", ".join(f"{name}{leaf.path} {list(leaf.values.shape)}" for leaf in leaves)


def _of_array(leaf: _Leaf) -> NDArray[np.int64]:
    """The lengths, followed by whether the tensor is a mask that is added to scores."""
    values = leaf.values
    filled = values[:, ::-1] != 0
    lengths = (values.shape[1] - filled.argmax(axis=1)) * filled.any(axis=1)
    added = False
    if leaf.name in _MASKS and values.dtype.kind in "if":
        nothing = values.dtype.kind == "f" and not filled.any()
        added = bool(nothing or (values < 0).any())
    return np.append(lengths, added).astype(np.int64)


def _of_tensor(leaf: _Leaf) -> paddle.Tensor:
    """`_of_array` on the device."""
    values = leaf.values
    if values.dtype in _SMALL:
        values = values.astype("int32")  # the CPU lacks kernels for these dtypes
    elif values.dtype in _HALF:
        values = values.astype("float32")
    filled = (values != 0).astype("int64")
    lengths = (filled * paddle.arange(1, leaf.width + 1, dtype="int64")).max(axis=1)
    added = paddle.zeros([1], "int64")
    if leaf.name in _MASKS and values.dtype != paddle.bool:
        added = (values < 0).astype("int64").max().reshape([1])
        if values.is_floating_point():
            added = paddle.maximum(added, 1 - filled.max().reshape([1]))
    return paddle.concat([lengths, added])


def _checked_lengths(given: Any, num_rows: int, name: str) -> NDArray[np.int64]:
    lengths = given.numpy() if is_tensor(given) else np.asarray(given)
    if lengths.shape != (num_rows,) or lengths.dtype.kind not in "iu":
        raise DataError(
            f"length_of({name}) returned {lengths.dtype} of shape {list(lengths.shape)}; allowed "
            f"is one whole number per row, [{num_rows}]"
        )
    return lengths.astype(np.int64)
