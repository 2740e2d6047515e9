"""Files: written whole or not at all, and JSON of untrusted sources read within limits."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from paddle_recompute.errors import CheckpointError, OutputError

LARGEST = 64 << 20
"""Bytes of a file that is read."""
INDEX = ".safetensors.index.json"
"""Ends the name of the index of weights that are in several files."""
_SUFFIXES = (".pdparams", ".safetensors")
_IN_A_FOLDER = (f"model{INDEX}", "model.safetensors", "model_state.pdparams")


@contextmanager
def written_whole(path: Path, *, alone: bool = False) -> Iterator[Path]:
    """Gives a path to write to. At the end its bytes are on disk, and it is renamed to `path`.

    Whoever reads `path` finds the old file or the new one, each complete, also after a kill.

    Args:
        path: The file.
        alone: No other process writes it at the same time. Then a kill leaves at most one more
            file, which the next writer takes over; else it leaves a folder of a new name.

    Raises:
        OSError: It cannot be written; `path` is as before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if alone:
        unfinished = path.with_name(f".unfinished-{path.name}")
        yield unfinished
        flush(unfinished)
        unfinished.replace(path)
        return
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        yield unfinished
        flush(unfinished)
        unfinished.replace(path)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder to write into. At the end it is renamed to `path`.

    After an error or a kill there is no `path`.

    Raises:
        OutputError: `path` exists, or cannot be written.
    """
    if path.exists():
        raise OutputError(f"{path}: exists; name a new folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as folder:
            unfinished = Path(folder) / path.name
            unfinished.mkdir()
            yield unfinished
            unfinished.rename(path)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({error.strerror or error}); name another folder"
        ) from error


def flush(path: Path) -> None:
    """Return when what was written to a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(
    path: Path,
    advice: str = "free the disk or put the folder back, and go on with train.resume=auto",
) -> Iterator[None]:
    """Inside, a file of a run is written, or another one, with its own advice.

    Raises:
        OutputError: It cannot be.
    """
    try:
        yield
    except OSError as error:
        gone = "" if path.parent.exists() else ", there is no such folder"
        raise OutputError(
            f"{path}: cannot be written ({error.strerror or error}{gone}); {advice}"
        ) from error


def write_text(path: Path, text: str, *advice: str, alone: bool = False) -> None:
    """Write a UTF-8 file, whole or not at all.

    Args:
        path: The file.
        text: Its content.
        *advice: As `writing` takes it.
        alone: As `written_whole` takes it.

    Raises:
        OutputError: It cannot be written.
    """
    with writing(path, *advice), written_whole(path, alone=alone) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, content: Any) -> None:
    """Write a report or a record, as `write_text`.

    Raises:
        OutputError: It cannot be written.
    """
    write_text(path, json.dumps(content, indent=2) + "\n", "name another file or folder")


def read_json(path: Path) -> Any:
    """What a JSON file of at most `LARGEST` bytes holds; numbers are finite.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no such file; the message says why, in a few words.
    """
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"larger than {LARGEST} bytes")
    return parse_json(content)


def parse_json(content: bytes | str) -> Any:
    """The value that `content` stands for; numbers are finite.

    Raises:
        ValueError: It is none; the message says why, in a few words.
    """
    try:
        return json.loads(content, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason}") from None
    except MemoryError:
        raise ValueError("needs more memory than there is") from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"a number as large as {digits[:20]}")
    return number


def weights_file(path: Path) -> Path:
    """The file of weights at `path` or, as Hugging Face and PaddleNLP name it, in the folder
    `path`; of weights in several files, their index.

    Raises:
        CheckpointError: There is none, or its suffix is not of weights.
    """
    if path.is_dir():
        for name in _IN_A_FOLDER:
            if (path / name).is_file():
                return path / name
        raise CheckpointError(
            f"{path}: this folder holds none of {', '.join(_IN_A_FOLDER)}; name the file"
        )
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if not path.name.endswith(INDEX):
        check_weights_suffix(path)
    return path


def check_weights_suffix(path: Path) -> None:
    """Raise CheckpointError if a file of this name cannot hold weights."""
    if path.suffix not in _SUFFIXES:
        raise CheckpointError(
            f"{path}: received the suffix {path.suffix!r}; allowed are {' and '.join(_SUFFIXES)}"
        )
