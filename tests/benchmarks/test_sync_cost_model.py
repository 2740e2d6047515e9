"""The model of what a synchronized step costs: cases with a closed form, and what must grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sync_cost_model import (
    AGREEMENT_BYTES,
    Bucket,
    Encoder,
    Link,
    Step,
    all_reduce_seconds,
    communication_seconds,
    encoder_step,
    fit_link,
    fused_seconds,
    overlap_seconds,
)

ROUNDING = 1e-9  # relative; sums of a few dozen float64

ERNIE_BASE = Encoder(num_layers=12, hidden=768, intermediate=3072, embeddings=40000 + 2048 + 4)

positive = st.floats(1e-3, 1e3)
links = st.builds(Link, alpha=st.floats(0, 1e-2), bytes_per_second=st.floats(1e6, 1e11))
buckets = st.lists(st.builds(Bucket, num_bytes=st.floats(0, 1e8), ready=positive), max_size=8)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    ordered = sorted(draw(buckets), key=lambda bucket: bucket.ready)
    backward = max([bucket.ready for bucket in ordered], default=0.0) + draw(positive)
    return Step(draw(positive), backward, draw(positive), tuple(ordered))


def test_a_ring_sends_all_bytes_but_a_share_twice_in_2n_minus_2_rounds() -> None:
    link = Link(alpha=0.001, bytes_per_second=1e6)
    assert all_reduce_seconds(1, 8e6, link) == 0.0
    assert all_reduce_seconds(2, 8e6, link) == pytest.approx(2 * 0.001 + 8.0)
    assert all_reduce_seconds(4, 8e6, link) == pytest.approx(6 * 0.001 + 12.0)


def test_with_a_link_that_is_idle_in_between_only_the_last_bucket_is_seen() -> None:
    step = Step(1.0, 10.0, 0.5, (Bucket(1e6, 2.0), Bucket(1e6, 6.0), Bucket(1e6, 10.0)))
    link = Link(0.0, 1e6)
    agreement = all_reduce_seconds(2, AGREEMENT_BYTES, link)
    assert fused_seconds(step, 2, link) == pytest.approx(11.5 + 3.0 + agreement)
    assert overlap_seconds(step, 2, link) == pytest.approx(11.5 + 1.0 + agreement)


@given(steps(), st.integers(1, 1024), links)
def test_overlap_lies_between_the_longer_part_and_fused(step: Step, ranks: int, link: Link) -> None:
    overlap, fused = overlap_seconds(step, ranks, link), fused_seconds(step, ranks, link)
    longer = max(step.computation, communication_seconds(step, ranks, link))
    assert longer * (1 - ROUNDING) <= overlap <= fused * (1 + ROUNDING)


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_a_fit_finds_the_link_that_the_figures_were_made_with(alpha: float, rate: float) -> None:
    link = Link(alpha, rate)
    sizes = [alpha * rate * factor for factor in (0.1, 1, 10, 100)]
    measured = [(n, size, all_reduce_seconds(n, size, link)) for n in (2, 4) for size in sizes]
    found = fit_link(measured)
    assert found.alpha == pytest.approx(alpha, rel=1e-6)
    assert found.bytes_per_second == pytest.approx(rate, rel=1e-6)


@given(st.floats(1e5, 1e9), st.floats(1e5, 1e9))
def test_buckets_hold_every_gradient_in_the_order_in_which_they_are_ready(
    bucket_bytes: float, first_bucket_bytes: float
) -> None:
    step = encoder_step(
        ERNIE_BASE, 0.4, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes
    )
    total = sum(bucket.num_bytes for bucket in step.buckets)
    assert total == pytest.approx(4 * ERNIE_BASE.parameters, rel=ROUNDING)
    ready = [bucket.ready for bucket in step.buckets]
    assert ready == sorted(ready)
    assert ready[-1] == step.backward == pytest.approx(0.3)
    assert step.computation == pytest.approx(0.4)
    *full, last = [bucket.num_bytes for bucket in step.buckets]
    assert full == pytest.approx(([first_bucket_bytes] + [bucket_bytes] * len(full))[: len(full)])
    assert last <= max(bucket_bytes, first_bucket_bytes) * (1 + ROUNDING)
