"""The retrieval metrics of a run, before and after training."""

from __future__ import annotations

from typing import Any

BEFORE = "untrained_"


def retrieval_rows(record: dict[str, Any]) -> list[tuple[str, float | None, float]]:
    """(name, before, after) of every retrieval metric; before is None if not measured."""
    names = [name.removeprefix(BEFORE) for name in record if name.startswith(BEFORE)]
    return [(name, record[f"{BEFORE}{name}"], record[name]) for name in names]


def retrieval_table(record: dict[str, Any]) -> str:
    """The retrieval metrics as plain text, for a terminal."""
    rows = [
        (name, "-" if before is None else f"{before:.4f}", f"{after:.4f}")
        for name, before, after in retrieval_rows(record)
    ]
    head = f"{record['queries']} held-out queries, {record['pool_size']} candidates for each"
    lines = [f"{name:<12}{before:>12}{after:>12}" for name, before, after in rows]
    return "\n".join([head, f"{'':<12}{'untrained':>12}{'trained':>12}", *lines])
