"""Plans of real models: the bytes that they predict are measured, and the numbers stay the same."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_recompute import (
    ContrastiveLoss,
    GradCache,
    RecomputeConfig,
    RecomputePlan,
    TrainStep,
    apply_recompute,
    estimate,
    find_batch_size,
    plan,
)
from paddle_recompute._paddle import memory
from paddle_recompute.errors import ConfigError, PlanError, SelectionError
from paddle_recompute.planner import (
    JOINED,
    Choice,
    Job,
    StepCosts,
    make_plan,
    simulate,
    smallest,
    verified,
)
from paddle_recompute.planner.planning import measured_peak
from paddle_recompute.planner.policies import uniform
from paddle_recompute.planner.recompute_plan import RecomputePlan as Plan
from paddle_recompute.recompute import recompute_wrapper

pytestmark = pytest.mark.skipif(
    not memory.can_reset_peak(), reason="2.6 cannot start the peak anew; see test_solve"
)
CLOSE = 0.01
"""What operators beside the blocks saved, and rows that meet, are predicted so closely."""
EXACT = 64
"""Bytes: scalars of a loss."""
ABOVE = {"two towers": 0.03, "gradient cache": 0.03, "lstm": 0.08}
"""Predicted as an upper bound: two calls whose operators take turns; an LSTM, which keeps a copy of
its input.
"""


def encoder(layers: int = 4, width: int = 32) -> nn.Layer:
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="gelu")
    return nn.TransformerEncoder(block, layers)


class Whole(nn.Layer):
    """Does what `forward` does with the model and its inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.does = forward

    def forward(self, *inputs: Any) -> Any:
        return self.does(self, *inputs)


