"""Encode a text file into vectors, with a model that `Trainer` saved.

The texts are read and the vectors are written in blocks, so neither has to fit into memory. An
interrupted run continues where it stopped and writes the same bytes. The output is:

- ``pool.npy``: [texts, dim], float32, row i of text i, each of length 1; or ``pool.jsonl``, one
  object per text with ``text`` and ``vector``;
- with ``pool.npy``, ``pool.npy.txt``: the texts, one per line;
- ``pool.npy.json`` or ``pool.jsonl.json``: the record that names the model for `search`.

Until the run ends, the output is ``pool.npy.part`` and ``pool.npy.part.json``.
"""

from __future__ import annotations

import dataclasses
import fcntl
import gzip
import hashlib
import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paddle_recompute._files import read_json, written_whole
from paddle_recompute.app.data import LONGEST_LINE, PairTokenizer
from paddle_recompute.app.retrieval.evaluation import encode_texts
from paddle_recompute.app.retrieval.trained import TrainedEncoder
from paddle_recompute.errors import DataError

FORMATS = (".npy", ".jsonl")
_BATCHES_PER_BLOCK = 16  # a block is sorted by length and written at once


@dataclass
class _Progress:
    """The content of the part file: `done` texts in `size` bytes."""

    done: int = 0
    size: int = 0
    num_cut: int = 0
    num_unknown: int = 0


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
        output: Ends in ``.npy`` or ``.jsonl``. If it exists and was made from the same texts and
            model, nothing is done.
        batch_size: Texts per batch.
        max_tokens: Longer texts are cut; None: the limit that training had for positives.
        progress: Called with (texts done, texts in all) at the start and after every block.

    Returns:
        The record in the ``.json`` file (``texts``, ``dim``, ``cut``: texts that were cut,
        ``unknown``: texts with ``[UNK]`` tokens, ``model``, ``step``, ...), and ``output``,
        ``resumed_at`` and ``texts_per_second``.

    Raises:
        DataError: A file cannot be read or written; there are no texts; the texts change during
            the call; `output` or its part file was made from other inputs; or another process
            writes it.
    """
    text_file, output = Path(text_file), Path(output)
    if output.suffix not in FORMATS:
        raise DataError(
            f"{output}: received the suffix {output.suffix!r}; allowed are {' and '.join(FORMATS)}"
        )
    if batch_size < 1 or (max_tokens is not None and max_tokens < 2):
        raise DataError(
            f"received batch_size={batch_size} and max_tokens={max_tokens}; allowed are at least 1 "
            "and, with [CLS] and [SEP], at least 2"
        )
    longest = min(max_tokens or encoder.max_positive_tokens, encoder.reads_at_most)
    num_texts, digest = _survey(text_file)
    about = {
        "texts": num_texts,
        "texts_sha256": digest,
        "fingerprint": encoder.fingerprint,
        "max_tokens": longest,
        "batch_size": batch_size,
    }
    part, progress_file = _beside(output, ".part"), _beside(output, ".part.json")
    copy = _beside(output, ".txt")
    if output.suffix == ".npy" and copy.exists() and copy.samefile(text_file):
        raise DataError(
            f"{text_file}: would be overwritten, because {output.name} needs the file {copy.name} "
            "for its texts; name another output"
        )
    with _as_data_error(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        done_before = _find_complete(output, about)
        if done_before is not None:
            progress_file.unlink(missing_ok=True)  # left by a run that was killed before this line
            return {**done_before, "output": str(output), "resumed_at": num_texts}
        if not part.exists():
            progress_file.unlink(missing_ok=True)
        with _locked(part, progress_file) as file:
            state, dim = _resume(part, progress_file, output, about)
            resumed_at, start = state.done, time.monotonic()
            tokenizer = _CountingTokenizer(encoder.tokenizer, state)
            file.truncate(state.size)
            file.seek(state.size)
            if progress is not None:
                progress(state.done, num_texts)
            texts = itertools.islice(_same_texts(text_file, digest), state.done, None)
            while block := list(itertools.islice(texts, batch_size * _BATCHES_PER_BLOCK)):
                vectors = encode_texts(
                    encoder.model, tokenizer, block, max_tokens=longest, batch_size=batch_size
                )
                if not np.isfinite(vectors).all():
                    raise DataError(
                        f"{encoder.folder}: its vectors are not finite; the training has diverged"
                    )
                dim = vectors.shape[1]
                if output.suffix == ".npy" and state.done == 0:
                    _write_header(file, num_texts, dim)
                file.write(vectors.tobytes() if output.suffix == ".npy" else _lines(block, vectors))
                file.flush()
                os.fsync(file.fileno())
                state.done, state.size = state.done + len(block), file.tell()
                _write(progress_file, {**about, "dim": dim, "progress": dataclasses.asdict(state)})
                if progress is not None:
                    progress(state.done, num_texts)
            record = {
                **about,
                "dim": dim,
                "cut": state.num_cut,
                "unknown": state.num_unknown,
                "model": str(encoder.folder.resolve()),
                "step": encoder.step,
                "text_file": str(text_file.resolve()),
            }
            if output.suffix == ".npy":
                _copy_texts(_same_texts(text_file, digest), copy)
            _write(_beside(output, ".json"), record)
            part.replace(output)
            progress_file.unlink(missing_ok=True)
    rate = (num_texts - resumed_at) / max(time.monotonic() - start, 1e-9)
    return {**record, "output": str(output), "resumed_at": resumed_at, "texts_per_second": rate}


class _CountingTokenizer:
    """A tokenizer that counts the texts with lost or unknown tokens."""

    def __init__(self, tokenizer: PairTokenizer, state: _Progress) -> None:
        self._tokenizer = tokenizer
        self._state = state

    def encode(self, texts: list[str], max_tokens: int, /) -> NDArray[np.int64]:
        rows = self._tokenizer.tokenize(texts, max_tokens)
        self._state.num_cut += rows.num_cut
        self._state.num_unknown += rows.num_unknown
        return rows.pad(np.arange(len(texts)))


class _TextsChangedError(DataError):
    """The text file changed during the run."""


@contextmanager
def _locked(part: Path, progress_file: Path) -> Iterator[IO[bytes]]:
    """The part file, open, locked against other processes.

    Without the lock, two processes that write the same bytes would ruin the file: each truncates
    it to its own progress, behind the position at which the other one writes.
    """
    with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have renamed the file before unlocking.
            is_ours = part.exists() and os.path.samestat(os.fstat(file.fileno()), part.stat())
        except BlockingIOError:
            is_ours = False
        if not is_ours:
            raise DataError(f"{part}: another process is writing it; wait until it ends")
        try:
            yield file
        except _TextsChangedError:
            part.unlink()
            progress_file.unlink(missing_ok=True)
            raise


def _resume(
    part: Path, progress_file: Path, output: Path, about: dict[str, Any]
) -> tuple[_Progress, int]:
    """The progress of an interrupted run and the dimension of its vectors; zeros if none exists."""
    if not progress_file.exists():
        return _Progress(), 0
    before = _read(progress_file)
    if changed := _changes(before, about):
        raise DataError(
            f"{part}: was started with {changed}; remove it and {progress_file.name} to start "
            f"again, or write to another file than {output.name}"
        )
    try:
        state, dim = _Progress(**before["progress"]), int(before["dim"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{progress_file}: is damaged ({error!r}); remove it") from error
    if part.stat().st_size < state.size:
        raise DataError(f"{part}: is shorter than it was; remove it and {progress_file.name}")
    return state, dim


def _find_complete(output: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    if not output.exists():
        return None
    described = _beside(output, ".json")
    if not described.exists():
        raise DataError(f"{output}: exists, and `encode_file` did not write it; name another file")
    record = _read(described)
    if changed := _changes(record, about):
        raise DataError(
            f"{output}: exists, and was made with {changed}; remove it or name another file"
        )
    return record


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


def _texts(path: Path) -> Iterator[str]:
    """The lines of a file that contain text."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise DataError(f"{path}:{number}: is longer than {LONGEST_LINE} bytes")
                if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                    # Other line separators (U+2028) would make two lines in the copy.
                    yield " ".join(text.splitlines())
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: is not UTF-8 ({error.reason})") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}:{number + 1}: the compressed file is damaged ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _survey(path: Path) -> tuple[int, str]:
    """The number of texts, and their digest."""
    if path.exists() and not path.is_file():
        raise DataError(
            f"{path}: is not a regular file; the texts are read more than once, so a pipe cannot "
            "be encoded. Write the texts to a file"
        )
    digest, count = hashlib.sha256(), 0
    for text in _texts(path):
        digest.update(text.encode() + b"\n")
        count += 1
    if not count:
        raise DataError(f"{path}: contains no text; one text per line is expected")
    return count, digest.hexdigest()


