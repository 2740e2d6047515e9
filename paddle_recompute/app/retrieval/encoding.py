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
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import paddle.distributed as dist

from paddle_recompute._files import read_json, write_json, writing, written_whole
from paddle_recompute.app.data import parsed
from paddle_recompute.app.retrieval.trained import (
    Side,
    TrainedEncoder,
    check_count,
    check_encoder,
    encode_texts,
)
from paddle_recompute.distributed import is_distributed, values_of_ranks
from paddle_recompute.errors import DataError

_NUMBERS = {"dim": 0, "done": 0, "cut": 0, "unknown": 0}
_BATCHES_PER_BLOCK = 16  # a block is sorted by length and written at once


def encode_file(
    encoder: TrainedEncoder,
    text_file: str | Path,
    output: str | Path,
    *,
    side: Side = "document",
    batch_size: int = 256,
    max_tokens: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    over_ranks: bool = False,
) -> dict[str, Any]:
    """Write the vectors of all lines of a file; continue an interrupted call.

    Args:
        encoder: From `load_encoder`.
        text_file: UTF-8, one text per line, also ``.gz``, not ``.tsv`` or ``.jsonl``. Whitespace
            around a text is removed; blank lines are skipped.
        output: Ends in ``.npy``. If it is there and was made from the same texts and model,
            nothing is encoded.
        side: Whether the texts are queries or documents, as for `encode_texts`.
        batch_size: Texts per batch.
        max_tokens: Longer texts are cut; None: the limit that training had for this side.
        progress: Called with (texts done, texts in all) at the start and after every block.
        over_ranks: Every rank calls this and encodes a share of the batches; rank 0 writes, and all
            get the record. The bytes are those of one process with as many threads.

    Returns:
        The record in the ``.json`` file (``texts``, ``done``: the same number, ``dim``, ``cut``:
        texts that were cut, ``unknown``: texts with ``[UNK]`` tokens, ``model``, ``step``, ...),
        and ``output``, ``resumed_at`` and ``texts_per_second``.

    Raises:
        DataError: A file cannot be read; there are no texts; the model does not read `max_tokens`;
            `output` was made or begun with other inputs; or another process writes it.
        OutputError: `output` cannot be written.
        SyncError: The ranks read different texts.
    """
    text_file, output = Path(text_file), Path(output)
    if output.suffix != ".npy":
        raise DataError(
            f"{output}: received the suffix {output.suffix!r}; allowed is .npy, which `numpy.load` "
            "reads; its texts are in a file beside it"
        )
    check_encoder(encoder)
    check_count("batch_size", batch_size)
    longest = encoder.longest(side, max_tokens)

    encoded = partial(
        encode_texts,
        encoder,
        side=side,
        max_tokens=longest,
        batch_size=batch_size,
        over_ranks=over_ranks,
    )

    def blocks(texts: Iterator[str], done: int) -> Iterator[list[str]]:
        texts = itertools.islice(texts, done, None)
        while block := list(itertools.islice(texts, batch_size * _BATCHES_PER_BLOCK)):
            yield block

    record: dict[str, Any] = {}
    if over_ranks and is_distributed() and dist.get_rank():
        for block in blocks(texts_of(text_file), _of_rank_0(record, over_ranks)["done"]):
            encoded(block, counts={})  # the ranks count together
        return _of_rank_0(record, over_ranks)

    copy, described = beside(output, ".txt"), beside(output, ".json")
    if copy.exists() and copy.samefile(text_file):
        raise DataError(
            f"{text_file}: would be overwritten, because {output.name} needs the file {copy.name} "
            "for its texts; name another output"
        )
    with writing(output, "name another file"), ExitStack() as held:
        with written_whole(copy) as unfinished:
            num_texts, digest = _copy_texts(text_file, unfinished)
            inputs = {
                "texts": num_texts,
                "texts_sha256": digest,
                "fingerprint": encoder.fingerprint,
                "max_tokens": longest,
                "prompt": encoder.prompts[side],
                "batch_size": batch_size,
            }
            file = held.enter_context(locked(output))
            record = {
                **begun(file, output, inputs, _NUMBERS, _size),
                "model": str(encoder.folder.resolve()),
                "step": encoder.step,
                "text_file": str(text_file.resolve()),
            }
        resumed_at, start = record["done"], time.monotonic()
        _of_rank_0(record, over_ranks)
        if progress is not None:
            progress(resumed_at, num_texts)
        lines = held.enter_context(copy.open(encoding="utf-8", newline="\n"))
        for block in blocks(map(str.strip, lines), resumed_at):
            vectors = encoded(block, counts=record)
            if not record["done"]:
                record["dim"] = vectors.shape[1]
                write_json(described, record)  # before there is a byte that it describes
                file.write(_header(record))
            write_at(file, _size(record), vectors.tobytes())
            record["done"] += len(block)
            write_json(described, record)
            if progress is not None:
                progress(record["done"], num_texts)
    rate = (num_texts - resumed_at) / max(time.monotonic() - start, 1e-9)
    record |= {"output": str(output), "resumed_at": resumed_at, "texts_per_second": rate}
    return _of_rank_0(record, over_ranks)