def two_towers() -> nn.Layer:
    """One encoder for both sides."""

    def forward(model: Any, query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        a, b = model.encoder(query).mean(axis=1), model.encoder(positive).mean(axis=1)
        return paddle.matmul(a, b, transpose_y=True).square().mean()

    return Whole(forward, encoder=encoder())


def u_net() -> nn.Layer:
    """Blocks whose outputs are used twice."""

    def block(a: int, b: int) -> nn.Layer:
        return nn.Sequential(nn.Conv2D(a, b, 3, padding=1), nn.BatchNorm2D(b), nn.ReLU())

    def forward(model: Any, x: paddle.Tensor) -> paddle.Tensor:
        f = nn.functional
        one = model.blocks[0](x)
        two = model.blocks[1](f.max_pool2d(one, 2))
        low = model.blocks[2](f.max_pool2d(two, 2))
        up = model.blocks[3](paddle.concat([f.interpolate(low, scale_factor=2), two], axis=1))
        return model.blocks[4](paddle.concat([f.interpolate(up, scale_factor=2), one], axis=1))

    sizes = [(3, 8), (8, 16), (16, 16), (32, 8), (16, 4)]
    return Whole(forward, blocks=nn.LayerList([block(a, b) for a, b in sizes]))


def job_of(name: str) -> Job:
    paddle.seed(0)
    if name == "gradient cache":
        model = nn.Sequential(encoder(), mean())
        cache = GradCache(model, ContrastiveLoss(temperature=0.1), chunk_size=4)
        batch = paddle.randn([16, 8, 32]), paddle.randn([16, 8, 32])
        return Job(model, batch, None, grad_cache=cache)
    if name == "two towers":
        batch = paddle.randn([8, 16, 32]), paddle.randn([8, 12, 32])
        return Job(two_towers(), batch, lambda m, pair: m(*pair))
    make, shape = {
        "encoder": (encoder, [8, 16, 32]),
        "one encoder twice": (encoder, [8, 16, 32]),
        "u-net": (u_net, [4, 3, 16, 16]),
        "lstm": (lambda: nn.Sequential(*[recurrent(24) for _ in range(4)]), [8, 12, 24]),
        "one mask": (one_mask, [64, 32, 32]),
    }[name]
    return Job(make(), paddle.randn(shape), twice if name == "one encoder twice" else squared)


def squared(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def twice(model: Any, batch: Any) -> Any:
    return squared(model, batch) + squared(model, batch * 2)


def recurrent(width: int) -> nn.Layer:
    return Whole(
        lambda block, x: block.norm(x + block.lstm(x)[0]),
        lstm=nn.LSTM(width, width),
        norm=nn.LayerNorm(width),
    )


def masked(number: int) -> nn.Layer:
    """Keeps its input, and of the mask only what it computes of it."""

    def forward(block: Any, x: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        scores = nn.functional.softmax(block.linear(x) + mask)
        return x + scores * nn.functional.dropout(x, 0.1)

    return Whole(forward, linear=nn.Linear(32, 32), layer_idx=number)


def one_mask() -> nn.Layer:
    """Blocks that get the same mask, made in the forward."""

    def forward(model: Any, x: paddle.Tensor) -> paddle.Tensor:
        mask = (x > 0).astype(x.dtype) * -1e4
        for block in model.blocks:
            x = block(x, mask)
        return x

    return Whole(forward, blocks=nn.LayerList([masked(number) for number in range(4)]))


def mean() -> nn.Layer:
    return Whole(lambda _, x: x.mean(axis=1))


JOBS = ("encoder", "two towers", "u-net", "lstm", "gradient cache")


@functools.cache
def costs_of(name: str) -> StepCosts:
    """Of `job_of`, measured once: a measurement leaves no trace, and every job is built alike."""
    return job_of(name).measure(only_bytes=True)


def make(costs: Any, choices: Any, job: Job) -> Plan:
    return Plan(2**40, costs, tuple(choices), job.signature())


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
    """The predicted one and the measured one, in bytes."""
    predicted = simulate(costs, choices).peak.bytes
    return predicted, measured_peak(job, make(costs, choices, job))


@pytest.mark.parametrize("name", JOBS)
def test_the_predicted_peak_is_the_measured_one(name: str) -> None:
    job = job_of(name)
    costs = costs_of(name)
    for option in costs.calls[0].options:
        predicted, measured = (
            one - costs.base for one in peaks(job, costs, uniform(costs, option))
        )
        slack = ABOVE.get(name, 0) * measured + EXACT
        assert -EXACT <= predicted - measured <= slack, option


@pytest.mark.parametrize("segments", [1, "auto"])
def test_the_policy_of_segments_is_predicted(segments: Any) -> None:
    job = job_of("encoder")
    config = RecomputeConfig(policy="segments", segments=segments)
    found = estimate(job.model, job.batch, job.loss_fn, recompute=config)
    report = apply_recompute(job.model, config)
    report.stop_watching()
    for _ in range(2):
        gc.collect()
        before = memory.current_bytes()
        memory.reset_peak()
        job.step()
        peak = memory.peak_bytes() - before
    assert abs(found.costs.base + peak - found.peak_bytes) <= EXACT


def gradients_of(job: Job, found: RecomputePlan | None, steps: int = 2) -> list[Any]:
    """Gradients and buffers after steps under a plan."""
    paddle.seed(7)
    if found is not None:
        found.apply(job.model)
    for _ in range(steps):
        job.step()
    gradients = [p.grad.numpy() for p in job.model.parameters() if p.grad is not None]
    buffers = [b.numpy() for b in job.model.buffers()]
    job.clear_gradients()
    RecomputePlan.remove(job.model)
    return gradients + buffers


@pytest.mark.parametrize("name", JOBS)
def test_a_plan_stays_within_its_budget_and_has_the_gradients_of_the_plain_step(name: str) -> None:
    job, costs = job_of(name), costs_of(name)
    high, low = (simulate(costs, uniform(costs, one)).peak.bytes for one in ("plain", "whole"))
    state = {key: value.numpy().copy() for key, value in job.model.state_dict().items()}
    plain = gradients_of(job, None)
    for part in (0.25, 0.6, 0.9):
        budget = int(low + (high - low) * part)
        found = verified(job, make_plan(costs, budget, signature="", checkpoints=job.checkpoints))
        assert found.measured_bytes is not None and found.measured_bytes <= budget
        assert found.extra_seconds >= 0
        job.model.set_state_dict(state)
        others = gradients_of(job, found)
        assert plain and len(plain) == len(others)
        assert all(np.array_equal(one, other) for one, other in zip(plain, others, strict=True))


MIXTURES = {
    "encoder": ("PJJJ", "JJPW"),
    "lstm": ("WPPW", "PJJW"),
    # The second pass has the addresses of the first.
    "gradient cache": ("PPWW", "WPPW", "PJJW", "JJWP"),
    # The mask stays, as some block keeps it; what each keeps of its input is its own.
    "one mask": ("PPPW", "WPPP", "PWWP", "JJPP", "WWWW"),
}
OPTION = {"P": "plain", "W": "whole", "J": JOINED}


@pytest.mark.parametrize("name", MIXTURES)
def test_neighbours_with_different_options_are_predicted(name: str) -> None:
    job = job_of(name)
    costs = costs_of(name)
    for mixture in MIXTURES[name]:
        choices = []
        for start in range(0, len(costs.calls), 4):
            for place, letter in enumerate(mixture):
                if letter == "J" and place and mixture[place - 1] == letter:
                    continue
                last = place + mixture.count(letter) - 1 if letter == "J" else place
                choices.append(Choice(start + place, start + last, OPTION[letter]))
        predicted, measured = (one - costs.base for one in peaks(job, costs, choices))
        # Up to 3.2 % too much was seen with the gradient cache: some multiples of 4 KiB, others in
        # each run. Why is not known.
        most = 2 * ABOVE.get(name, CLOSE)
        assert -0.5 * CLOSE * measured <= predicted - measured <= most * measured, mixture


@pytest.mark.parametrize("whole", [range(4), range(6), [3], [7], [0, 2, 3]])
def test_a_call_that_has_begun_holds_its_bytes_while_another_one_runs(whole: Sequence[int]) -> None:
    """The towers' backwards take turns: 7 and 3, 6 and 2, and so on."""
    job = job_of("two towers")
    costs = costs_of("two towers")
    assert [call.name for call in costs.calls[3:5]] == ["encoder.layers.3", "encoder.layers.0#2"]
    choices = [Choice(n, n, "whole" if n in whole else "plain") for n in range(8)]
    predicted, measured = peaks(job, costs, choices)
    assert 0 <= predicted - measured <= ABOVE["two towers"] * measured


@pytest.mark.parametrize("keeps", [None, False], ids=["the default", "set_to_zero=False"])
@pytest.mark.parametrize("name", ["encoder", "one encoder twice"])
def test_a_loop_of_ones_own_stays_within_the_budget(name: str, keeps: bool | None) -> None:
    """``optimizer.clear_grad()`` keeps the gradients, set to zero, if it is not told otherwise."""
    job = job_of(name)
    model, batch = job.model, job.batch
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    model.pooler = nn.Linear(64, 64)  # is never called, so it has no gradient
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
    model = nn.Sequential(nn.Linear(32, 32), encoder(), mean())
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    batch = paddle.randn([4, 8, 32])

    step = TrainStep(model, optimizer, loss_fn=squared, accumulate_steps=2)
    for _ in range(2):
        step([batch] * 2)
    job = Job(model, batch, squared, optimizer)
    costs = job.measure()
    assert all(p.grad is None for p in model.parameters())
    for option in ("plain", "whole"):
        found = make(costs, uniform(costs, option), job)
        found.apply(model)
        step([batch] * 2)
        gc.collect()
        memory.reset_peak()
        step([batch] * 2)
        measured = memory.peak_bytes()
        found.remove(model)
        assert measured == pytest.approx(found.peak_bytes, abs=1024), option
        assert measured_peak(job, found) == pytest.approx(found.peak_bytes, abs=1024), option


def in_batch() -> nn.Layer:
    """Blocks in which every row meets every other one."""

    def forward(block: Any, x: paddle.Tensor) -> paddle.Tensor:
        hidden = block.linear(x)
        scores = nn.functional.softmax(paddle.matmul(hidden, hidden, transpose_y=True))
        return x + paddle.matmul(scores, hidden)

    return nn.Sequential(*[Whole(forward, linear=nn.Linear(16, 16)) for _ in range(3)])


@pytest.mark.parametrize(
    ("make", "shape", "measured_rows"),
    [(encoder, [40, 16, 32], 8), (in_batch, [512, 16], 64)],
    ids=["encoder", "rows that meet"],
)
def test_a_larger_batch_is_estimated_from_small_ones(
    make: Any, shape: list[int], measured_rows: int
) -> None:
    model, (rows, *rest) = make(), shape
    found = estimate(model, paddle.randn([measured_rows, *rest]), squared, batch_size=rows)
    measured = estimate(model, paddle.randn(shape), squared)
    assert found.peak_bytes == pytest.approx(measured.peak_bytes, rel=CLOSE)


@pytest.mark.parametrize("in_cache", [True, False])
def test_gradients_of_the_loss_stay_as_they_are(in_cache: bool) -> None:
    """Those that a measurement leaves would be part of the first update."""
    model, loss = (
        nn.Sequential(encoder(1), mean()),
        ContrastiveLoss(learnable_temperature=True),
    )
    batch = paddle.randn([4, 8, 32]), paddle.randn([4, 8, 32])
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


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda loss: (loss,), "returns tuple"),
        (float, "returns float"),
        (lambda loss: loss.detach(), "needs no gradient"),
        (lambda loss: loss.astype("int64"), "needs no gradient"),
    ],
)
def test_a_loss_without_a_backward_is_refused(returned: Any, words: str) -> None:
    model, batch = encoder(1), paddle.randn([2, 4, 32])
    with pytest.raises(PlanError, match=words):
        estimate(model, batch, lambda model, batch: returned(model(batch).mean()))


