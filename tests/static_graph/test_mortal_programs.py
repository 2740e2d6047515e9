"""A rank that dies, stops or fails inside a Program: the other ends soon, and names it."""

from __future__ import annotations

import re
import signal

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute.errors import DataError
from paddle_recompute.static_graph import ProgramCache, StaticTrainStep
from tests.distributed.test_mortal_ranks import Death
from tests.static_graph.models import HIDDEN
from tests.static_graph.test_grad_cache import Encoder, loss_of, vectors
from tests.static_graph.test_train_step import config_of


class Wide(paddle.nn.Layer):
    """Most of a step is the exchange of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = paddle.nn.LayerList([paddle.nn.Linear(HIDDEN, HIDDEN)])
        self.wide = paddle.nn.Linear(HIDDEN, 200_000)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.wide(self.layers[0](x))[:, :4].square().mean()


def train_programs(cached: bool = False, fails: bool = False) -> None:
    config = config_of("sync.peer_timeout=4", recompute=False)
    if cached:
        step = StaticTrainStep(config, Encoder, grad_cache=ProgramCache(loss_of(), chunk_size=3))
    else:
        step = StaticTrainStep(config, Wide, lambda model, batch: model(batch[0]))
    for number in range(1, 1_000_000):
        if fails and number == 4 and dist.get_rank() == 1:
            raise DataError("a label is out of range")
        step([vectors(number)])
        if number <= 3:
            print(f"step {number} done", flush=True)


DEATHS = {
    "killed": Death(1, worker=train_programs, signal_number=signal.SIGKILL),
    "rank 0 stopped": Death(0, worker=train_programs, signal_number=signal.SIGSTOP),
    "failed": Death(1, worker=train_programs, arguments={"fails": True}),
    "killed in a gradient cache": Death(
        1, worker=train_programs, arguments={"cached": True}, signal_number=signal.SIGKILL
    ),
}
MESSAGES = {
    "killed": r"rank 1 has died .* Rank 0 waited .* for ",
    "rank 0 stopped": r"rank 0 has shown no sign of life for \d s .* Rank 1 waited .* for ",
    "failed": r"rank 1 failed .*: DataError: a label is out of range. Rank 0 waited",
    "killed in a gradient cache": r"rank 1 has died .* Rank 0 waited .* for ",
}


@pytest.mark.parametrize("name", DEATHS)
def test_the_other_rank_ends_in_error_and_names_the_rank(name: str) -> None:
    death = DEATHS[name].happen()
    assert death.code == 1
    assert re.match(MESSAGES[name], death.message), death.message
