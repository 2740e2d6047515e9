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
    if best := best_recall(record):
        head += f"; {best}"
    lines = [f"{name:<12}{before:>12}{after:>12}" for name, before, after in rows]
    return "\n".join([head, f"{'':<12}{'untrained':>12}{'trained':>12}", *lines])


def best_recall(record: dict[str, Any]) -> str:
    """Why no model can have a recall@1 of 1, as a sentence; empty if a model can."""
    if record.get("recall@1_ceiling", 1.0) == 1.0:
        return ""
    reasons = ", ".join(
        f"{record[name]:,} {what}"
        for name, what in (
            ("unknown_queries", "queries have no token but [UNK]"),
            ("equal_queries", "queries have the tokens of another query"),
            ("equal_answers", "answers have the tokens of another candidate"),
        )
        if record[name]
    )
    return f"no model can have a recall@1 above {record['recall@1_ceiling']:.4f}: {reasons}"