def _same_texts(path: Path, expected: str) -> Iterator[str]:
    """`_texts`; raises after the last text if their digest is not `expected`."""
    digest = hashlib.sha256()
    for text in _texts(path):
        digest.update(text.encode() + b"\n")
        yield text
    if digest.hexdigest() != expected:
        raise _TextsChangedError(
            f"{path}: changed while its texts were encoded; the part file was removed, start again"
        )


def _copy_texts(texts: Iterable[str], path: Path) -> None:
    with (
        written_whole(path) as unfinished,
        unfinished.open("w", encoding="utf-8", newline="\n") as file,
    ):
        file.writelines(f"{text}\n" for text in texts)


def _write_header(file: IO[bytes], num_texts: int, dim: int) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (num_texts, dim)}
    np.lib.format.write_array_header_1_0(file, header)


def _lines(texts: list[str], vectors: NDArray[np.float32]) -> bytes:
    """JSON Lines; each number has the fewest digits that give the same float32 back."""
    return "".join(
        f'{{"text": {json.dumps(text, ensure_ascii=False)}, "vector": [{", ".join(row)}]}}\n'
        for text, row in zip(texts, vectors.astype("U").tolist(), strict=True)
    ).encode()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _write(path: Path, tree: dict[str, Any]) -> None:
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = read_json(path)
    except ValueError as error:
        raise DataError(f"{path}: is damaged ({error}); remove it") from error
    if not isinstance(tree, dict):
        raise DataError(f"{path}: is damaged (no JSON object); remove it")
    return tree


@contextmanager
def _as_data_error(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{output}: cannot be written ({error.strerror or error})") from error
