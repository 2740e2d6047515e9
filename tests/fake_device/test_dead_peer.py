"""A rank that dies inside a device collective: the other ends, and says who died and for what."""

from __future__ import annotations

import re
import signal

from tests.distributed.mortal_ranks import MortalRanks
from tests.distributed.test_mortal_ranks import gather_for_ever


def test_the_other_rank_does_not_wait_for_ever_inside_the_device() -> None:
    with MortalRanks(gather_for_ever) as ranks:
        ranks.wait_until(1, says="step 2 done")
        ranks.send(1, signal.SIGKILL)
        code, output = ranks.end_of(0, within=60)
    assert code == 1
    message = output.rpartition("PeerError: ")[2]
    assert re.match(r"rank 1 on \S+ has died .* for the (gather|sum of gradients) of", message), (
        output
    )
