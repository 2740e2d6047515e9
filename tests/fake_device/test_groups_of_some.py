"""Two of three ranks on a device: what they make together needs nothing of the third."""

from __future__ import annotations

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute._paddle import device
from paddle_recompute.distributed import reduce_numbers
from paddle_recompute.grad_sync import PieceSender
from tests.fake_device import switches
from tests.ranks import run_ranks

SOME = [0, 2]


def two_of_three() -> dict[str, object]:
    rank = dist.get_rank()
    group = dist.new_group(SOME)  # by all three, as Paddle wants it
    found: dict[str, object] = {}
    if rank in SOME:
        found["numbers"] = numbers_beside_a_computation(group, rank)
        found["pieces"] = [pieces(group, rank), pieces(group, rank)]
    # Their groups have not moved the numbers that Paddle counts on each rank.
    later = dist.new_group([0, 1, 2])
    number = paddle.full([1], rank + 1.0)
    dist.all_reduce(number, group=later)
    return found | {"all": number.item()}


def numbers_beside_a_computation(
    group: dist.communication.group.Group, rank: int
) -> tuple[bool, list[float]]:
    reduce_numbers([0.0], "max", "connecting", group)
    with switches.set_to(kernel_us=5_000_000):
        paddle.full([4], 1.0)
    computed = device.event_now()
    largest = reduce_numbers([rank, -rank], "max", "largest", group)
    return not computed.query(), largest


def pieces(group: dist.communication.group.Group, rank: int) -> list[float]:
    parameter = paddle.create_parameter([2], "float32")
    sender = PieceSender([parameter], group)
    sent = sender.send([parameter], [paddle.full([2], rank + 1.0)], "a piece")
    (mean,) = sent.wait()
    assert mean is not None
    return [float(value) for value in mean.tolist()]


def test_groups_are_made_by_their_members_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DEVICES", "3")
    ours = {"numbers": (True, [2.0, 0.0]), "pieces": [[2.0, 2.0]] * 2, "all": 6.0}
    assert run_ranks(two_of_three, 3) == [ours, {"all": 6.0}, ours]
