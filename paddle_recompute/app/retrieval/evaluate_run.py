"""How well a trained encoder finds judged answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paddle_recompute.app.data import JudgedQueries
from paddle_recompute.app.retrieval.evaluation import retrieval_metrics
from paddle_recompute.app.retrieval.metrics import Judgements
from paddle_recompute.app.retrieval.trained import Side, TrainedEncoder, encode_texts

KS = (1, 10, 100)


def evaluate_encoder(
    encoder: TrainedEncoder,
    judged: JudgedQueries,
    *,
    exclude_same_id: bool = False,
    batch_size: int = 256,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Encode queries and pool, compare each query with every candidate, and measure the ranking.

    All vectors are in memory, 4 bytes for each number of them.

    Args:
        encoder: From `load_encoder`. Texts are cut where training cut queries and positives.
        judged: From `read_judged`.
        exclude_same_id: A document with the id of the query is no candidate for it.
        batch_size: Texts encoded at once.
        progress: Called after every batch with its number of texts.

    Returns:
        For JSON: ``metrics`` (see `metrics`), ``queries``, ``pool_size``, ``judgements`` (answers
        of all queries), ``model``, ``step`` and ``notes``.

    Raises:
        DataError: A vector is not finite; or an answer has the id of its query and is excluded.
    """
    vectors, notes = {}, [*judged.notes]
    sides: tuple[tuple[Side, str, list[str]], ...] = (
        ("query", "queries", judged.queries),
        ("document", "documents", judged.pool),
    )
    for side, name, texts in sides:
        counts = {"cut": 0, "unknown": 0}
        vectors[side] = encode_texts(
            encoder, texts, side=side, batch_size=batch_size, counts=counts, progress=progress
        )
        told = {
            f"{name} are cut after {encoder.longest(side)} tokens": counts["cut"],
            f"{name} hold words outside the vocabulary": counts["unknown"],
        }
        notes += [f"{count} {what}" for what, count in told.items() if count]
    answers = Judgements.of(judged.answers)
    found = retrieval_metrics(
        vectors["query"],
        vectors["document"],
        answers,
        ks=KS,
        excluded=np.array(judged.same_id) if exclude_same_id else None,
    )
    sizes = {name: int(found.pop(name)) for name in ("queries", "pool_size")}
    return {
        "metrics": found,
        **sizes,
        "judgements": len(answers.query),
        "model": str(encoder.folder.resolve()),
        "step": encoder.step,
        "notes": notes,
    }
