"""Plans of real models: the bytes that they predict are measured, and the numbers stay the same."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import (
    ContrastiveLoss,
    GradCache,
    RecomputeConfig,
    RecomputePlan,
    TrainStep,
    estimate,
    find_batch_size,
    plan,
)
from paddle_recompute._paddle import memory
from paddle_recompute.errors import ConfigError, PlanError, SelectionError
from paddle_recompute.planner import (
    Job,
    StepCosts,
    find_batch,
    make_plan,
    measure_costs,
    simulate,
    smallest,
    uniform,
    verified,
)
from paddle_recompute.planner.planning import measured_peak
from paddle_recompute.recompute import RecomputeLayer, recompute_wrapper
from tests.planner.chains import CLOSE, measured
from tests.ranks import run_ranks

pytestmark = measured
EXACT = 64
"""Bytes: scalars of a loss."""
IN_TURNS = 0.03
"""Two calls whose operators take turns are predicted as an upper bound."""


def encoder(layers: int = 4, width: int = 32) -> paddle.nn.Layer:
    block = paddle.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="gelu")
    return paddle.nn.TransformerEncoder(block, layers)


class TwoTowers(paddle.nn.Layer):
    """One encoder for both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        a, b = self.encoder(query).mean(axis=1), self.encoder(positive).mean(axis=1)
        return paddle.matmul(a, b, transpose_y=True).square().mean()


