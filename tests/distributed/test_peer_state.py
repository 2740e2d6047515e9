"""What a rank concludes from what it has heard of the others."""

from __future__ import annotations

import pytest

from paddle_recompute.distributed.peer_state import Limits, PeerState, Scope

SCOPE = Scope((0, 1), Limits(peer_timeout=30.0, stall_timeout=60.0))


def heard(*, silent: float) -> PeerState:
    notes = PeerState(rank=0)
    notes.take({"kind": "silent", "seconds": {"1": silent}})
    notes.take({"kind": "waiting", "among": SCOPE.among, "ranks": [0]})
    return notes


def test_silence_ends_a_wait_when_it_is_longer_than_the_limit() -> None:
    assert heard(silent=29.0).trouble(SCOPE, waited=29.0) is None
    trouble = heard(silent=31.0).trouble(SCOPE, waited=31.0)
    assert trouble is not None
    assert trouble.startswith("rank 1 has shown no sign of life for 31 s (peer_timeout is 30 s):")


def test_a_shorter_silence_explains_a_collective_that_has_failed_already() -> None:
    assert heard(silent=4.0).trouble(SCOPE, waited=0.0, patience=5.0) is None
    trouble = heard(silent=29.0).trouble(SCOPE, waited=0.0, patience=5.0)
    assert trouble is not None
    assert trouble.startswith("rank 1 has shown no sign of life for 29 s: it is stopped")


def test_a_rank_that_lives_and_does_not_come_is_named_after_the_other_limit() -> None:
    assert heard(silent=0.0).trouble(SCOPE, waited=59.0) is None
    trouble = heard(silent=0.0).trouble(SCOPE, waited=61.0)
    assert trouble == (
        "rank 1 did not come within 61 s (stall_timeout) although it shows signs of life"
    )


@pytest.mark.parametrize(("patience", "is_reason"), [(None, False), (5.0, True)])
def test_an_end_in_good_order_is_a_reason_only_after_a_failure(
    patience: float | None, is_reason: bool
) -> None:
    notes = heard(silent=0.0)
    notes.take({"kind": "left", "places": {"1": "in step 7"}})
    trouble = notes.trouble(SCOPE, waited=0.0, patience=patience)
    assert (trouble is not None) == is_reason
    assert trouble is None or trouble == "rank 1 has ended in step 7; its log may say why"