def never(model: Any, batch: Any) -> Any:
    raise AssertionError("it was called")


@pytest.mark.parametrize("given", [0, -2, 1.5, "3", True])
def test_numbers_that_are_none_are_refused(given: Any) -> None:
    model, batch = nn.Linear(2, 2), paddle.ones([2, 2])
    with pytest.raises(ConfigError, match="batch_size: received"):
        estimate(model, batch, never, batch_size=given, checkpoints=["*"])
    with pytest.raises(ConfigError, match="local_batch: "):
        find_batch_size(model, batch, never, memory_budget=2**30, local_batch=given)


@pytest.mark.parametrize("budget", ["8 bananas", None, True, 0, -1, float("nan")])
def test_what_is_no_number_of_bytes_is_refused_before_anything_is_measured(budget: Any) -> None:
    model, batch = encoder(), paddle.ones([2, 4, 32])
    with pytest.raises(ConfigError, match=r"bytes"):
        plan(model, batch, never, memory_budget=budget)
    with pytest.raises(ConfigError, match=r"bytes"):
        find_batch_size(model, batch, never, memory_budget=budget, local_batch=4)


def test_the_largest_micro_batch_is_found_and_verified() -> None:
    job = job_of("encoder")
    assert job.loss_fn is not None
    budget = 3 * estimate(job.model, job.batch, job.loss_fn).peak_bytes
    found = find_batch_size(
        job.model, job.batch, job.loss_fn, memory_budget=budget, local_batch=192
    )
    assert found.rows * found.accumulate_steps == 192
    assert found.plan.measured_bytes is not None and found.plan.measured_bytes <= budget
    assert found.rows > 24  # what fits without recompute
    assert "largest batch" in str(found)
    with pytest.raises(PlanError, match="a batch of one row"):
        find_batch_size(job.model, job.batch, job.loss_fn, memory_budget=9, local_batch=4)


