"""The retrieval metrics of a run, before and after training."""

from __future__ import annotations

from typing import Any

BEFORE = "untrained_"


def retrieval_rows(record: dict[str, Any], form: str = ".4f") -> list[tuple[str, str, str]]:
    """(name, before, after) of every retrieval metric; before is a dash if not measured."""
    names = [name.removeprefix(BEFORE) for name in record if name.startswith(BEFORE)]
    both = [(name, record[f"{BEFORE}{name}"], record[name]) for name in names]
    return [
        (name, "-" if before is None else format(before, form), format(after, form))
        for name, before, after in both
    ]


def retrieval_table(record: dict[str, Any]) -> str:
    """The retrieval metrics as plain text, for a terminal."""
    head = f"{record['queries']} held-out queries, {record['pool_size']} candidates for each"
    lines = [f"{name:<12}{before:>12}{after:>12}" for name, before, after in retrieval_rows(record)]
    return "\n".join([head, f"{'':<12}{'untrained':>12}{'trained':>12}", *lines])
