"""Plans that choose for each call whether it is plain, recomputed, or keeps parts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import paddle
import pytest

from paddle_recompute import (
    ContrastiveLoss,
    GradCache,
    RecomputeConfig,
    RecomputePlan,
    apply_recompute,
    estimate,
    plan,
)
from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.errors import PlanError, SelectionError
from paddle_recompute.planner import (
    Job,
    StepCosts,
    make_plan,
    measure_costs,
    simulate,
    smallest,
    solve,
)
from paddle_recompute.planner.planning import measured_peak
from paddle_recompute.recompute import undo_recompute
from paddle_recompute.recompute.layer import WrappedLayer
from tests.planner.chains import CLOSE, chain, measured

KEEP = ["layers.*.attend", "layers.*.linear2"]
IN_TURNS = 0.07
"""Two calls that take turns in the backward: when one has released its outputs is not seen."""
ROUNDING = 1e-9
"""Sums of the same seconds in another order."""


class Block(paddle.nn.Layer):
    """Counts the calls of its method `attend`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = paddle.nn.Linear(width, width), paddle.nn.Linear(width, width)
        self.calls = 0

    def attend(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        scores = paddle.matmul(x, x, transpose_y=True)
        return paddle.matmul(paddle.nn.functional.softmax(scores), x)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + paddle.nn.functional.dropout(self.attend(self.linear1(x).tanh()), 0.2)
        return x + paddle.nn.functional.dropout(self.linear2(x.tanh()), 0.1)


class Blocks(paddle.nn.Layer):
    def __init__(self, number: int = 4, width: int = 32) -> None:
        super().__init__()
        self.layers = paddle.nn.LayerList([Block(width) for _ in range(number)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(axis=1)


def squared(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def both(model: Any, batch: Any) -> Any:
    """Each block is called twice, and a plan may treat the two calls in two ways."""
    return paddle.matmul(model(batch), model(batch * 2), transpose_y=True).square().mean()


def job_of(loss: Any = squared) -> Job:
    paddle.seed(0)
    model = Blocks()
    batch = paddle.randn([16, 24, 32])
    if loss == "gradient cache":
        cache = GradCache(model, ContrastiveLoss(temperature=0.1), chunk_size=8)
        return Job(model, (batch, batch * 2), None, grad_cache=cache, keep=KEEP)
    return Job(model, batch, loss, keep=KEEP)


def choices_of(costs: StepCosts, letters: str) -> tuple[Any, ...]:
    """P: plain; R: recomputed; K: recomputed, with parts kept."""
    treated = {"R": lambda unit: unit, "K": lambda unit: (*unit, "keep")}
    pairs = zip(costs.units, letters, strict=True)
    return tuple(treated[letter](unit) for unit, letter in pairs if letter != "P")


def gradients(job: Job) -> list[bytes]:
    paddle.seed(3)
    job.step()
    found = [parameter.grad.numpy().tobytes() for parameter in job.parameters()]
    job.clear_gradients()
    return found


# ------------------------------------------------------------------------------------- measured


@measured
@pytest.mark.parametrize(
    ("loss", "policies"),
    [
        (squared, ["KKKK", "RRRR", "KRKP", "PKRK", "RKPP"]),
        (both, ["KKKKKKKK", "RKPKKRPR", "RRRRKKKK", "KKKKRRRR"]),
        ("gradient cache", ["KKKK", "KRPK"]),
    ],
)
def test_the_predicted_peak_is_the_measured_one(loss: Any, policies: list[str]) -> None:
    job = job_of(loss)
    costs = measure_costs(job)
    wanted = gradients(job)
    for letters in policies:
        choices = choices_of(costs, letters)
        found = RecomputePlan(2**40, costs, choices, job.signature(), keep=tuple(KEEP))
        predicted, taken = found.peak_bytes - costs.base, measured_peak(job, found) - costs.base
        assert predicted == pytest.approx(taken, rel=IN_TURNS if loss is both else CLOSE), letters
        found.apply(job.model)
        assert gradients(job) == wanted
        found.remove(job.model)


@measured
def test_each_call_keeps_as_the_plan_says() -> None:
    job = job_of(both)
    costs = measure_costs(job)
    choices = choices_of(costs, "PPKK" + "RKRK")
    RecomputePlan(2**40, costs, choices, job.signature(), keep=tuple(KEEP)).apply(job.model)
    for layer in job.model.layers:
        layer.calls = 0
    job.step()
    # Twice in the forward, and once more for each call that is recomputed without `keep`.
    assert [layer.calls for layer in job.model.layers] == [3, 2, 3, 2]


@measured
def test_the_bytes_of_what_is_kept() -> None:
    """Of `attend` its weights and its output, of `linear2` its output; its argument is computed
    again.
    """
    costs = measure_costs(job_of())
    kept = 4 * 16 * (24 * 24 + 2 * 24 * 32)
    assert all(call.parts_kept == pytest.approx(kept, rel=0.02) for call in costs.calls[:-1])
    assert all(call.parts_kept < call.kept for call in costs.calls)


@measured
def test_a_plan_keeps_parts_where_the_budget_allows_it() -> None:
    """With times that are given, so that none of them is noise: the more room, the more kept."""
    job = job_of()
    costs = measure_costs(job)
    costs = replace(
        costs,
        recomputed_seconds=8.0,
        calls=tuple(replace(call, seconds=1.0, parts_seconds=0.6) for call in costs.calls),
    )
    low, high = smallest(costs).peak, simulate(costs, ()).peak.bytes
    seen = set()
    for part in range(17):
        budget = low + (high - low) * part // 16
        found = make_plan(costs, budget, signature=job.signature(), keep=tuple(KEEP))
        keeps = [len(choice) > 2 for choice in found.choices]
        seen.add((len(keeps), sum(keeps)))
        assert measured_peak(job, found) <= budget * (1 + CLOSE)
        assert RecomputePlan.from_dict(found.to_dict()) == found
        if any(keeps) and not all(keeps):
            assert ": whole, keeps layers.*.attend, layers.*.linear2, " in str(found)
            assert ": whole, -" in str(found)
    assert (3, 2) in seen and (0, 0) in seen


@measured
def test_a_verified_plan_is_within_its_budget() -> None:
    job = job_of()
    config = RecomputeConfig(checkpoints=["layers.*"])
    peaks = [
        estimate(job.model, job.batch, squared, recompute=replace(config, keep=keep)).peak_bytes
        for keep in ([], KEEP)
    ]
    assert peaks[1] > peaks[0]
    for budget in (peaks[0] + 4096, sum(peaks) // 2, peaks[1] + 4096):
        found = plan(job.model, job.batch, squared, memory_budget=budget, keep=KEEP)
        assert found.measured_bytes is not None and found.measured_bytes <= budget
    with pytest.raises(PlanError, match="smallest feasible budget"):
        plan(job.model, job.batch, squared, memory_budget=peaks[0] // 2, keep=KEEP)
    with pytest.raises(SelectionError, match="keep: the pattern"):
        plan(job.model, job.batch, squared, memory_budget=2**40, keep=["layers.*.nothing"])


@measured
def test_a_step_that_does_not_fit_with_all_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    job, step = job_of(), Job.step

    def limited(self: Job) -> None:
        if isinstance(self.model.layers[0].linear2, WrappedLayer):
            raise MemoryError
        step(self)

    monkeypatch.setattr(Job, "step", limited)
    with pytest.raises(PlanError, match=r"give fewer patterns \(layers"):
        measure_costs(job)


# --------------------------------------------------------------------------------- in a Program


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place':UserWarning")  # Paddle 3's own
@pytest.mark.skipif(
    paddle_version() < (3, 0) or paddle.get_device() != "cpu",
    reason="to_static does not recompute on 2.6; Programs are compared on a CPU",
)
def test_a_program_treats_each_call_as_the_plan_says() -> None:
    from paddle_recompute.recompute import keep_parts, wrap_calls

    paddle.seed(0)
    model, x = Blocks(2), paddle.randn([4, 6, 32])
    found = []
    for calls in ([], [("layers.0", 0), ("layers.1", 0, "keep")]):
        if calls:
            wrap_calls(model, calls, {"layers.0": 1, "layers.1": 1})
            keep_parts(model, KEEP, ["layers.0", "layers.1"])
        paddle.seed(3)
        run = paddle.jit.to_static(model, full_graph=True)
        run(x).square().mean().backward()
        found.append([one.grad.numpy().tobytes() for one in model.parameters()])
        model.clear_gradients()
        undo_recompute(model)
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------- searched


def chain_with_parts(length: int, seed: int) -> StepCosts:
    costs, draw = chain(length, seed), random.Random(seed)
    calls = []
    for call in costs.calls:
        kept = int(call.kept * draw.uniform(0.1, 0.9))
        more = {"parts_kept": kept, "parts_rise": kept + draw.randint(5, 80)}
        more |= {"parts_again": call.kept - kept + draw.randint(5, 80)}
        calls.append(replace(call, **more, parts_seconds=call.seconds * draw.uniform(0.0, 1.0)))
    return replace(costs, calls=tuple(calls))


def every_choice(costs: StepCosts) -> Iterator[tuple[Any, ...]]:
    for letters in itertools.product("PRK", repeat=len(costs.units)):
        yield choices_of(costs, "".join(letters))


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_the_fastest_of_all_choices(seed: int) -> None:
    costs = chain_with_parts(5, seed)
    every = [
        (found.peak.bytes, found.seconds)
        for found in (simulate(costs, choices) for choices in every_choice(costs))
    ]
    low, plain = smallest(costs).peak, simulate(costs, ()).peak.bytes
    keeping = 0
    for tenth in range(11):
        budget = low + (plain - low) * tenth // 10
        found = solve(costs, budget)
        assert found is not None and found.exact and found.peak <= budget
        fastest = min(seconds for peak, seconds in every if peak <= budget)
        assert found.seconds == pytest.approx(fastest, rel=ROUNDING)
        keeping += sum(len(choice) > 2 for choice in found.whole)
    assert keeping > 5


def test_an_estimate_of_a_policy_keeps_its_parts() -> None:
    from paddle_recompute.planner import choices_of_policy

    costs = chain_with_parts(3, 0)
    config = RecomputeConfig(checkpoints=["layers.*"], keep=["layers.*.linear2"])
    assert choices_of_policy(costs, config) == choices_of(costs, "KKK")
    assert choices_of_policy(costs, replace(config, keep=[])) == choices_of(costs, "RRR")


def test_the_rest_of_a_configuration_keeps_as_before() -> None:
    """Without a plan every recomputed call keeps its parts."""
    model, x = Blocks(1), paddle.ones([2, 3, 32])
    apply_recompute(model, RecomputeConfig(checkpoints=["layers.*"], keep=KEEP))
    model(x).sum().backward()
    assert model.layers[0].calls == 1


@pytest.mark.parametrize("seed", range(4))
def test_parts_that_save_no_time_are_kept_where_only_that_is_within_the_budget(seed: int) -> None:
    costs = chain_with_parts(4, seed)
    calls = [
        replace(call, parts_kept=1, parts_rise=2, parts_again=3, parts_seconds=0.0)
        for call in costs.calls
    ]
    costs = replace(costs, calls=tuple(calls))
    least = min(simulate(costs, choices).peak.bytes for choices in every_choice(costs))
    found = solve(costs, least)
    assert found is not None and found.peak == smallest(costs).peak == least


@measured
def test_a_block_without_the_parts_keeps_none() -> None:
    """Whatever the clocks say."""
    without = paddle.nn.Sequential(paddle.nn.Linear(8, 8), paddle.nn.Tanh())
    model = paddle.nn.Sequential(
        without, paddle.nn.Sequential(paddle.nn.Linear(8, 8), paddle.nn.Linear(8, 8))
    )
    job = Job(model, paddle.ones([4, 8]), squared, checkpoints=["0", "1"], keep=["1.1"])
    first, second = measure_costs(job).calls
    assert not first.has_parts and first.parts_seconds == 0.0 and second.has_parts


@measured
def test_a_step_that_calls_other_blocks_each_time_is_refused() -> None:
    job = job_of()
    job.model.forward = Dropped(job.model)
    with pytest.raises(PlanError, match="call different blocks"):
        measure_costs(job)


class Dropped:
    """A forward that calls one block and two blocks in turns."""

    def __init__(self, model: Any) -> None:
        self._layers, self._calls = list(model.layers), 0

    def __call__(self, x: paddle.Tensor, *args: Any) -> paddle.Tensor:
        self._calls += 1
        for layer in self._layers[: 1 + self._calls % 2]:
            x = layer(x)
        return x
