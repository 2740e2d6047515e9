"""Random configurations of the gradient cache in a Program against dygraph, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from tests.fuzz import budget
from tests.static_graph.test_grad_cache import Encoder, compared, vectors
from tests.static_graph.test_train_step import config_of

pytestmark = pytest.mark.timeout(120 + 10 * budget.examples(0))

CACHES = st.fixed_dictionaries(
    {
        "rows": st.integers(2, 9),
        "chunk_size": st.integers(1, 10),
        "dropout": st.sampled_from([0.0, 0.3]),
        "recompute": st.booleans(),
        "micro_batches": st.integers(1, 3),
        "loss": st.fixed_dictionaries(
            {
                "learnable_temperature": st.booleans(),
                "symmetric": st.booleans(),
                "tile": st.sampled_from([None, 1, 4]),
            }
        ),
    }
)


def check(cache: dict[str, Any]) -> None:
    count = cache["micro_batches"]
    merge = [
        "strategy.gradient_merge=true",
        f"strategy.gradient_merge_configs.k_steps={count}",
        f"contrastive.global_batch={24 * count}",
    ]
    compared(
        config_of(*(merge if count > 1 else []), recompute=cache["recompute"]),
        lambda: Encoder(cache["dropout"]),
        batches=lambda step: [vectors(10 * step + one, cache["rows"]) for one in range(count)],
        chunk_size=cache["chunk_size"],
        options=cache["loss"],
    )


def test_every_bit_is_that_of_dygraph() -> None:
    budget.fuzz(CACHES, check, 2)
