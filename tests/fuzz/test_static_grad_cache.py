"""Random configurations of the gradient cache in a Program against dygraph, bit by bit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

from tests.fuzz import budget
from tests.static_graph.test_grad_cache import Encoder, compared, vectors
from tests.static_graph.test_train_step import config_of

pytestmark = pytest.mark.timeout(120 + 10 * budget.examples(0))


@settings(max_examples=budget.examples(3), deadline=None, database=None)
@hypothesis_seed(budget.seed())
@given(
    rows=st.integers(2, 9),
    chunk_size=st.integers(1, 10),
    dropout=st.sampled_from([0.0, 0.3]),
    recompute=st.booleans(),
    learned=st.booleans(),
    symmetric=st.booleans(),
    tile=st.sampled_from([None, 1, 4]),
    micro_batches=st.integers(1, 3),
)
def test_every_bit_is_that_of_dygraph(
    rows: int,
    chunk_size: int,
    dropout: float,
    recompute: bool,
    learned: bool,
    symmetric: bool,
    tile: int | None,
    micro_batches: int,
) -> None:
    merge = [
        "strategy.gradient_merge=true",
        f"strategy.gradient_merge_configs.k_steps={micro_batches}",
    ]
    compared(
        config_of(*(merge if micro_batches > 1 else []), recompute=recompute),
        lambda: Encoder(dropout),
        batches=lambda step: [vectors(10 * step + one, rows) for one in range(micro_batches)],
        chunks={"chunk_size": chunk_size},
        options={"learnable_temperature": learned, "symmetric": symmetric, "tile": tile},
    )
