"""``offload="ranks"``: each shard lives with one rank; the bits are those of the plain chain."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import ContrastiveLoss, GradCache, GradientSync, OffloadSequential, TrainStep
from paddle_recompute._paddle import memory
from paddle_recompute.errors import ConfigError, DataError, OffloadError, RecomputeError
from tests.bits import assert_same_bits, values_of
from tests.distributed.mortal_ranks import MortalRanks, results_of
from tests.fake_device import selected
from tests.offload.chains import (
    WIDTH,
    adamw,
    batch,
    cross_entropy,
    encoder_layers,
    optimizer_of,
    train,
)
from tests.ranks import run_ranks

on_cpu = pytest.mark.skipif(
    selected.is_selected(),
    reason="there are two simulated devices; they compare no labels, and free buffers later",
)
OPTIMIZERS = {
    "adamw": adamw,
    "momentum": lambda parameters: paddle.optimizer.Momentum(0.1, parameters=parameters),
}


def chain(offload: str = "ranks", layers: Any = None, **options: Any) -> Any:
    """A chain of five Layers; ``"plain"``: not offloaded."""
    layers = encoder_layers() if layers is None else layers
    if offload == "plain":
        return paddle.nn.Sequential(*layers)
    return OffloadSequential(layers, **{"num_shards": 5, "offload": offload, **options})


def _train(offload: str, optimizer: str = "adamw", options: Any = None, **how: Any) -> Any:
    return train(chain(offload, **(options or {})), make=OPTIMIZERS[optimizer], **how)


class _Encoder(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense = paddle.nn.LayerNorm(WIDTH), paddle.nn.Linear(WIDTH, WIDTH)
        self.dropout = paddle.nn.Dropout(0.1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.dropout(paddle.nn.functional.gelu(self.dense(self.norm(x))))


def encoders(number: int = 4) -> list[paddle.nn.Layer]:
    paddle.seed(3)
    return [_Encoder() for _ in range(number)]


def _told(step: TrainStep, number: int, rows: int, sides: int = 1) -> tuple[float, float]:
    """Loss and norm of a step of so many rows, which each rank draws for itself."""
    rank = dist.get_rank()
    rng = np.random.default_rng([number, rank])
    inputs = tuple(paddle.to_tensor(rng.random([rows, WIDTH], "float32")) for _ in range(sides))
    paddle.seed(10 * number + rank)
    result = step([inputs if sides > 1 else inputs[0]])
    return result.loss, result.grad_norm


def _cached(offload: str) -> Any:
    """In chunks of two."""
    model = chain(offload, encoders(), num_shards=4)
    cache = GradCache(model, ContrastiveLoss(temperature=0.1), chunk_size=2)
    step = TrainStep(model, optimizer_of(model), grad_cache=cache, clip_grad_norm=0.5)
    told = [_told(step, number, rows=6, sides=2) for number in range(3)]
    return values_of(model), told


def _called_often(offload: str) -> Any:
    """Steps that call the chain on its own output: more often than before is late."""
    often = [1, 1, 2, 1, 3]
    model, calls = chain(offload, encoders(), num_shards=4), iter(often)

    def loss(model: Any, x: paddle.Tensor) -> Any:
        for _ in range(next(calls)):
            x = model(x)
        return x.square().mean()

    step = TrainStep(model, optimizer_of(model), loss_fn=loss, clip_grad_norm=0.5)
    told = [_told(step, number, rows=6) for number in range(len(often))]
    return values_of(model), told


OF_THE_CHAIN = (
    {"prefetch": 0},
    {"prefetch": 2},
    {"checkpoint_activations": False},
    {"num_shards": 2},
)
SAME: dict[str, tuple[Any, str, dict[str, Any]]] = {
    **{
        f"{name}, {number} micro-batches": (
            _train,
            "plain",
            {"optimizer": name, "accumulate": number},
        )
        for name, number in (("adamw", 2), ("momentum", 1))
    },
    **{str(options): (_train, "plain", {"options": options}) for options in OF_THE_CHAIN},
    "gradient cache": (_cached, "plain", {}),
    "what comes late": (_called_often, "host", {}),
}
"""What runs, the chain that has the same bits, and the arguments of both."""


def _both(run: Any, other: str, **arguments: Any) -> list[Any]:
    """What `run` gives on this rank, in the way of another chain and by ``offload="ranks"``."""
    return [run(way, **arguments) for way in (other, "ranks")]


@pytest.mark.parametrize("name", SAME)
def test_two_ranks_have_the_bits_of_the_plain_chain(name: str) -> None:
    run, other, arguments = SAME[name]
    ranks = run_ranks(_both, 2, run=run, other=other, **arguments)
    assert_same_bits(*zip(*ranks, strict=True))


def _resumed(offload: str, state: Any = None, first: int = 0, last: int = 2) -> Any:
    """The state after the steps up to `last`, each of the same rows on all ranks."""
    model = chain(offload)
    step = TrainStep(model, optimizer_of(model), loss_fn=cross_entropy, clip_grad_norm=0.5)
    model.eval()  # each rank would draw dropout masks of its own
    if state is not None:
        weights, moments = state
        model.set_state_dict({name: paddle.to_tensor(one) for name, one in weights.items()})
        step.set_state_dict({"optimizer": moments})
        again = step.state_dict()["optimizer"]
        assert_same_bits(*({k: np.asarray(s[k]) for k in sorted(s)} for s in (moments, again)))
    for number in range(first, last):
        step([batch(number, 0)])
    kept = step.state_dict(keep=dist.get_rank() == 0)["optimizer"]
    moments = {name: np.asarray(kept[name]) for name in sorted(kept)}
    return values_of(model), moments


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    """After two steps; two ranks with the same rows have the mean of twice the same gradient."""
    return {
        "plain": _resumed("plain"),
        "one": _resumed("ranks"),
        "two": run_ranks(_resumed, 2, offload="ranks")[0],
    }


@on_cpu
def test_a_state_goes_on_with_any_number_of_ranks_and_without(states: dict[str, Any]) -> None:
    assert_same_bits(states["plain"], states["one"])
    assert_same_bits(states["plain"], states["two"])
    weights, moments = _resumed("plain", state=states["two"], **GOES_ON)
    for source in ("plain", "two"):
        found = run_ranks(_resumed, 2, offload="ranks", state=states[source], **GOES_ON)
        assert_same_bits((weights, moments), found[0])
        assert found[1][1] == {}  # keep=False


GOES_ON = {"first": 2, "last": 4}


def _on_three(states: dict[str, Any]) -> dict[str, Any]:
    return {
        "bytes": _bytes(),
        "host": _train("host", steps=2),
        "ranks": _train("ranks", steps=2),
        "resumed on the host": _resumed("host", state=states["plain"], **GOES_ON),
        "resumed": _resumed("ranks", state=states["two"], **GOES_ON),
    }


@pytest.fixture(scope="module")
def three_ranks(states: dict[str, Any]) -> list[dict[str, Any]]:
    """One start of three ranks for all that is asked of them."""
    return run_ranks(_on_three, 3, states=states)


@on_cpu
def test_three_ranks_have_the_bits_of_a_chain_on_the_host(
    three_ranks: list[dict[str, Any]],
) -> None:
    """The plain chain sums three ranks up in other buffers, so in another order."""
    assert_same_bits([one["host"] for one in three_ranks], [one["ranks"] for one in three_ranks])
    assert_same_bits(three_ranks[0]["resumed on the host"], three_ranks[0]["resumed"])


STRIDES = "FLAGS_use_stride_kernel"


def _without_strides() -> dict[str, Any]:
    assert paddle.get_flags(STRIDES)[STRIDES]
    paddle.set_flags({STRIDES: False})
    return {"bytes": _bytes(), "plain": _train("plain"), "ranks": _train("ranks")}


@pytest.fixture(scope="module")
def without_strides() -> list[dict[str, Any]]:
    """Two ranks where slices are no views, as ``train`` starts ranks on CPUs."""
    return run_ranks(_without_strides, 2, fresh=True)


def test_the_bits_do_not_depend_on_whether_slices_are_views(
    without_strides: list[dict[str, Any]],
) -> None:
    """It trained zeros where they are none; in the other tests here they are."""
    plain, ranks = ([one[way] for one in without_strides] for way in ("plain", "ranks"))
    assert_same_bits(plain, ranks)


BLOCKS, SIDE = 8, 200


def _bytes() -> tuple[int, int | None] | None:
    """Between two steps, and the peak of the third, where they can be measured."""
    if not memory.is_counted():
        return None
    before = memory.current_bytes()
    model = chain("ranks", [paddle.nn.Linear(SIDE, SIDE) for _ in range(BLOCKS)], num_shards=BLOCKS)
    step = TrainStep(model, optimizer_of(model), loss_fn=lambda m, x: m(x).square().mean())
    for _ in range(2):
        step([paddle.ones([1, SIDE])])
    held = memory.current_bytes() - before
    if not memory.can_reset_peak():
        return held, None
    memory.reset_peak()
    step([paddle.ones([1, SIDE])])
    return held, memory.peak_bytes() - before


@on_cpu
@pytest.mark.parametrize("ranks", ["without_strides", "three_ranks"])
def test_the_bytes_of_a_rank_follow_the_formula(ranks: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(ranks)
    if not memory.is_counted():
        pytest.skip("this Paddle counts no bytes here")
    shard = 4 * SIDE * (SIDE + 1)
    own = -(-BLOCKS // len(found)) * shard  # of the rank with most shards
    for held, peak in (one["bytes"] for one in found):
        assert held <= 1.02 * 3 * own
        assert peak is None or peak <= 1.02 * (4 * own + 2 * shard)


def _resources() -> tuple[int, int]:
    """Threads of the system and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _made_and_dropped() -> list[tuple[int, int]]:
    """`_resources` after 4 and after 8 times two chains, of which one has made a step."""
    counts = []
    for number in range(8):
        towers = [chain("ranks", encoders(), num_shards=4) for _ in range(2)]
        x = paddle.ones([2, WIDTH])
        step = TrainStep(
            towers[0],
            towers[0].optimizer(adamw),
            loss_fn=lambda model, x: model(x).square().mean(),
        )
        step([x])
        with paddle.no_grad():
            towers[1](x)
        del towers, step
        gc.collect()
        if number % 4 == 3:
            counts.append(_resources())
    return counts


