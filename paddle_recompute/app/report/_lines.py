"""The JSONL files of a run: what was measured, and what happened, one record per line."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import IO, Any

from paddle_recompute._files import parse_json, writing
from paddle_recompute.errors import OutputError


class Journal:
    """``events.jsonl``: what happened in a run, in order. One process writes it.

    Each record has ``time`` (seconds since 1970), ``event`` and what belongs to the event.

    Args:
        path: The file; None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._waiting: list[dict[str, Any]] | None = []

    def note(self, event: str, **fields: Any) -> None:
        """Append a record. Before `open` it waits: the folder may still be another run's."""
        record = {"time": round(time.time(), 3), "event": event, **fields}
        if self._waiting is not None:
            self._waiting.append(record)
        elif self._path is not None:
            append_record(self._path, record)

    def open(self) -> None:
        """From now on records are written at once, and first those that wait."""
        waiting, self._waiting = self._waiting or [], None
        for record in waiting if self._path is not None else ():
            append_record(self._path, record)


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append one line, in place of a last line that was left incomplete.

    Raises:
        OutputError: It cannot be written.
    """
    with writing(path), path.open("ab+") as file:
        _cut_incomplete_line(file)
        file.write(line_of(record).encode())


def _cut_incomplete_line(file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read(1) not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def line_of(record: dict[str, Any]) -> str:
    """A record as one line of JSON."""
    return json.dumps(record, allow_nan=False) + "\n"


def read_records(path: Path, number: str) -> list[dict[str, Any]]:
    """The records of a file; none if the file does not exist.

    The last line is left out if it is incomplete because the run was killed while writing it.

    Args:
        path: The file.
        number: The field that every record has, a number.

    Raises:
        OutputError: The file cannot be read, or holds something else.
    """
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1]
        records = [parse_json(line) for line in complete.splitlines()]
        for record in records:
            float(record[number])
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise OutputError(f"{path}: is damaged ({str(error)[:200]}); remove it") from error
    return records


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of ``metrics.jsonl``, in the order of their steps.

    Raises:
        OutputError: As `read_records` does.
    """
    return read_records(path, "step")
