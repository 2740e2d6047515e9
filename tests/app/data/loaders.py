"""Loaders of made-up pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle_recompute.app.data import Pair, PairLoader, PairTokenizer, PreparedData, build_loader
from tests.app.trainer.test_trainer import tiny


def loader_of(
    tokenizer: PairTokenizer,
    pairs: Sequence[Pair],
    *,
    local_batch: int = 4,
    rank: int = 0,
    num_ranks: int = 1,
    **changes: Any,
) -> PairLoader:
    """The loader of a configuration; `changes` are those of `tiny`."""
    settings = {
        "launch__num_ranks": num_ranks,
        "contrastive__global_batch": local_batch * num_ranks,
        "model__max_position_embeddings": 128,
        **changes,
    }
    data = PreparedData([*pairs], [], [], [], tokenizer)
    return build_loader(tiny(Path("nowhere"), **settings), data, rank)
