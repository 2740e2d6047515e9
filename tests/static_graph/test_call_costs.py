"""Single calls of Layers as Programs: what such a Program takes, and what stays as it is."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import load_config
from paddle_recompute._paddle import memory
from paddle_recompute._paddle.static import native
from paddle_recompute.distributed import barrier
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute import Unit, recompute_wrapper, treat_calls
from paddle_recompute.static_graph import ProgramCalls, call_costs
from tests.ranks import run_ranks
from tests.static_graph.test_train_step import BFLOAT16_ON

pytestmark = [
    pytest.mark.skipif(not memory.can_reset_peak(), reason="2.6 cannot start the peak anew"),
    pytest.mark.filterwarnings("ignore:ProgramCalls goes:DeprecationWarning"),
]
CONFIG = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"


class Block(paddle.nn.Layer):
    """Takes a mask by name; its second output needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)

    def forward(self, x: Any, *, mask: Any) -> Any:
        return paddle.nn.functional.dropout(self.linear(x), 0.5) * mask, mask


class Model(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = paddle.nn.LayerList([Block(), Block()])


def whole(block: paddle.nn.Layer) -> None:
    treat_calls(block, [Unit(("",), (0,))], {"": 1}, preserve_rng_state=True)


def nothing(block: paddle.nn.Layer) -> None:
    pass


def calls_of(model_fn: Any) -> ProgramCalls:
    return ProgramCalls(load_config(CONFIG, ["mode=static", "launch.num_ranks=1"]), model_fn)


def inputs(*, needs_gradients: bool = True) -> Any:
    x = paddle.ones([3, 4])
    x.stop_gradient = not needs_gradients
    return (x,), {"mask": paddle.ones([3, 4])}


def test_it_says_that_it_goes() -> None:
    with pytest.warns(DeprecationWarning, match=r"ProgramCalls goes in 0\.3"):
        calls_of(Model)


@pytest.fixture
def multiplications(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many matrices the Program of each run multiplies."""
    found = []
    run = ProgramCalls._run

    def counted(self: ProgramCalls, program: Any, ballast: int) -> None:
        kinds = [native().kind(one) for one in native().operations(program.main)]
        found.append(sum("matmul" in kind for kind in kinds))
        run(self, program, ballast)

    monkeypatch.setattr(ProgramCalls, "_run", counted)
    monkeypatch.setattr(call_costs, "AFFORDABLE", 0.0)
    return found


def test_a_recomputed_call_has_one_more_forward(multiplications: list[int]) -> None:
    found = calls_of(Model).measure("blocks.1", inputs(), {"plain": nothing, "whole": whole}, 2**16)
    assert sorted(found) == ["plain", "whole"]
    assert min(cost.seconds for cost in found.values()) > 0
    forward, backward = 1, 1  # the operator of the gradient makes that of weight and input
    each = [forward + backward, 2 * forward + backward]
    assert multiplications == each * (1 + 2 * call_costs.LEAST_OF + call_costs.LEAST_ROUNDS)


def test_streams_and_gradients_stay_as_they_are(multiplications: list[int]) -> None:
    given = inputs()
    paddle.seed(3)
    streams = paddle.get_rng_state()
    calls_of(Model).measure("blocks.0", given, {"whole": whole}, 2**16)
    drawn = paddle.rand([3]).tolist()
    paddle.set_rng_state(streams)
    assert drawn == paddle.rand([3]).tolist()
    assert paddle.in_dynamic_mode()
    assert given[0][0].grad is None


def test_a_call_without_a_backward_is_refused(multiplications: list[int]) -> None:
    class Frozen(Model):
        def __init__(self) -> None:
            super().__init__()
            for one in self.parameters():
                one.stop_gradient = True

    with pytest.raises(StaticGraphError, match=r"no output of 'blocks.0' needs a gradient"):
        calls_of(Frozen).measure("blocks.0", inputs(needs_gradients=False), {"plain": nothing}, 1)
    assert not multiplications


class Wide(paddle.nn.Layer):
    """Of 4 MiB it keeps 8 MiB, and a dropout's mask of 1 MiB."""

    def forward(self, x: Any) -> Any:
        return paddle.nn.functional.dropout(paddle.nn.functional.gelu(x * 2), 0.5) * x


def test_what_is_held_is_exact() -> None:
    """The mask stays where the call is recomputed; its input and output always do.

    To 8 bytes: the executor's threads run scalar operators of the ballast in any order.
    """
    x = paddle.ones([1024, 1024])
    x.stop_gradient = False

    def model_fn() -> paddle.nn.Layer:
        return paddle.nn.Sequential(Wide())

    treatments = {"plain": nothing, "whole": whole}
    found = calls_of(model_fn).measure("0", ((x,), {}), treatments, 2**26)
    kept = 2 * 4 * 2**20  # the input of gelu, and what is multiplied with x
    assert abs(found["plain"].held - found["whole"].held - kept) <= 8
    assert found["whole"].peak < found["whole"].held


def test_arrays_and_constants_among_the_inputs() -> None:
    (x,), kwargs = inputs()
    found = calls_of(Model).measure(
        "blocks.0", ((x,), {"mask": kwargs["mask"].numpy()}), {"plain": nothing}, 2**16
    )
    assert found["plain"].seconds > 0


class Branch(Block):
    """Its parts are in a branch, where none of them can be recomputed."""

    def forward(self, x: Any, *, mask: Any) -> Any:
        own = self.linear
        return paddle.static.nn.cond(mask.sum() > 0, lambda: own(x), lambda: own(x) * 2)


def test_a_treatment_that_a_program_cannot_have_is_left_out() -> None:
    class Branches(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = paddle.nn.LayerList([Branch()])

    def its_part(block: paddle.nn.Layer) -> None:
        recompute_wrapper(block.linear, name="linear")

    treatments = {"plain": nothing, "part": its_part, "whole": whole}
    found = calls_of(Branches).measure("blocks.0", inputs(), treatments, 2**16)
    assert sorted(found) == ["plain", "whole"]


def test_a_block_of_which_mixed_precision_casts_nothing() -> None:
    class Doubles(paddle.nn.Layer):
        def forward(self, x: Any) -> Any:
            return x * 2

    config = load_config(CONFIG, ["mode=static", "launch.num_ranks=1", *BFLOAT16_ON])
    calls = ProgramCalls(config, lambda: paddle.nn.Sequential(Doubles()))
    (x,), _ = inputs()
    assert calls.measure("0", ((x,), {}), {"plain": nothing}, 2**16)["plain"].seconds > 0


def measure_on_rank_0() -> None:
    if dist.get_rank() == 0:
        calls_of(Model).measure("blocks.0", inputs(), {"plain": nothing}, 2**16)
    barrier()


def test_ranks_do_not_wait_for_each_other() -> None:
    run_ranks(measure_on_rank_0, 2)
