"""The tokenizer cache: vocabularies that were trained, in ``data.cache_dir``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from paddle_recompute.app.data._cache_folder import require_file
from paddle_recompute.app.data.tokenizer import (
    TRAINING_VERSION,
    tokenizers_package,
    train_tokenizer,
)


def cached_tokenizer(
    texts: Sequence[str],
    vocab_size: int,
    folder: Path,
    barrier: Callable[[], None],
    *,
    trains: bool,
) -> Path:
    """The ``tokenizer.json`` of `texts`, trained if the cache has none. All ranks call it.

    Args:
        texts: The training texts.
        vocab_size: The most entries.
        folder: ``data.cache_dir``.
        barrier: Returns when all ranks have called it.
        trains: Whether this is the main rank, which trains while the others wait.

    Raises:
        DataError: The texts contain no word, or this rank does not see the main rank's file.
    """
    file = folder / f"tokenizer-{vocabulary_key(texts, vocab_size)}.json"
    if trains and not file.exists():
        train_tokenizer(texts, file, vocab_size)
    barrier()
    return require_file(file)  # a rank with other texts than the main rank looks for another file


def vocabulary_key(texts: Iterable[str], vocab_size: int) -> str:
    """16 hexadecimal digits of everything that decides what `train_tokenizer` writes.

    The texts depend on the files, the seed and the split, so these need not be included.
    """
    decisive = f"{TRAINING_VERSION} {tokenizers_package().__version__} {vocab_size}"
    digest = hashlib.sha256(decisive.encode())
    for text in texts:
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()[:16]
