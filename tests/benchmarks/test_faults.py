"""What the campaigns of `benchmarks.faults` call wrong, and a few of the failing starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks.faults import failures
from benchmarks.faults._failing_starts_rank import Fault
from benchmarks.faults.failing_starts import campaign, judge

HOST = socket.gethostname()
STARTS = [
    Fault(1, "typo"),
    Fault(0, "missing file"),
    Fault(0, "SIGKILL", "gloo"),
    Fault(1, "ValueError", "the store"),
    Fault(1, "sys.exit", "the comparison of settings"),
    Fault(2, "os._exit", "the data"),
]


def test_all_ranks_end_and_name_the_first_cause(tmp_path: Path) -> None:
    left = iter(STARTS)
    outcomes = campaign(tmp_path, len(STARTS), 0, parallel=3, drawn=lambda *_: next(left))
    assert len(outcomes) == len(STARTS)
    for outcome in outcomes:
        assert not outcome.faults, "\n".join([str(outcome.fault), *outcome.faults])


@pytest.mark.parametrize(
    ("code", "last"),
    [
        (1, f"rank 1 on {HOST} has died"),
        (2, "rank 1 has died"),
        (2, f"rank 1 on {HOST} failed"),
    ],
)
def test_it_is_seen_where_a_rank_does_not_end_as_it_should(code: int, last: str) -> None:
    fault = Fault(1, "SIGKILL", "the store")
    assert judge(fault, [2, -9], [f"so\nrank 1 on {HOST} has died", ""]) == []
    assert judge(fault, [code, -9], [f"so\n{last}", ""])


CAUSE = f"PeerError: rank 1 on {HOST} failed in step 3: ValueError: planted in the update. Rank 0"
ITSELF = "ValueError: planted in the update"


@pytest.mark.parametrize(
    ("codes", "texts", "wrong"),
    [
        ([1, 1], [CAUSE, ITSELF], []),
        ([1, -6], [CAUSE, ITSELF], ["rank 1 ends with -6, not 1"]),
        ([0, 1], [CAUSE, ITSELF], ["rank 0 ends with 0, not 1"]),
        (
            [1, 1],
            [f"PeerError: rank 1 on {HOST} has died", ITSELF],
            ["rank 0 does not tell the first cause"],
        ),
        ([1, 1], [CAUSE, "KeyError: 1"], ["rank 1 does not tell its error"]),
    ],
)
def test_the_judge_of_failures(codes: list[int], texts: list[str], wrong: list[str]) -> None:
    """``make bench-failures`` tries 200."""
    fault = failures.Fault(1, "the update", "ValueError", 3, 0)
    assert failures.judge(fault, codes, texts) == wrong
