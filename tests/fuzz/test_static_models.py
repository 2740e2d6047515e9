"""Random models train with `StaticTrainStep` as in dygraph, or are refused; none is wrong.

FUZZ_PROGRAMS=2000 FUZZ_SEED=0 python -m pytest tests/fuzz/test_static_models.py -s
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.app.config import Config
from paddle_recompute.errors import PaddleRecomputeError
from paddle_recompute.static_graph import StaticTrainStep
from tests.fuzz import budget
from tests.planted_models import WIDTH, RandomModel
from tests.static_graph.test_train_step import arrays_of, config_of, moments_of
from tests.static_graph.test_train_step import in_dygraph as trains_in_dygraph

STEPS = 3
# AdamW divides by the root of the second moment, which makes a step of the rounding in a gradient
# that is zero; then the next loss and the next gradients are those of other parameters.
LOSS, MOMENT, OF_LARGEST = 1e-3, 1e-2, 1e-3
LEAST_EQUAL = 0.2
"""The share of models that must train; most have a block that a Program is refused for, and fewer
would mean that little is compared. Of seeds 0 to 1999, 0.23 do.
"""
Trained = tuple[list[float], dict[str, np.ndarray]]


def config(number: int) -> Config:
    choose = random.Random(number)
    overrides = [] if choose.random() < 0.7 else ["train.clip_grad_norm=0.5"]
    if choose.random() < 0.3:
        overrides += ["strategy.gradient_merge=true", "strategy.gradient_merge_configs.k_steps=2"]
    recompute = choose.random() < 0.3
    return config_of("recompute.checkpoints=['blocks.*']", *overrides, recompute=recompute)


def batches(number: int, settings: Config) -> list[list[dict[str, Any]]]:
    numbers = np.random.RandomState(number)
    k_steps = settings.strategy.gradient_merge_configs.k_steps
    return [
        [
            {"x": numbers.standard_normal([4, WIDTH]).astype("float32"), "factor": 1.5}
            for _ in range(k_steps)
        ]
        for _ in range(STEPS)
    ]


def drawn(number: int) -> RandomModel:
    return RandomModel(random.Random(number), 4)


def model_of(number: int) -> RandomModel:
    paddle.seed(number)
    return drawn(number)


def loss_of(model: Any, batch: dict[str, Any]) -> Any:
    """A mean over the rows, with an auxiliary loss that a block may have kept."""
    loss = (model(batch["x"], batch["factor"]) - batch["x"].sum(axis=1, keepdim=True)).square()
    return loss.mean() + model.notes()


def compared_part(model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, np.ndarray]:
    """The first moments, and the statistics of norms."""
    buffers = {k: v for k, v in model.items() if k.endswith(("mean", "_variance"))}
    return buffers | {k: v for k, v in optimizer.items() if k.endswith("moment1")}


def in_a_program(number: int) -> Trained:
    settings = config(number)
    step = StaticTrainStep(settings, lambda: drawn(number), loss_of, model=model_of(number))
    paddle.seed(number)
    losses = [step(micro_batches).loss for micro_batches in batches(number, settings)]
    state = step.state_dict()
    return losses, compared_part(state["model"], state["optimizer"])


def in_dygraph(number: int, *, moved: bool = False) -> Trained:
    settings = config(number)
    model = model_of(number)
    if moved:
        with paddle.no_grad():
            for one in model.parameters():
                one.set_value(one * (1 + 2.0**-23))
    optimizer, step = trains_in_dygraph(settings, model, loss_fn=loss_of)
    paddle.seed(number)
    losses = []
    for micro_batches in batches(number, settings):
        tensors = [{**one, "x": paddle.to_tensor(one["x"])} for one in micro_batches]
        losses.append(step(tensors).loss)
    return losses, compared_part(arrays_of(model), moments_of(model, optimizer))


def difference(one: Trained, other: Trained) -> str | None:
    """Where two runs differ by more than the tolerance, in words."""
    if not np.allclose(one[0], other[0], rtol=LOSS, atol=1e-6, equal_nan=True):
        return f"losses {one[0]} and {other[0]}"
    largest = max(float(np.abs(array).max()) for array in other[1].values())
    for name, array in other[1].items():
        theirs = one[1].get(name, np.zeros_like(array))  # without a gradient there is no moment
        bound = MOMENT * float(np.abs(array).max()) + OF_LARGEST * largest
        if not np.abs(theirs - array).max() <= bound and np.isfinite(array).all():
            return f"{name}: {np.abs(theirs - array).max():.1e} above {bound:.1e}"
    return None


def check(number: int) -> tuple[str, str | None]:
    """What became of program `number`, and what is wrong with it, if anything."""
    try:
        expected = in_dygraph(number)
    except Exception as error:
        return f"dygraph fails: {type(error).__name__}", None
    finally:
        paddle.disable_static()
    try:
        found = in_a_program(number)
    except PaddleRecomputeError:
        return "refused", None
    except Exception as error:
        return "foreign", f"{type(error).__name__}: {error}\n    {drawn(number).description}"
    finally:
        paddle.disable_static()
    fault = difference(found, expected)
    if fault is None:
        return "equal", None
    if difference(in_dygraph(number, moved=True), expected) is not None:
        return "dygraph is unstable", None
    return "wrong", f"{fault}\n    {drawn(number).description}"


@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore")
def test_random_models(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    found = budget.every_number(check, 8)
    assert found["equal"] > LEAST_EQUAL * found.total() and found["refused"]
