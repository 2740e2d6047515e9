"""A few of the starts of `benchmarks.faults.failing_starts`, in the check."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults._failing_starts_rank import Fault
from benchmarks.faults.failing_starts import campaign, judge

FAULTS = [
    Fault(1, "typo"),
    Fault(0, "missing file"),
    Fault(0, "SIGKILL", "gloo"),
    Fault(1, "ValueError", "the store"),
    Fault(1, "sys.exit", "the comparison of settings"),
    Fault(2, "os._exit", "the data"),
]


def test_all_ranks_end_and_name_the_first_cause(tmp_path: Path) -> None:
    left = iter(FAULTS)
    outcomes = campaign(tmp_path, len(FAULTS), 0, parallel=3, drawn=lambda *_: next(left))
    assert len(outcomes) == len(FAULTS)
    for outcome in outcomes:
        assert not outcome.faults, "\n".join([str(outcome.fault), *outcome.faults])


@pytest.mark.parametrize(
    ("code", "last"),
    [(1, "rank 1 on {host} has died"), (2, "rank 1 has died"), (2, "rank 1 on {host} failed")],
)
def test_it_is_seen_where_a_rank_does_not_end_as_it_should(code: int, last: str) -> None:
    import socket

    host = socket.gethostname()
    fault = Fault(1, "SIGKILL", "the store")
    assert judge(fault, [2, -9], [f"so\nrank 1 on {host} has died", ""]) == []
    assert judge(fault, [code, -9], [f"so\n{last.format(host=host)}", ""])
