"""One of the failures of `benchmarks.faults.failures`; ``make bench-failures`` tries 200."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks.faults.failures import Fault, campaign, judge
from tests.fake_device import selected

HOST = socket.gethostname()
CAUSE = f"PeerError: rank 1 on {HOST} failed in step 3: ValueError: planted in the update. Rank 0"
FAULT = Fault(1, "the update", "ValueError", 3, 0)


@pytest.mark.timeout(300)
@pytest.mark.matrix  # tests/sharding/test_trainer.py kills and resumes a run as well
@pytest.mark.skipif(selected.is_selected(), reason="the ranks are gloo's")
def test_all_ranks_end_with_the_cause_and_the_run_goes_on_with_the_same_bits(
    tmp_path: Path,
) -> None:
    (outcome,) = campaign(tmp_path, 1, 1, of_a_run=1, ranks=(2,))
    assert not outcome.faults


@pytest.mark.parametrize(
    ("codes", "texts", "wrong"),
    [
        ([1, 1], [CAUSE, "ValueError: planted in the update"], []),
        ([1, -6], [CAUSE, "ValueError: planted in the update"], ["rank 1 ends with -6, not 1"]),
        ([0, 1], [CAUSE, "ValueError: planted in the update"], ["rank 0 ends with 0, not 1"]),
        (
            [1, 1],
            [f"PeerError: rank 1 on {HOST} has died", "ValueError: planted in the update"],
            ["rank 0 does not tell the first cause"],
        ),
        ([1, 1], [CAUSE, "KeyError: 1"], ["rank 1 does not tell its error"]),
    ],
)
def test_the_judge(codes: list[int], texts: list[str], wrong: list[str]) -> None:
    assert judge(FAULT, codes, texts) == wrong
