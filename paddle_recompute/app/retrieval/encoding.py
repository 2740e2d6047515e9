"""Encode a text file into vectors, with a model that `Trainer` saved.

The vectors are written in blocks, so they need not fit into memory. An interrupted run continues
where it stopped and writes the same bytes. The output is:

- ``pool.npy``: [texts, dim], float32, row i of text i, each of length 1;
- ``pool.npy.txt``: the texts, one per line;
- ``pool.npy.json``: the record, with the model for `search` and the number of texts that are done.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paddle_recompute._files import read_json, written_whole
from paddle_recompute.app.data import LONGEST_LINE, PairTokenizer, read_lines
from paddle_recompute.app.retrieval.evaluation import encode_texts
from paddle_recompute.app.retrieval.trained import TrainedEncoder
from paddle_recompute.errors import DataError

_BATCHES_PER_BLOCK = 16  # a block is sorted by length and written at once


def encode_file(
    encoder: TrainedEncoder,
    text_file: str | Path,
    output: str | Path,
    *,
    batch_size: int = 256,
    max_tokens: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """Write the vectors of all lines of a file; continue an interrupted call.

    Args:
        encoder: From `load_encoder`.
        text_file: UTF-8, one text per line, also ``.gz``. Whitespace around a text is removed;
            blank lines are skipped.
        output: Ends in ``.npy``. If it is there and was made from the same texts and model,
            nothing is encoded.
        batch_size: Texts per batch.
        max_tokens: Longer texts are cut; None: the limit that training had for positives.
        progress: Called with (texts done, texts in all) at the start and after every block.

    Returns:
        The record in the ``.json`` file (``texts``, ``done``: the same number, ``dim``, ``cut``:
        texts that were cut, ``unknown``: texts with ``[UNK]`` tokens, ``model``, ``step``, ...),
        and ``output``, ``resumed_at`` and ``texts_per_second``.

    Raises:
        DataError: A file cannot be read or written; there are no texts; `output` was made or
            begun with other inputs; or another process writes it.
    """
    text_file, output = Path(text_file), Path(output)
    if output.suffix != ".npy":
        raise DataError(
            f"{output}: received the suffix {output.suffix!r}; allowed is .npy, which `numpy.load` "
            "reads; its texts are in a file beside it"
        )
    if batch_size < 1 or (max_tokens is not None and max_tokens < 2):
        raise DataError(
            f"received batch_size={batch_size} and max_tokens={max_tokens}; allowed are at least 1 "
            "and, with [CLS] and [SEP], at least 2"
        )
    longest = min(max_tokens or encoder.max_positive_tokens, encoder.reads_at_most)
    copy, described = _beside(output, ".txt"), _beside(output, ".json")
    if copy.exists() and copy.samefile(text_file):
        raise DataError(
            f"{text_file}: would be overwritten, because {output.name} needs the file {copy.name} "
            "for its texts; name another output"
        )
    with _as_data_error(output), ExitStack() as held:
        with written_whole(copy) as unfinished:
            num_texts, digest = _copy_texts(text_file, unfinished)
            about = {
                "texts": num_texts,
                "texts_sha256": digest,
                "fingerprint": encoder.fingerprint,
                "max_tokens": longest,
                "batch_size": batch_size,
            }
            file = held.enter_context(_locked(output))
            record: dict[str, Any] = {
                **about,
                **_begun(file, output, described, about),
                "model": str(encoder.folder.resolve()),
                "step": encoder.step,
                "text_file": str(text_file.resolve()),
            }
        tokenizer = _CountingTokenizer(encoder.tokenizer, record)
        resumed_at, start = record["done"], time.monotonic()
        if progress is not None:
            progress(resumed_at, num_texts)
        lines = held.enter_context(copy.open(encoding="utf-8", newline="\n"))
        texts = itertools.islice(map(str.strip, lines), resumed_at, None)
        while block := list(itertools.islice(texts, batch_size * _BATCHES_PER_BLOCK)):
            vectors = encode_texts(
                encoder.model, tokenizer, block, max_tokens=longest, batch_size=batch_size
            )
            if not np.isfinite(vectors).all():
                raise DataError(
                    f"{encoder.folder}: its vectors are not finite; the training has diverged"
                )
            if not record["done"]:
                record["dim"] = vectors.shape[1]
                _write(described, record)  # before there is a byte in the file that it describes
                file.write(_header(record))
            file.seek(_size(record))
            file.write(vectors.tobytes())
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
            record["done"] += len(block)
            _write(described, record)
            if progress is not None:
                progress(record["done"], num_texts)
    rate = (num_texts - resumed_at) / max(time.monotonic() - start, 1e-9)
    return {**record, "output": str(output), "resumed_at": resumed_at, "texts_per_second": rate}


class _CountingTokenizer:
    """A tokenizer that counts the texts with lost or unknown tokens."""

    def __init__(self, tokenizer: PairTokenizer, record: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._record = record

    def encode(self, texts: list[str], max_tokens: int, /) -> NDArray[np.int64]:
        rows = self._tokenizer.tokenize(texts, max_tokens)
        self._record["cut"] += rows.num_cut
        self._record["unknown"] += rows.num_unknown
        return rows.pad(np.arange(len(texts)))


@contextmanager
def _locked(output: Path) -> Iterator[IO[bytes]]:
    """The output, open, made if need be, locked against other processes."""
    with os.fdopen(os.open(output, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{output}: another process is writing it; wait until it ends"
            ) from None
        yield file


def _begun(file: IO[bytes], output: Path, described: Path, about: dict[str, Any]) -> dict[str, int]:
    """What an earlier call has done, in numbers; all 0 if there was none."""
    numbers = {"dim": 0, "done": 0, "cut": 0, "unknown": 0}
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if not size:
        return numbers
    if not described.exists():
        raise DataError(f"{output}: exists, and `encode_file` did not write it; name another file")
    try:
        before = read_json(described)
        numbers = {name: int(before[name]) for name in numbers}
        if min(numbers.values()) < 0:
            raise ValueError("a number below 0")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{described}: is damaged ({error!r}); remove it and {output.name}"
        ) from error
    if changed := _changes(before, about):
        raise DataError(
            f"{output}: exists, and was made with {changed}; remove it or name another file"
        )
    if numbers["done"] and size < _size({**about, **numbers}):
        raise DataError(f"{output}: is shorter than it was; remove it")
    return numbers


def _header(record: dict[str, Any]) -> bytes:
    header = io.BytesIO()
    shape = (record["texts"], record["dim"])
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


def _size(record: dict[str, Any]) -> int:
    """Bytes of the header and of the vectors that are done."""
    return len(_header(record)) + 4 * int(record["done"]) * int(record["dim"])


def _changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    names = {
        "texts": "other texts",
        "texts_sha256": "other texts",
        "fingerprint": "another model",
        "max_tokens": "max_tokens={}",
        "batch_size": "batch_size={}",
    }
    changed = [names[key].format(before.get(key)) for key in now if before.get(key) != now[key]]
    return " and ".join(dict.fromkeys(changed))


def _copy_texts(path: Path, copy: Path) -> tuple[int, str]:
    """Write the texts of a file to `copy`, one per line; returns their number and their digest."""
    digest, count = hashlib.sha256(), 0
    with copy.open("wb") as file:
        for number, line in read_lines(path):
            if len(line) > LONGEST_LINE:
                raise DataError(f"{path}:{number}: is longer than {LONGEST_LINE} bytes")
            try:
                text = line.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}:{number}: is not UTF-8 ({error.reason})") from error
            if text:
                # Other line separators (U+2028) would make two lines.
                line = " ".join(text.splitlines()).encode() + b"\n"
                digest.update(line)
                file.write(line)
                count += 1
    if not count:
        raise DataError(f"{path}: contains no text; one text per line is expected")
    return count, digest.hexdigest()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _write(path: Path, tree: dict[str, Any]) -> None:
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _as_data_error(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{output}: cannot be written ({error.strerror or error})") from error