class UNet(paddle.nn.Layer):
    """Blocks whose outputs are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = paddle.nn.LayerList(
            [self._block(a, b) for a, b in [(3, 8), (8, 16), (16, 16), (32, 8), (16, 4)]]
        )

    @staticmethod
    def _block(a: int, b: int) -> paddle.nn.Layer:
        nn = paddle.nn
        return nn.Sequential(nn.Conv2D(a, b, 3, padding=1), nn.BatchNorm2D(b), nn.ReLU())

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        f = paddle.nn.functional
        one = self.blocks[0](x)
        two = self.blocks[1](f.max_pool2d(one, 2))
        low = self.blocks[2](f.max_pool2d(two, 2))
        up = self.blocks[3](paddle.concat([f.interpolate(low, scale_factor=2), two], axis=1))
        return self.blocks[4](paddle.concat([f.interpolate(up, scale_factor=2), one], axis=1))


def job_of(name: str) -> Job:
    paddle.seed(0)
    if name == "gradient cache":
        model = paddle.nn.Sequential(encoder(), Mean())
        cache = GradCache(model, ContrastiveLoss(temperature=0.1), chunk_size=8)
        batch = paddle.randn([16, 8, 32]), paddle.randn([16, 8, 32])
        return Job(model, batch, None, grad_cache=cache)
    if name == "two towers":
        towers = TwoTowers()
        batch = paddle.randn([8, 16, 32]), paddle.randn([8, 12, 32])
        return Job(towers, batch, lambda m, pair: m(*pair))
    make, shape = {
        "encoder": (encoder, [8, 16, 32]),
        "encoder that keeps": (encoder, [8, 16, 32]),
        "one encoder twice": (encoder, [8, 16, 32]),
        "u-net": (UNet, [4, 3, 16, 16]),
    }[name]
    loss = twice if name == "one encoder twice" else squared
    keep = ["layers.*.linear?"] if name == "encoder that keeps" else []
    return Job(make(), paddle.randn(shape), loss, keep=keep)


def squared(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def twice(model: Any, batch: Any) -> Any:
    return squared(model, batch) + squared(model, batch * 2)


class Mean(paddle.nn.Layer):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x.mean(axis=1)


JOBS = ("encoder", "encoder that keeps", "two towers", "u-net", "gradient cache")


@functools.cache
def costs_of(name: str) -> StepCosts:
    """Of `job_of`, measured once: a measurement leaves no trace, and every job is built alike."""
    return measure_costs(job_of(name))


def planned(job: Job, budget: int, **options: Any) -> RecomputePlan:
    return plan(
        job.model,
        job.batch,
        job.loss_fn,
        memory_budget=budget,
        checkpoints=job.checkpoints,
        grad_cache=job.grad_cache,
        **options,
    )


def peaks(job: Job, costs: StepCosts, choices: Any) -> tuple[int, int]:
    """The predicted one and the measured one, in bytes above what is there before a step."""
    keep = tuple(job.keep)
    found = RecomputePlan(2**40, costs, tuple(choices), job.signature(), keep=keep)
    return found.peak_bytes - costs.base, measured_peak(job, found) - costs.base


POLICIES = {
    # All alike; segments; the blocks' neighbours have other options.
    "encoder": ("PPPP", "WWWW", "WWPP", "PWWW", "PWPW"),
    "encoder that keeps": ("PPPP", "WWWW", "WWPP", "PWPW"),
    # Of both towers. Their backwards take turns: 7 and 3, 6 and 2, and so on.
    "two towers": (*("PPPPPPPP", "WWWWWWWW", "WWWPPPPP", "WWWWPPPP", "WWWWWWPP", "PPPPPWWW"),
                   *("PPPWPPPP", "PPPPPPPW", "WPWWPPPP")),
    "u-net": ("PPPPP", "WWWWW"),
    # The second pass has the addresses of the first.
    "gradient cache": ("PPPP", "WWWW", "PPWW", "WPPW"),
}  # fmt: skip
"""How each call is treated: plain, recomputed as a whole, or joined with its neighbours."""


SLACK = {
    "two towers": (0.0, IN_TURNS),
    # Where the last block is plain, what it would keep and no operator saves is counted too.
    "encoder that keeps": (0.0, 2 * CLOSE),
    # Up to 3.2 % too much was seen: some multiples of 4 KiB, others in each run. Why is not known.
    "gradient cache": (0.5 * CLOSE, 6 * CLOSE),
}
"""The shares by which a mixture may be predicted too low and too high; nothing for others."""


def choices_of(policy: str, costs: StepCosts) -> list[Any]:
    """The units that `policy` recomputes."""
    return [unit for unit, one in zip(costs.units, policy, strict=True) if one == "W"]


@pytest.mark.parametrize("name", POLICIES)
def test_the_predicted_peak_is_the_measured_one(name: str) -> None:
    job, costs = job_of(name), costs_of(name)
    for policy in POLICIES[name]:
        predicted, measured = peaks(job, costs, choices_of(policy, costs))
        less, more = SLACK.get(name, (0.0, 0.0))
        # Where all calls are alike, none is beside another option.
        if len({*policy}) == 1 and name != "encoder that keeps":
            less, more = 0.0, IN_TURNS if name in ("two towers", "gradient cache") else 0.0
        difference = predicted - measured
        assert -EXACT - less * measured <= difference <= EXACT + more * measured, policy


def gradients_of(job: Job, found: RecomputePlan | None, steps: int = 2) -> list[Any]:
    paddle.seed(7)
    if found is not None:
        found.apply(job.model)
    for _ in range(steps):
        job.step()
    gradients = [p.grad.numpy() for p in job.model.parameters() if p.grad is not None]
    buffers = [b.numpy() for b in job.model.buffers()]
    for parameter in job.model.parameters():
        parameter.clear_gradient(False)
    if found is not None:
        found.remove(job.model)
    return gradients + buffers


@pytest.mark.parametrize("name", JOBS)
def test_a_plan_stays_within_its_budget_and_has_the_gradients_of_the_plain_step(name: str) -> None:
    job, costs = job_of(name), costs_of(name)
    state = {key: value.numpy().copy() for key, value in job.model.state_dict().items()}
    plain = gradients_of(job, None)
    high = simulate(costs, uniform(costs, "plain")).peak.bytes
    low = simulate(costs, uniform(costs, "whole")).peak.bytes
    for part in (0.25, 0.8):
        job.model.set_state_dict(state)
        budget = int(low + (high - low) * part)
        keep = tuple(job.keep)
        first = make_plan(costs, budget, signature="", checkpoints=job.checkpoints, keep=keep)
        found = verified(job, first)
        assert found.measured_bytes is not None and found.measured_bytes <= budget
        assert found.extra_seconds >= 0
        others = gradients_of(job, found)
        assert plain and len(plain) == len(others)
        assert all(map(np.array_equal, plain, others))


@pytest.mark.parametrize(
    ("name", "keeps"), [("encoder", None), ("encoder", False), ("one encoder twice", None)]
)
def test_a_loop_of_ones_own_stays_within_the_budget(name: str, keeps: bool | None) -> None:
    """``optimizer.clear_grad()`` keeps the gradients, set to zero, if it is not told otherwise."""
    job = job_of(name)
    model, batch = job.model, job.batch
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    model.pooler = paddle.nn.Linear(64, 64)  # is never called, so it has no gradient
    options: dict[str, Any] = {} if keeps is None else {"keeps_gradients": keeps}
    costs = estimate(model, batch, job.loss_fn, optimizer=optimizer, **options).costs
    least, plain = smallest(costs).peak, simulate(costs, uniform(costs, "plain")).peak.bytes
    found = plan(
        model,
        batch,
        job.loss_fn,
        optimizer=optimizer,
        memory_budget=(2 * least + plain) // 3,
        **options,
    )
    found.apply(model)
    for number in range(3):
        if number == 2:
            gc.collect()
            memory.reset_peak()
        loss = job.loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad(**({} if keeps is None else {"set_to_zero": keeps}))
        del loss
    measured = memory.peak_bytes()
    assert measured <= found.memory_budget
    if name == "encoder":
        assert measured == pytest.approx(found.peak_bytes, abs=1024)


def test_gradients_that_micro_batches_add_to_are_counted_once() -> None:
    paddle.seed(0)
    model = paddle.nn.Sequential(paddle.nn.Linear(32, 32), encoder(), Mean())
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    batch = paddle.randn([4, 8, 32])

    step = TrainStep(model, optimizer, loss_fn=squared, accumulate_steps=2)
    for _ in range(2):
        step([batch] * 2)
    job = Job(model, batch, squared, optimizer)
    costs = measure_costs(job)
    assert all(p.grad is None for p in model.parameters())
    for option in ("plain", "whole"):
        found = RecomputePlan(2**40, costs, tuple(uniform(costs, option)), job.signature())
        found.apply(model)
        step([batch] * 2)
        gc.collect()
        memory.reset_peak()
        step([batch] * 2)
        measured = memory.peak_bytes()
        found.remove(model)
        assert measured == pytest.approx(found.peak_bytes, abs=1024), option
        assert measured_peak(job, found) == pytest.approx(found.peak_bytes, abs=1024), option


class InBatch(paddle.nn.Layer):
    """A block in which every row meets every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(16, 16)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        hidden = self.linear(x)
        scores = paddle.nn.functional.softmax(paddle.matmul(hidden, hidden, transpose_y=True))
        return x + paddle.matmul(scores, hidden)


