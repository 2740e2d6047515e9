"""What `benchmarks.faults.failures` calls wrong; ``make bench-failures`` tries 200 failures."""

from __future__ import annotations

import socket

import pytest

from benchmarks.faults.failures import Fault, judge

HOST = socket.gethostname()
CAUSE = f"PeerError: rank 1 on {HOST} failed in step 3: ValueError: planted in the update. Rank 0"
FAULT = Fault(1, "the update", "ValueError", 3, 0)


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
