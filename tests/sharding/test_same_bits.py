"""A sharded run has the bits of the replicated one: weights, loss, norm, optimizer state."""

from __future__ import annotations

import itertools

import pytest

from tests.ranks import run_ranks
from tests.sharding.runs import Case, Training, all_cases, difference


def worker_of_cases(every: int) -> list[str]:
    faults = []
    for case in itertools.islice(all_cases(), 0, None, every):
        plain = Training(case, sharded=False).run(0, 3)
        sharded = Training(case, sharded=True).run(0, 3)
        if len(sharded.optimizer.owned) == len(plain.optimizer._parameter_list):
            faults.append(f"{case}: nothing is sharded")
        found = difference(plain, sharded)
        if found:
            faults.append(f"{case}: {found}")
    return faults


@pytest.mark.parametrize("num_ranks, every", [(2, 7), (3, 23)])
def test_every_case_has_the_bits_of_the_replicated_run(num_ranks: int, every: int) -> None:
    for faults in run_ranks(worker_of_cases, num_ranks, every=every, timeout=150):
        assert not faults, "\n".join(faults[:5])


def worker_that_compares() -> str:
    plain = Training(Case(), sharded=False).run(0, 3)
    return difference(plain, Training(Case(), sharded=True, debug=True).run(0, 3))


def test_debug_mode_changes_no_bit() -> None:
    assert run_ranks(worker_that_compares, 2) == ["", ""]
