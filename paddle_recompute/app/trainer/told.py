"""What a run notes for its report, beside the metrics: where it runs, its data, examples."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute import __version__
from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.app.config import Config
from paddle_recompute.app.data import PairLoader, PreparedData

NUM_EXAMPLES = 8
NUM_HITS = 3
_MOST_CHARACTERS = 200


def environment(config: Config) -> dict[str, str]:
    """Versions and machine, without the machine's name."""
    return {
        "paddle_recompute": __version__,
        "paddle": ".".join(map(str, paddle_version())),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "device": str(paddle.device.get_device()),
        "ranks": str(config.world_size),
    }


def data_figures(data: PreparedData, loader: PairLoader) -> dict[str, Any]:
    """Numbers of pairs, lengths of the training texts in tokens, and what is left out."""
    return {
        "train": len(data.train),
        "valid": len(data.valid),
        "pool": len(data.pool),
        "words": data.tokenizer.vocab_size,
        "lengths": loader.lengths(),
        "notes": [*data.notes, *loader.notes()],
    }


def examples(
    query: NDArray[np.float32], pool: NDArray[np.float32], data: PreparedData
) -> list[dict[str, Any]]:
    """The nearest candidates of some held-out queries, the same ones in each evaluation.

    Args:
        query: ``[held-out pairs, dim]``, of length 1.
        pool: ``[candidates, dim]``, of length 1.
        data: Of the run.
    """
    found = []
    for row in range(0, len(query), -(-len(query) // NUM_EXAMPLES)):
        scores = pool @ query[row]
        nearest = np.argsort(-scores, kind="stable")[:NUM_HITS]
        found.append(
            {
                "query": data.valid[row].query[:_MOST_CHARACTERS],
                "answer": data.valid[row].positive[:_MOST_CHARACTERS],
                "rank": int(np.count_nonzero(scores >= scores[data.target[row]])),
                "hits": [
                    {"text": data.pool[hit][:_MOST_CHARACTERS], "score": float(scores[hit])}
                    for hit in nearest
                ],
            }
        )
    return found
