"""What a rank concludes from what it has heard of the others."""

from __future__ import annotations

from typing import Any

import pytest

from paddle_recompute.distributed.peer_state import Limits, PeerState, Scope

SCOPE = Scope((0, 1, 2), Limits(peer_timeout=30, stall_timeout=60))
GONE = {"kind": "gone", "rank": 2, "phase": ""}
LEFT = {"kind": "left", "phases": {"1": "after step 9"}}
FAILED = {"kind": "failed", "rank": 1, "phase": "in step 4", "message": "KeyError: 'x'."}
WAITING = {"kind": "waiting", "among": SCOPE.ranks_key, "ranks": [0, 1]}
STALLED = "rank 2 did not come within 61 s (stall_timeout) although it shows signs of life"
STOPPED = "rank 2 has shown no sign of life for 31 s (peer_timeout is 30 s):"


def alive(**silent: float) -> dict[str, Any]:
    return {"kind": "silent", "seconds": {r[1:]: s for r, s in silent.items()}}


@pytest.mark.parametrize(
    ("messages", "waited", "silence", "failure"),
    [
        ([], 59, None, None),
        ([], 61, None, "rank 1, 2 did not come within 61 s (stall_timeout)"),
        ([WAITING], 61, None, "rank 2 did not come"),
        ([alive(r2=0.0), WAITING], 59, None, None),
        ([alive(r2=0.0), WAITING], 61, None, STALLED),
        ([alive(r2=29.0)], 29, None, None),
        ([alive(r2=31.0)], 31, None, STOPPED),
        ([alive(r2=31.0), alive()], 1, None, None),
        ([alive(r3=31.0)], 1, None, None),  # of another group
        ([GONE], 0, None, "rank 2 has died"),
        # Of another group: the run ends with it.
        ([{**GONE, "rank": 3}], 0, None, "rank 3 has died"),
        ([LEFT], 1, None, None),  # it may have done its part
        ([LEFT], 3, None, "rank 1 has ended after step 9; its log may say why"),
        ([FAILED], 0, None, "rank 1 failed in step 4: KeyError: 'x'"),
        ([GONE, FAILED], 0, None, "rank 2 has died"),  # the first is the cause
        # With silence: why a collective has failed already.
        ([alive(r2=4.0)], 0, 5.0, None),
        ([alive(r2=29.0)], 0, 5.0, "rank 2 has shown no sign of life for 29 s: it is stopped"),
        ([LEFT], 0, None, None),
        ([LEFT], 0, 5.0, "rank 1 has ended after step 9; its log may say why"),
    ],
)
def test_when_waiting_is_in_vain(
    messages: list[dict[str, Any]], waited: float, silence: float | None, failure: str | None
) -> None:
    notes = PeerState(rank=0)
    for message in messages:
        notes.take(message)
    said = notes.failure(SCOPE, waited, silence=silence)
    assert said == failure if failure is None else str(said).startswith(failure)
    if failure in (STALLED, "rank 1 has ended after step 9; its log may say why"):
        assert said == failure


def test_a_hub_that_is_lost_or_silent_is_rank_0() -> None:
    assert "rank 0" in str(PeerState(rank=1, lost="reset").failure(SCOPE, 0))
    assert PeerState(rank=1, server_quiet=29).failure(SCOPE, 0) is None
    silent = str(PeerState(rank=1, server_quiet=31).failure(SCOPE, 0))
    assert silent.startswith("rank 0 has shown no sign of life")


def test_calls_that_differ_are_those_of_one_wait() -> None:
    notes = PeerState(rank=0)
    calls = [{"label": "step 2", "ranks": [0]}, {"label": "barrier", "ranks": [1]}]
    notes.take({**WAITING, "serial": 7, "different_calls": calls})
    assert notes.different_calls(7) == "rank 0 is at step 2, rank 1 is at barrier"
    assert notes.different_calls(8) is None