def test_chains_and_steps_that_are_gone_leave_no_threads_and_descriptors() -> None:
    """All chains share some lanes, which the first ones have made."""
    for middle, end in run_ranks(_made_and_dropped, 2):
        assert end[0] <= middle[0]
        assert end[1] <= middle[1]


def _refused() -> None:
    model = chain("ranks")
    with pytest.raises(OffloadError, match="resident"), model.resident():
        pass
    with pytest.raises(OffloadError, match="not synchronized"):
        optimizer = model.optimizer(adamw)
        cross_entropy(model, batch(0, 0)).backward()
        optimizer.step()
    with pytest.raises(OffloadError, match="cannot be read"):
        _ = model[1].linear1.weight.grad
    with pytest.raises(OffloadError, match=r"TrainStep\.state_dict"):
        optimizer.state_dict()
    sync = GradientSync(model)
    with sync.last_backward():
        cross_entropy(model, batch(0, 0)).backward()
    optimizer.step()
    with pytest.raises(OffloadError, match="clear_grad"):
        model(batch(0, 0)[0])
    optimizer.clear_grad()
    model(batch(0, 0)[0])
    old = cross_entropy(model, batch(0, 0))
    with sync.last_backward():
        cross_entropy(model, batch(0, 0)).backward()
    optimizer.step()
    optimizer.clear_grad()
    with pytest.raises(RecomputeError, match=r"(?s)changed.*shard 4 of 5"):  # on both
        old.backward()
    with pytest.raises(ConfigError, match="num_shards is 1"):
        chain("ranks", num_shards=1)


def test_what_is_not_supported_is_refused() -> None:
    run_ranks(_refused, 2)


def _different() -> None:
    model = chain("ranks")
    if dist.get_rank() == 0:
        model[1].linear1.weight.numpy()
    else:
        model(batch(0, 0)[0])


@on_cpu
def test_ranks_that_do_different_things_get_an_error() -> None:
    with MortalRanks(_different) as ranks:
        for rank in (0, 1):
            code, output = ranks.end_of(rank, within=60)
            assert code != 0 and "SyncError: the ranks are not in the same place" in output, output


def _other_numbers_of_chunks() -> None:
    model = OffloadSequential(encoders(), num_shards=4, offload="ranks")
    cache = GradCache(model, ContrastiveLoss(0.1), chunk_size=2)
    step = TrainStep(model, model.optimizer(adamw), grad_cache=cache)
    rows = paddle.randn([4 + 2 * dist.get_rank(), WIDTH])
    with pytest.raises(DataError, match=r"from 4 to 6; with offload='ranks'"):
        step([(rows, rows)])


def test_other_numbers_of_chunks_on_the_ranks_are_named() -> None:
    results_of(_other_numbers_of_chunks)
