"""Plans that keep inputs of recomputed blocks off the device, where that is allowed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import paddle
import pytest

from paddle_recompute import RecomputePlan
from paddle_recompute._paddle import memory
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.errors import ConfigError, PlanError
from paddle_recompute.planner import Choice, Job, StepCosts, make_plan, smallest, uniform
from paddle_recompute.planner.costs import OFFLOADED, PLAIN, WHOLE
from paddle_recompute.planner.planning import measured_peak
from paddle_recompute.planner.simulate import simulate
from tests.app.trainer.test_trainer import tiny, write_pairs
from tests.planner.test_plan import EXACT, gradients_of, job_of, make, peaks, planned

pytestmark = pytest.mark.skipif(not memory.can_reset_peak(), reason="plans need Paddle 3")


class Boundaries(paddle.nn.Layer):
    """Blocks that keep little inside and much between them."""

    def __init__(self) -> None:
        super().__init__()
        nn = paddle.nn
        self.blocks = nn.LayerList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = block(x).transpose([1, 0]).contiguous().transpose([1, 0]).contiguous()
        return x


def wide_job(**settings: Any) -> Job:
    """A step whose smallest peak is that of its boundaries."""
    paddle.seed(0)
    return Job(
        Boundaries(),
        paddle.randn([4096, 8]),
        lambda m, x: m(x).square().mean(),
        checkpoints=("blocks.*",),
        **settings,
    )


def without(costs: StepCosts) -> StepCosts:
    """`costs` of the same step, where no input may leave the device."""
    calls = tuple(
        replace(call, options={k: v for k, v in call.options.items() if k != OFFLOADED})
        for call in costs.calls
    )
    return replace(costs, calls=calls, offload=None)


def choices_of(costs: StepCosts, letters: str) -> list[Choice]:
    option = {"P": PLAIN, "W": WHOLE, "O": OFFLOADED}
    return [
        Choice(number, number, option[letters[number % len(letters)]])
        for number in range(len(costs.calls))
    ]


@pytest.mark.parametrize("letters", ["WOOO", "POWO", "WOPW", "WWOP"])
@pytest.mark.parametrize("name", ["encoder", "lstm"])
def test_the_predicted_peak_is_the_measured_one(name: str, letters: str) -> None:
    job = replace(job_of(name), offload="disk")
    costs = job.measure(only_bytes=True)
    predicted, measured = peaks(job, costs, choices_of(costs, letters))
    assert abs(measured - predicted) <= EXACT


def test_a_budget_is_met_that_recompute_alone_cannot_meet(tmp_path: Path) -> None:
    job = wide_job(offload="disk")
    costs = job.measure(only_bytes=True)
    low, alone = smallest(costs).peak, smallest(without(costs)).peak
    assert low < alone
    budget = (low + alone) // 2
    with pytest.raises(PlanError, match="offload='host' or 'disk'"):
        planned(job, budget)
    found = planned(job, budget, offload="disk")
    assert found.measured_bytes is not None and found.measured_bytes <= budget
    assert f": {OFFLOADED}, " in str(found)

    found.save(tmp_path / "plan.json")
    again = RecomputePlan.load(tmp_path / "plan.json")
    assert again == found
    assert measured_peak(job, again) <= budget
    for plain, other in zip(gradients_of(job, None), gradients_of(job, again), strict=True):
        assert plain.tobytes() == other.tobytes()


def test_calls_of_one_layer_keep_their_inputs_in_places_of_their_own() -> None:
    """The two towers are one encoder; the second calls alone are offloaded."""
    job = replace(job_of("two towers"), offload="disk")
    costs = job.measure(only_bytes=True)
    of_second = [
        Choice(n, n, OFFLOADED if call.number and OFFLOADED in call.options else WHOLE)
        for n, call in enumerate(costs.calls)
    ]
    assert {choice.option for choice in of_second} == {WHOLE, OFFLOADED}
    found = make(costs, of_second, job)
    found.apply(job.model)
    turns = {
        turn.offload
        for _, layer in job.model.named_sublayers()
        if getattr(layer, "_recompute_turns", None) is not None
        for turn in layer._recompute_turns._turns
    }
    found.remove(job.model)
    assert turns == {None, "disk"}
    for plain, other in zip(gradients_of(job, None), gradients_of(job, found), strict=True):
        assert plain.tobytes() == other.tobytes()


def test_an_input_that_others_keep_is_not_offloaded() -> None:
    """The first block's input is the batch, which stays; so does a slice of it."""
    job = replace(job_of("encoder"), offload="disk")
    for loss_fn in (job.loss_fn, lambda m, x: m(x[1:]).square().mean()):
        costs = replace(job, loss_fn=loss_fn).measure(only_bytes=True)
        frees = [call.options[OFFLOADED].frees_input for call in costs.calls]
        assert not frees[0] and all(frees[1:])
        assert uniform(costs, OFFLOADED)[0].option == WHOLE


def test_a_call_whose_input_stays_in_one_pass_alone() -> None:
    """Every call has the option, so that a choice for one pass holds for the others."""
    job = wide_job(offload="disk")

    def two_passes(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        model(x * 1.5).mean().backward()
        h = x * 1.5
        other = (h * model.blocks[0][0].weight.mean()).square().mean()  # keeps h
        return model(h).square().mean() + other

    two = replace(job, loss_fn=two_passes)
    costs = two.measure(only_bytes=True)
    frees = [call.options[OFFLOADED].frees_input for call in costs.calls if not call.number]
    assert len(set(frees[:1] + frees[6:7])) == 2
    with pytest.raises(PlanError, match="smallest feasible budget"):
        planned(two, 1, offload="disk")


def test_the_smallest_budget_is_not_above_that_of_all_inputs_offloaded() -> None:
    """Also where the graph is no chain: here the graph of a second forward is dropped."""
    job = wide_job(offload="disk")

    def one_is_dropped(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        loss = model(x * 1.5).square().mean()
        model(x * 1.5).mean()
        return loss

    costs = replace(job, loss_fn=one_is_dropped).measure(only_bytes=True)
    least = smallest(costs).peak
    assert least <= simulate(costs, uniform(costs, OFFLOADED)).peak.bytes
    assert make_plan(costs, least, signature="").peak_bytes <= least


def test_where_inputs_may_wait_is_checked(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="offload: received 'moon'; it is one of 'host', 'disk'"):
        wide_job(offload="moon")
    assert wide_job(offload="host").measure(only_bytes=True).offload is None
    assert "offload='host' has no effect on a CPU" in caplog.text


def test_a_run_offloads_what_its_plan_says(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    settings: dict[str, Any] = {
        "recompute__enable": True,
        "recompute__checkpoints": ["encoder.layers.*"],
        "recompute__policy": "budget",
        "recompute__offload": "disk",
        "recompute__memory_budget": "1GiB",
        "train__max_steps": 1,
        "train__eval_before": False,
    }
    Trainer(tiny(tmp_path, **settings)).run()
    (path,) = (tmp_path / "run").rglob("plan.json")
    costs = json.loads(path.read_text())["costs"]
    assert costs["offload"] == "disk"
    assert any(OFFLOADED in call["options"] for call in costs["calls"])
