"""A sharded run has the bits of the replicated one: weights, loss, norm, optimizer state."""

from __future__ import annotations

import itertools

import paddle
import pytest

from tests.fake_device import selected
from tests.ranks import run_ranks
from tests.sharding.runs import Training, all_cases, difference


def check_cases(every: int, overlap: bool) -> None:
    for case in itertools.islice(all_cases(), 0, None, every):
        plain = Training(case, sharded=False).run(0, 3)
        sharded = Training(case, sharded=True, overlap=overlap).run(0, 3)
        assert len(sharded.optimizer.owned) < len(plain.optimizer._parameter_list), case
        assert not difference(plain, sharded), f"{case}: {difference(plain, sharded)}"


three = pytest.mark.skipif(selected.is_selected(), reason="there are two simulated devices")
paddle3 = pytest.mark.skipif(paddle.__version__ < "3", reason="overlap=True needs Paddle 3")


@pytest.mark.parametrize(
    ("num_ranks", "every", "overlap"),
    [
        (2, 23, False),
        pytest.param(3, 97, False, marks=three),
        pytest.param(2, 47, True, marks=paddle3),
        pytest.param(2, 1, False, marks=pytest.mark.matrix),
        pytest.param(3, 7, False, marks=[three, pytest.mark.matrix]),
    ],
)
@pytest.mark.timeout(650)
def test_every_case_has_the_bits_of_the_replicated_run(
    num_ranks: int, every: int, overlap: bool
) -> None:
    on_device = 3 if selected.is_selected() else 1  # where each collective is late
    options = {"every": every * on_device, "overlap": overlap}
    run_ranks(check_cases, num_ranks, timeout=600, **options)