@pytest.mark.parametrize("kind", ["encoder", "rows that meet"])
def test_a_large_batch_is_estimated_from_small_ones(kind: str) -> None:
    """Also where each row meets every other one."""
    model, few, many = encoder(), [8, 16, 32], [40, 16, 32]
    allowed = {"abs": 8 * 16 * 32 * 4}  # the sample batch is there as well
    if kind != "encoder":
        model = paddle.nn.Sequential(*[InBatch() for _ in range(3)])
        few, many, allowed = [64, 16], [512, 16], {"rel": CLOSE}
    sample = paddle.randn(few)
    found = estimate(model, sample, squared, batch_size=many[0])
    measured = estimate(model, paddle.randn(many), squared)
    assert found.peak_bytes == pytest.approx(measured.peak_bytes, **allowed)


class OfTokens(paddle.nn.Layer):
    """Computes nothing for padding, which is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = paddle.nn.Sequential(*[paddle.nn.Linear(n, 64) for n in (4, 64, 64)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.layers(paddle.gather_nd(x, paddle.nonzero(x[:, :, 0])))


@pytest.mark.parametrize("order", [1, -1], ids=["short first", "long first"])
def test_small_batches_have_the_padding_of_one_that_is_sorted_by_length(order: int) -> None:
    lengths = np.linspace(1, 64, 64).astype("int64")[::order, None, None]
    sample = (np.arange(64)[:, None] < lengths) * np.ones([4], "float32")
    found, measured = (
        estimate(
            OfTokens(), paddle.to_tensor(batch), squared, batch_size=128, checkpoints=["layers"]
        )
        for batch in (sample, np.concatenate([sample, sample]))
    )
    # 16 of the 64 rows are measured, with 1.015 or 0.985 of the tokens, beside all and the 16.
    assert found.peak_bytes - 80 * 64 * 4 * 4 == pytest.approx(measured.peak_bytes, rel=0.02)


@pytest.mark.parametrize("in_cache", [True, False])
def test_gradients_of_the_loss_stay_as_they_are(in_cache: bool) -> None:
    """Those that a measurement leaves would be part of the first update."""
    model = paddle.nn.Sequential(encoder(1), Mean())
    loss = ContrastiveLoss(learnable_temperature=True)
    batch = (paddle.randn([4, 8, 32]), paddle.randn([4, 8, 32]))
    optimizer = paddle.optimizer.AdamW(parameters=[*model.parameters(), *loss.parameters()])
    how: dict[str, Any] = {"grad_cache": GradCache(model, loss, chunk_size=2)}
    if not in_cache:
        how = {"loss_fn": lambda m, b: loss(m(b[0]), m(b[1])), "optimizer": optimizer}
    estimate(model, batch, **how)
    assert all(one.grad is None for one in loss.parameters())
    loss(model(batch[0]), model(batch[1])).backward()
    for one in model.parameters():
        one.clear_gradient(False)
    with pytest.raises(PlanError, match="has a gradient; plan between two steps"):
        plan(model, batch, memory_budget="1GiB", **how)
    assert all(one.grad is not None for one in loss.parameters())


def refused_numbers(number: Any) -> list[Callable[[], Any]]:
    model, batch = paddle.nn.Linear(2, 2), paddle.ones([2, 2])
    return [
        lambda: estimate(model, batch, squared, batch_size=number, checkpoints=["*"]),
        lambda: find_batch_size(model, batch, squared, memory_budget=2**30, local_batch=number),
    ]


@pytest.mark.parametrize("given", [0, 1.5, True])
def test_numbers_that_are_none_are_refused(given: Any) -> None:
    for call, name in zip(refused_numbers(given), ("batch_size", "local_batch"), strict=True):
        with pytest.raises(ConfigError, match=f"{name}: "):
            call()


def measured_never(model: Any, batch: Any) -> Any:
    raise AssertionError("it was called")


def loss_of(returned: Callable[[Any], Any]) -> Callable[..., Any]:
    """Of one encoder: what `returned` makes of its mean."""
    return lambda model, batch: returned(model(batch).mean())


def wrapped(job: Job) -> Job:
    recompute_wrapper(job.model.layers[0])
    return job


def with_a_gradient(job: Job) -> Job:
    job.step()
    return job


def with_loss(loss_fn: Any) -> Callable[[Job], Job]:
    return lambda job: replace(job, loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (with_loss(loss_of(lambda loss: (loss,))), {}, "returned tuple"),
        (with_loss(loss_of(float)), {}, "returned float"),
        (with_loss(loss_of(lambda loss: loss.detach())), {}, "needs no gradient"),
        (with_loss(loss_of(lambda loss: loss.astype("int64"))), {}, "needs no gradient"),
        (with_loss(None), {}, "neither of loss_fn"),
        (wrapped, {}, "is recomputed already"),
        (with_a_gradient, {}, "has a gradient"),
        (lambda job: job, {"offload": "disk"}, "policy.*all"),
        *[
            (with_loss(measured_never), {"budget": budget}, "bytes")
            for budget in ("8 bananas", None, 0, math.nan)
        ],
    ],
)
def test_what_cannot_be_planned_is_refused(
    make: Callable[[Job], Job], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((PlanError, ConfigError), match=message):
        planned(make(job_of("encoder")), **{"budget": 2**40, **options})


def batch_size_of_rank(budgets: list[int], refused: int | None = None) -> Any:
    """What `find_batch_size` says on a rank; the first batch on rank `refused` fails its check."""
    job, rank = job_of("encoder"), dist.get_rank()
    with contextlib.ExitStack() as stack:
        if rank == refused:
            checks = {"wraps": find_batch._verified, "side_effect": [None, *[mock.DEFAULT] * 9]}
            stack.enter_context(mock.patch.object(find_batch, "_verified", **checks))
        try:
            found = find_batch_size(
                job.model, job.batch, job.loss_fn, memory_budget=budgets[rank], local_batch=8
            )
        except PlanError as error:
            return str(error)
        return found.rows, found.accumulate_steps, found.fastest_rows


def test_the_ranks_agree_on_the_rows() -> None:
    enough = 2**40
    one, other = run_ranks(batch_size_of_rank, 2, budgets=[enough, enough], refused=1)
    assert one == other and one[:2] == (4, 2)
    one, other = run_ranks(batch_size_of_rank, 2, budgets=[enough, 9])
    assert "another rank needs more" in one and "a batch of one row" in other
    assert "strategy.sharding: true" in other


def test_a_budget_that_is_too_small_is_refused() -> None:
    job = job_of("encoder")
    optimizer = paddle.optimizer.AdamW(parameters=job.model.parameters())
    with pytest.raises(PlanError, match=r"the smallest feasible budget is .*Its peak is") as error:
        planned(job, 1000, optimizer=optimizer)
    assert "smaller moments" in str(error.value) and "sharding" not in str(error.value)
    number = int(str(error.value).partition("(")[2].partition(" bytes")[0])
    found = planned(job, number + 4096, optimizer=optimizer)
    assert found.measured_bytes is not None
    assert "smallest feasible budget" in str(found)


@pytest.mark.parametrize("given", [{"keep": "layers.*"}, {"keep": None}, {"checkpoints": "*"}])
def test_patterns_are_read_as_apply_recompute_reads_them(given: Any) -> None:
    job = job_of("encoder")
    with pytest.raises(ConfigError) as refusal:
        RecomputeConfig(**given)
    with pytest.raises(ConfigError, match=re.escape(str(refusal.value))):
        plan(job.model, job.batch, job.loss_fn, memory_budget=2**30, **given)
    auto: Any = "auto"  # as in RecomputeConfig
    assert plan(
        job.model, job.batch, job.loss_fn, memory_budget=2**30, checkpoints=auto, verify=False
    ).checkpoints == ("auto",)


def test_what_blocks_keep_is_counted() -> None:
    """Of each block the outputs of its two linear layers."""
    job = job_of("encoder")
    config = RecomputeConfig(checkpoints=["layers.*"])
    peaks = [
        estimate(job.model, job.batch, squared, recompute=replace(config, keep=keep)).peak_bytes
        for keep in ([], ["layers.*.linear?"])
    ]
    kept = 4 * 8 * 16 * (4 * 32 + 32)
    assert 3 * kept <= peaks[1] - peaks[0] <= 4 * kept


def test_a_plan_is_kept_in_a_file(tmp_path: Path) -> None:
    found = planned(job_of("encoder"), 2**40)
    found.save(tmp_path / "plan.json")
    again = RecomputePlan.load(tmp_path / "plan.json")
    assert again == found and again.hash == found.hash
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanError, match="not a plan"):
        RecomputePlan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="another model"):
        again.apply(UNet())


def test_blocks_are_named_blocks_or_sublayers() -> None:
    """One with several names is a block that is called again; ``auto`` is the rule of elsewhere."""
    linear = paddle.nn.Linear(4, 4)
    batch = paddle.ones([2, 4])
    model = paddle.nn.Sequential(linear, paddle.nn.Linear(4, 4), linear)
    with pytest.raises(SelectionError, match="finds no repeated blocks"):
        estimate(model, batch, squared, checkpoints=["auto"])
    for checkpoints in (None, ["*"]):
        found = estimate(model, batch, squared, checkpoints=checkpoints)
        assert [call.layer for call in found.costs.calls] == ["0", "1", "0"]


def test_the_largest_micro_batch_is_found_and_verified() -> None:
    job = job_of("encoder")
    assert job.loss_fn is not None
    budget = 3 * estimate(job.model, job.batch, job.loss_fn).peak_bytes
    found = find_batch_size(job.model, job.batch, job.loss_fn, memory_budget=budget, local_batch=96)
    assert found.rows * found.accumulate_steps == 96
    assert found.plan.measured_bytes is not None and found.plan.measured_bytes <= budget
    assert found.rows > 24  # what fits without recompute
    assert "largest batch" in str(found)
    with pytest.raises(PlanError, match="a batch of one row"):
        find_batch_size(job.model, job.batch, job.loss_fn, memory_budget=9, local_batch=4)


class ByItsNumber(paddle.nn.Layer):
    """Its forward depends on its number, which its structure does not tell."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.small = paddle.nn.Linear(32, 32)
        self.large = paddle.nn.Sequential(
            paddle.nn.Linear(32, 256), paddle.nn.GELU(), paddle.nn.Linear(256, 32)
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + (self.small(x) if self.layer_idx % 2 else self.large(x))


def test_blocks_whose_number_decides_what_they_do_are_measured_apart() -> None:
    model = paddle.nn.Sequential(*[ByItsNumber(number) for number in range(4)])
    job = Job(
        model,
        paddle.randn([64, 32]),
        lambda m, x: m(x * 1.5).square().mean(),
        checkpoints=("0", "1", "2", "3"),
    )
    costs = measure_costs(job)
    predicted, measured = peaks(job, costs, uniform(costs, "plain"))
    assert abs(measured - predicted) <= EXACT


@pytest.mark.parametrize("is_used", [False, True])
def test_a_graph_over_blocks_that_is_dropped_takes_nothing_of_another_one(is_used: bool) -> None:
    """What the operators before both forwards saved is needed by the second one's backward."""
    paddle.seed(0)
    model, weight = encoder(), paddle.create_parameter([1], "float32")

    def monitored(m: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        h = paddle.tanh(x * weight)
        m(h)
        return m(h if is_used else x).square().mean()

    job = Job(model, paddle.randn([8, 16, 32]), monitored)
    costs = measure_costs(job)
    predicted, measured = peaks(job, costs, uniform(costs, "plain"))
    assert abs(predicted - measured) <= CLOSE * measured
    assert paddle.is_grad_enabled()


class Averaging(paddle.nn.Layer):
    """Assigns its buffer anew, and stores a loss where there was none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = paddle.nn.Linear(8, 8), paddle.nn.LayerNorm(8)
        self.register_buffer("mean", paddle.zeros([8]))
        self.loss: Any = None
        self.seen: Any = ()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = self.linear(x)
        self.mean = self.mean * 0.5 + y.detach().mean(0)
        self.loss, self.seen = y.square().mean(), (y,)
        return self.norm(x + paddle.tanh(y) + self.mean)


class Dropping(paddle.nn.Layer):
    """LayerDrop: hands its input on."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.up, self.down, self.drops = paddle.nn.Linear(8, 32), paddle.nn.Linear(32, 8), drops

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x if self.drops else x + self.down(paddle.tanh(self.up(x)))


def test_planning_leaves_no_trace() -> None:
    """In parameters, buffers, attributes, memory, and the random state."""
    paddle.seed(3)
    model = paddle.nn.Sequential(*[Averaging() for _ in range(3)], paddle.nn.BatchNorm1D(8))
    batch, random_state = paddle.randn([4, 8]), paddle.get_rng_state()
    first = paddle.randn([4]).numpy()
    paddle.set_rng_state(random_state)

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(batch).square().mean() + sum(one.loss for one in model[:3])

    before = {key: (value, value.numpy().copy()) for key, value in model.state_dict().items()}
    gc.collect()
    held = memory.current_bytes()
    plan(model, batch, loss_fn, memory_budget=2**30)
    gc.collect()
    assert memory.current_bytes() == held
    assert np.array_equal(paddle.randn([4]).numpy(), first)
    for key, value in model.state_dict().items():
        assert value is before[key][0] and np.array_equal(value.numpy(), before[key][1]), key
    assert all(p.grad is None for p in model.parameters())
    assert all((one.loss, one.seen) == (None, ()) for one in model[:3])


def test_a_block_that_returns_its_input_is_planned() -> None:
    model = paddle.nn.Sequential(*[Dropping(place % 2 == 0) for place in range(4)])
    batch = paddle.randn([64, 8])
    found = estimate(model, batch, squared)
    least = smallest(found.costs).peak
    made = plan(model, batch, squared, memory_budget=least)
    assert made.measured_bytes is not None
    assert made.measured_bytes <= least < found.peak_bytes


def out_of_memory(job: Job, plain: bool) -> Job:
    """The step raises MemoryError: always, or only where a block is plain."""

    def loss_fn(model: Any, batch: Any) -> Any:
        if not plain or not all(isinstance(one, RecomputeLayer) for one in model.layers):
            raise MemoryError("ResourceExhausted: out of memory")
        return squared(model, batch)

    return replace(job, loss_fn=loss_fn)


def test_a_recomputed_step_that_does_not_fit_the_device() -> None:
    with pytest.raises(PlanError, match=r"although every block is recomputed .*find_batch_size"):
        planned(out_of_memory(job_of("encoder"), plain=False), 2**40)


def test_a_step_with_plain_calls_that_does_not_fit_the_device() -> None:
    """The bytes that the second forwards took stand for those of plain calls, which verification
    corrects: the outputs of blocks, which others hold, are not in them.
    """
    wanted = costs_of("encoder")
    found = measure_costs(out_of_memory(job_of("encoder"), plain=True))
    predicted, measured = (simulate(one, ()).peak.bytes - one.base for one in (found, wanted))
    assert 0.8 * measured < predicted <= measured


def plan_of_rank(rows: list[int]) -> Any:
    """A plan on a rank whose loss sums over the ranks, and how often the step ran."""
    job, steps = job_of("encoder"), []

    def loss_fn(model: Any, batch: Any) -> Any:
        steps.append(batch)
        mean = model(batch).square().mean()
        dist.all_reduce(mean.detach())
        return mean

    job = replace(job, loss_fn=loss_fn, batch=paddle.randn([rows[dist.get_rank()], 16, 32]))
    costs = measure_costs(job)
    return len(steps), len(costs.calls)


def test_ranks_with_other_bytes_run_equally_many_steps() -> None:
    one, other = run_ranks(plan_of_rank, 2, rows=[4, 9])
    assert one == other and one[1] == 4


class SavesItsOutput(paddle.autograd.PyLayer):
    """Without a backward, Paddle never frees what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        (y,) = ctx.saved_tensor()
        return gradient * (1 - y.square())


class Saving(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(16, 16)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return SavesItsOutput.apply(self.linear(x))


@pytest.mark.parametrize("keeps_gradients", [True, False])
def test_a_py_layer_that_saves_its_output_is_gone_after_an_estimate(keeps_gradients: bool) -> None:
    model, x = paddle.nn.Sequential(Saving(), Saving()), paddle.randn([8, 16])
    gc.collect()  # what other tests have left
    before = memory.current_bytes()
    for _ in range(2):
        estimate(model, x, squared, checkpoints=["*"], keeps_gradients=keeps_gradients)
    assert memory.current_bytes() == before
    assert all(one.grad is None for one in model.parameters())
