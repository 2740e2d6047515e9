"""A sharded run has the bits of the replicated one: weights, loss, norm, optimizer state."""

from __future__ import annotations

import itertools

import paddle
import pytest

from tests.fake_device import selected
from tests.ranks import run_ranks
from tests.sharding.runs import Training, all_cases, difference


def check_cases(every: int) -> None:
    for case in itertools.islice(all_cases(), 0, None, every):
        plain = Training(case, sharded=False).run(0, 3)
        sharded = Training(case, sharded=True).run(0, 3)
        assert len(sharded.optimizer.owned) < len(plain.optimizer._parameter_list), case
        assert not difference(plain, sharded), f"{case}: {difference(plain, sharded)}"


three = pytest.mark.skipif(selected.is_selected(), reason="there are two simulated devices")


@pytest.mark.parametrize(
    ("num_ranks", "every"),
    [
        (2, 67),  # on three: test_state.py
        pytest.param(2, 1, marks=pytest.mark.matrix),
        pytest.param(3, 7, marks=[three, pytest.mark.matrix]),
    ],
)
@pytest.mark.timeout(650)
def test_every_case_has_the_bits_of_the_replicated_run(num_ranks: int, every: int) -> None:
    is_second = selected.is_selected() or paddle.__version__.startswith("2.6")
    run_ranks(check_cases, num_ranks, timeout=600, every=every * (2 if is_second else 1))