def _of_rank_0(record: dict[str, Any], over_ranks: bool) -> dict[str, Any]:
    """The record that rank 0 has; all ranks call this together."""
    if not (over_ranks and is_distributed()):
        return record
    records: list[dict[str, Any]] = values_of_ranks(record, "the record of `encode`")
    return records[0]


@contextmanager
def locked(output: Path) -> Iterator[IO[bytes]]:
    """The output, open, made if need be, locked against other processes."""
    with os.fdopen(os.open(output, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{output}: another process is writing it; wait until it ends"
            ) from None
        yield file


def begun(
    file: IO[bytes],
    output: Path,
    inputs: dict[str, Any],
    fresh: dict[str, Any],
    size_of: Callable[[dict[str, Any]], int],
) -> dict[str, Any]:
    """The record of what an earlier call has done; `inputs` and `fresh` if there was none.

    Args:
        file: The output, open.
        output: Its name; the record is beside it.
        inputs: What it is made from.
        fresh: The counts of a call that has done nothing: numbers, one of them ``done``, and lists
            of numbers.
        size_of: The bytes of what is done, from the record.

    Raises:
        DataError: The output is not of this command, is damaged, or was made from other inputs.
    """
    size, described = file.seek(0, os.SEEK_END), beside(output, ".json")
    file.seek(0)
    if not size:
        return inputs | fresh
    if not described.exists():
        raise DataError(f"{output}: exists, and this command did not write it; name another file")
    try:
        before = read_json(described)
        found = {name: before[name] for name in fresh}
        for name, value in found.items():
            counts = np.array(value)
            like = np.array(fresh[name])
            is_like = counts.shape == like.shape and counts.dtype.kind == like.dtype.kind
            if not is_like or not np.all(counts >= 0):
                raise ValueError(f"{name} is {value!r:.40}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{described}: is damaged ({error!r}); remove it and {output.name}"
        ) from error
    if changed := _changes(before, inputs):
        raise DataError(
            f"{output}: exists, and was made with {changed}; remove it or name another file"
        )
    record: dict[str, Any] = inputs | found
    if record["done"] and size < size_of(record):
        raise DataError(f"{output}: is shorter than it was; remove it")
    return record


def write_at(file: IO[bytes], place: int, content: bytes) -> None:
    """Write `content` from the byte `place` on, where the file then ends, also on disk."""
    file.seek(place)
    file.write(content)
    file.truncate()
    file.flush()
    os.fsync(file.fileno())


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
        "pairs": "other pairs",
        "pairs_sha256": "other pairs",
        "pool_sha256": "other texts",
    }
    changed = [
        names.get(key, f"{key}={{}}").format(before.get(key))
        for key in now
        if before.get(key) != now[key]
    ]
    return " and ".join(dict.fromkeys(changed))


def _copy_texts(path: Path, copy: Path) -> tuple[int, str]:
    """Write the texts of a file to `copy`, one per line; returns their number and their digest."""
    digest, count = hashlib.sha256(), 0
    with copy.open("wb") as file:
        for count, text in enumerate(texts_of(path), start=1):  # noqa: B007
            line = text.encode() + b"\n"
            digest.update(line)
            file.write(line)
    if not count:
        raise DataError(f"{path}: contains no text; one text per line is expected")
    return count, digest.hexdigest()


def texts_of(path: Path) -> Iterator[str]:
    """The lines of a file, also ``.gz``, that are not blank, without whitespace around them.

    Raises:
        DataError: The file is one of pairs; or a line cannot be read, and the error has its number.
    """
    if {".tsv", ".jsonl", ".json"} & set(path.suffixes[-2:]):
        raise DataError(
            f"{path}: is a file of pairs by its name; expected one text per line. For the "
            "positives: cut -f 2 pairs.tsv > texts.txt"
        )
    return parsed(path, lambda _, line: one_line(line) or None)


def one_line(text: str) -> str:
    """A text as a line of a file; its other line separators (U+2028) would make two lines."""
    return " ".join(text.strip().splitlines())


def beside(path: Path, suffix: str) -> Path:
    """The file of this name with a suffix behind it."""
    return path.with_name(path.name + suffix)