def test_a_plan_is_kept_in_a_file(tmp_path: Path) -> None:
    job = job_of("encoder")
    found = planned(job, 2**40)
    found.save(tmp_path / "plan.json")
    again = RecomputePlan.load(tmp_path / "plan.json")
    assert again == found and again.hash == found.hash
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanError, match="not a plan"):
        RecomputePlan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="another model"):
        again.apply(u_net())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("wrapped", "is recomputed already"),
        ("a gradient", "has a gradient"),
        ("no loss", "neither of loss_fn"),
        ("no budget", r"the smallest feasible budget is .*Its peak is"),
    ],
)
def test_what_cannot_be_planned_is_refused(what: str, message: str) -> None:
    job = job_of("encoder")
    if what == "wrapped":
        recompute_wrapper(job.model.layers[0])
    elif what == "a gradient":
        job.step()
    with pytest.raises((PlanError, ValueError), match=message):
        planned(
            replace(job, loss_fn=None) if what == "no loss" else job,
            1000 if what == "no budget" else 2**40,
        )


def test_inputs_off_the_device_are_refused_in_a_plan() -> None:
    job = job_of("encoder")
    for refused in (
        lambda: planned(job, 2**40, offload="disk"),
        lambda: RecomputeConfig(policy="budget", memory_budget=2**30, offload="disk"),
    ):
        with pytest.raises(ConfigError, match=r"policy.*all"):
            refused()


def test_auto_is_the_rule_of_elsewhere_and_without_it_sublayers_are_planned() -> None:
    model, batch = (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        paddle.ones([2, 4]),
    )

    with pytest.raises(SelectionError, match="finds no repeated blocks"):
        estimate(model, batch, squared, checkpoints=["auto"])
    for checkpoints in (None, ["*"]):
        found = estimate(model, batch, squared, checkpoints=checkpoints)
        assert [call.layer for call in found.costs.calls] == ["0", "1"]


def test_blocks_that_differ_in_their_number_alone_are_measured_once() -> None:
    costs = costs_of("one mask")
    # The input of the first one needs no gradient.
    assert [call.kind for call in costs.calls] == [0, 1, 1, 1]


def by_its_number(number: int) -> nn.Layer:
    """Its forward depends on its number, which its structure does not tell."""
    return Whole(
        lambda block, x: x + (block.small(x) if block.layer_idx % 2 else block.large(x)),
        layer_idx=number,
        small=nn.Linear(32, 32),
        large=nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)),
    )


