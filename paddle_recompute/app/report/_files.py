"""What a run has left in its folder: records, one per line, and what the report reads."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from paddle_recompute._files import parse_json, read_json, writing
from paddle_recompute._run_folder import EVENTS, METRICS, PLAN, RECORD, is_held
from paddle_recompute.errors import OutputError
from paddle_recompute.planner import RecomputePlan


class EventLog:
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
        for record in waiting:
            if self._path is not None:
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


@dataclass(frozen=True)
class RunFiles:
    """One run.

    Attributes:
        folder: Its ``train.output_dir``.
        metrics: The records of ``metrics.jsonl``; what is nested in them has a dotted name.
        record: The final record; empty before the run has finished.
        events: The records of ``events.jsonl``; empty for a run of an earlier version.
        plan: The plan in ``plan.json``; None: the run has none.
        is_running: Whether a process still writes into the folder.
    """

    folder: Path
    metrics: list[dict[str, Any]]
    record: dict[str, Any]
    events: list[dict[str, Any]]
    plan: RecomputePlan | None
    is_running: bool

    @classmethod
    def read(cls, folder: Path, *, is_running: bool | None = None) -> RunFiles:
        """Read `folder`.

        Args:
            folder: ``train.output_dir``.
            is_running: As the attribute; None: see whether a process holds the folder.

        Raises:
            OutputError: The folder holds no run, or a file in it is damaged.
            PlanError: ``plan.json`` is no plan.
        """
        if not (folder / METRICS).is_file():
            raise OutputError(
                f"{folder}: holds no {METRICS}, so there is no run to report; give the "
                "train.output_dir of a run that has made its first step"
            )
        metrics = [dict(flat(record)) for record in read_metrics(folder / METRICS)]
        try:
            record = read_json(folder / RECORD) if (folder / RECORD).exists() else {}
        except (OSError, ValueError) as error:
            raise OutputError(f"{folder / RECORD}: is damaged ({error}); remove it") from error
        if not isinstance(record, dict):
            raise OutputError(f"{folder / RECORD}: is damaged (no mapping); remove it")
        # A run that was raised to more steps, and is not there yet, has the record of the old end.
        if metrics and record.get("steps", 0) < metrics[-1]["step"]:
            record = {}
        if is_running is None:
            is_running = is_held(folder)
        events = read_records(folder / EVENTS, "time")
        # An earlier run may have left its plan; one of an earlier version notes no policy.
        starts = [event for event in events if event["event"] == "start"]
        settings = starts[-1].get("config", {}).get("recompute", {}) if starts else {}
        has_plan = settings.get("policy", "budget") == "budget" and (folder / PLAN).exists()
        plan = RecomputePlan.load(folder / PLAN) if has_plan else None
        return cls(folder, metrics, record, events, plan, is_running)

    @cached_property
    def sessions(self) -> list[list[dict[str, Any]]]:
        """The events of each start of the run."""
        found: list[list[dict[str, Any]]] = []
        for event in self.events:
            if event["event"] == "start" or not found:
                found.append([])
            found[-1].append(event)
        return found

    @property
    def start(self) -> dict[str, Any]:
        """What the last start noted: configuration, versions, machine; empty: not recorded."""
        return self.last("start")

    def last(self, event: str) -> dict[str, Any]:
        """The last record of an event; empty: there is none."""
        return next((entry for entry in reversed(self.events) if entry["event"] == event), {})

    @property
    def state(self) -> str:
        """How the run stands, in a few words."""
        if self.is_running:
            return "running"
        if self.record:
            return "finished"
        why = self.last("end").get("why")
        return f"ended: {why}" if why and why != "finished" else "ended before its last step"

    @property
    def seconds(self) -> float | None:
        """How long the sessions took; None: not recorded.

        A session that was killed lasts until its last sign: an event, or the last metrics.
        """
        if not self.events:
            return None
        ends = [session[-1]["time"] for session in self.sessions]
        if self.sessions[-1][-1]["event"] != "end":
            ends[-1] = max(ends[-1], (self.folder / METRICS).stat().st_mtime)
        starts = [session[0]["time"] for session in self.sessions]
        return float(sum(ends) - sum(starts))


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in a tree of dicts."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
