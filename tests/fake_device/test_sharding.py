"""A sharded run on two devices, with collectives that are late: the bits of the replicated one."""

from __future__ import annotations

from tests.ranks import run_ranks
from tests.sharding.runs import Case, Training, difference

# Of the other optimizers of Paddle, not all have a kernel that runs here.
CASES = [Case(kind=kind, shared=True) for kind in ("plain", "accumulated", "cached")]


def worker() -> list[str]:
    found = []
    for case in CASES:
        plain, sharded = (Training(case, sharded=one).run(0, 3) for one in (False, True))
        found.append(difference(plain, sharded))
        whole = sharded.optimizer.state_dict()
        sharded.optimizer.set_state_dict(whole)
        plain.run(3, 5), sharded.run(3, 5)
        found.append(difference(plain, sharded))
    return found


def test_two_devices_have_the_bits_of_the_replicated_run() -> None:
    for found in run_ranks(worker, 2):
        assert found == [""] * 2 * len(CASES)