def test_blocks_whose_number_decides_what_they_do_are_measured_apart() -> None:
    model = nn.Sequential(*[by_its_number(number) for number in range(4)])
    batch, blocks = paddle.randn([64, 32]), ("0", "1", "2", "3")
    job = Job(model, batch, lambda m, x: squared(m, x * 1.5), checkpoints=blocks)
    costs = job.measure(only_bytes=True)
    predicted, measured = peaks(job, costs, uniform(costs, "plain"))
    assert abs(measured - predicted) <= EXACT


@pytest.mark.parametrize("is_used", [False, True])
def test_a_graph_over_blocks_that_is_dropped_takes_nothing_of_another_one(is_used: bool) -> None:
    """What the operators before both forwards saved is needed by the second one's backward; it is
    counted to the end if it is not.
    """
    paddle.seed(0)
    model, weight = encoder(), paddle.create_parameter([1], "float32")

    def monitored(m: nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        h = paddle.tanh(x * weight)
        m(h)
        return m(h if is_used else x).square().mean()

    job = Job(model, paddle.randn([8, 16, 32]), monitored)
    costs = job.measure(only_bytes=True)
    predicted, measured = peaks(job, costs, uniform(costs, "plain"))
    assert -CLOSE * measured <= predicted - measured <= 2 * CLOSE * measured
    assert paddle.is_grad_enabled()


class Averaging(nn.Layer):
    """Assigns its buffer anew, and stores a loss where there was none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("mean", paddle.zeros([8]))
        self.loss: Any = None
        self.seen: Any = ()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = self.linear(x)
        self.mean = self.mean * 0.5 + y.detach().mean(0)
        self.loss, self.seen = y.square().mean(), (y,)
        return self.norm(x + paddle.tanh(y) + self.mean)


def test_planning_leaves_no_trace() -> None:
    model, batch = nn.Sequential(*[Averaging() for _ in range(3)]), paddle.randn([4, 8])
    buffers = [one.mean for one in model]

    def loss_fn(model: Any, batch: Any) -> Any:
        return squared(model, batch) + sum(one.loss for one in model)

    paddle.seed(3)
    drawn = paddle.randn([4]).numpy()
    paddle.seed(3)
    gc.collect()
    before = memory.current_bytes()
    plan(model, batch, loss_fn, memory_budget=2**30)
    gc.collect()
    assert memory.current_bytes() == before
    assert np.array_equal(paddle.randn([4]).numpy(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())
    for one, buffer in zip(model, buffers, strict=True):
        assert one.mean is buffer and not buffer.numpy().any()
        assert one.loss is None and one.seen == ()


def dropping(drops: bool) -> nn.Layer:
    """LayerDrop: hands its input on."""
    return Whole(
        lambda block, x: x if block.drops else x + block.down(paddle.tanh(block.up(x))),
        up=nn.Linear(8, 32),
        down=nn.Linear(32, 8),
        drops=drops,
    )


class Cache:
    """Keys of all calls so far, by block."""

    def __init__(self) -> None:
        self.keys: dict[int, Any] = {}

    def update(self, place: int, keys: paddle.Tensor) -> paddle.Tensor:
        before = self.keys.get(place)
        self.keys[place] = keys if before is None else paddle.concat([before, keys], 1)
        return self.keys[place]


def caching(place: int) -> nn.Layer:
    def forward(block: Any, x: paddle.Tensor, cache: Cache) -> paddle.Tensor:
        keys = cache.update(place, block.keys(x))
        scores = nn.functional.softmax(paddle.matmul(x, keys, transpose_y=True))
        return x + paddle.matmul(scores, keys)

    return Whole(forward, keys=nn.Linear(8, 8))


def with_a_cache() -> nn.Layer:
    def forward(model: Any, x: paddle.Tensor) -> paddle.Tensor:
        cache = Cache()
        for block in model.blocks:
            x = block(x, cache)
        return x

    return Whole(forward, blocks=nn.LayerList([caching(place) for place in range(3)]))


def with_one_block_often() -> nn.Layer:
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    return nn.Sequential(*[nn.Sequential(block, block) for _ in range(2)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(*[dropping(place % 2 == 0) for place in range(4)]),
        with_a_cache,
        with_one_block_often,
    ],
    ids=["a block that returns its input", "a cache of keys", "a block with several names"],
)
def test_rare_blocks_are_planned(make: Any) -> None:
    model, batch = make(), paddle.randn([64, 4, 8])
    found = estimate(model, batch, squared)
    least = smallest(found.costs).peak
    # A cache keeps what each forward puts there, and is measured with what was there before.
    budget = 2**30 if make is with_a_cache else least
    made = plan(model, batch, squared, memory_budget=budget)
    assert made.measured_bytes is not None
    assert made.measured_bytes <= budget and least <= found.peak_bytes
