"""Random models under `compile_model`: equal to eager execution, refused, or eager; none wrong."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddle_recompute import compile_model
from paddle_recompute.errors import StaticGraphError
from tests.fuzz.budget import examples, seed
from tests.planted_models import WIDTH, Counting, Hooked, Listing, RandomModel

SPEC = [paddle.static.InputSpec([-1, WIDTH], "float32")]
TOLERANCE = 1e-4
"""Of the largest gradient of a step. Kernels may differ (2.6), and a Program is allowed what moving
all numbers by a last bit makes; a deep chain with norms of few rows makes that large.
"""

ROUNDED_ZERO = 1e-6
"""A buffer holds means of numbers around 1; one that is 0 in exact arithmetic is rounding alone."""


@dataclass
class Step:
    rows: int
    times: int
    needs_gradient: bool
    clears: bool
    evaluates: bool
    change: str


def random_steps(choose: random.Random) -> list[Step]:
    """Batches of other sizes, other Python arguments, accumulation, changes of the model."""
    rows = choose.choice([3, 4])
    return [
        Step(
            rows=rows if choose.random() < 0.8 else choose.choice([2, 5]),
            times=2 if choose.random() < 0.15 else 1,
            needs_gradient=choose.random() < 0.1,
            clears=choose.random() < 0.6,
            evaluates=choose.random() < 0.15,
            change=choose.choice(["number", "hook", "sublayer"]) if choose.random() < 0.15 else "",
        )
        for _ in range(3)
    ]


def run(model: Any, steps: list[Step], seen: list[dict[str, Any]]) -> None:
    """Fill `seen`, one dict per step."""
    weights = paddle.arange(1.0, WIDTH + 1)
    optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
    hooked = [one for one in model.blocks if isinstance(one, Hooked)]
    for number, step in enumerate(steps):
        paddle.seed(number)
        np.random.seed(number)
        random.seed(number)
        if step.change == "number":
            for block in model.blocks:
                block.number = 2.5 + number
        elif step.change == "hook" and hooked:
            hooked[0].inner.register_forward_post_hook(lambda layer, inputs, output: output * 1.5)
        elif step.change == "sublayer" and hooked:
            hooked[0].inner = paddle.nn.Softmax()
        values = np.random.RandomState(number).randn(step.rows, WIDTH).astype("float32")
        x = paddle.to_tensor(values, stop_gradient=not step.needs_gradient)
        y = model(x, step.times)
        loss = (y * weights).square().mean() + model.notes()
        loss.backward()
        now: dict[str, Any] = {"output": y, "input": x, "loss": loss}
        now |= {f"gradient {n}": p.grad for n, p in model.named_parameters()}
        now |= {f"buffer {n}": b for n, b in model.named_buffers()}
        now["gradient of the input"] = x.grad
        now = {n: None if v is None else np.array(v.numpy()) for n, v in now.items()}
        now["calls"] = np.array([one.calls for one in model.blocks if isinstance(one, Counting)])
        now["seen"] = np.array([len(one.seen) for one in model.blocks if isinstance(one, Listing)])
        now["next random number"] = paddle.rand([1]).numpy()
        if step.clears:
            optimizer.step()
            optimizer.clear_grad(set_to_zero=bool(number % 2))
        if step.evaluates:
            model.eval()
            with paddle.no_grad():
                now["evaluated"] = model(paddle.to_tensor(values)).numpy()
            model.train()
        seen.append(now)


def first_difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    """What differs; "bits" if only by rounding, "" if nothing does."""
    rounding = ""
    for number, (now, then) in enumerate(zip(found, expected, strict=False)):
        if now.keys() != then.keys():
            return f"step {number}: {sorted(now.keys() ^ then.keys())}"
        arrays = [v for n, v in then.items() if n.startswith("gradient") and v is not None]
        largest = max((float(np.abs(one).max()) for one in arrays), default=1.0)
        for name, value in then.items():
            one, other = now[name], value
            if one is None and other is None:
                continue
            one = np.zeros_like(other) if one is None else one  # the branch that was not taken
            other = np.zeros_like(one) if other is None else other
            if np.array_equal(one, other, equal_nan=True):
                continue
            scale = max(largest if name.startswith("gradient") else 0.0, float(np.abs(other).max()))
            size = float(np.abs(one - other).max())
            noise = ROUNDED_ZERO if name.startswith("buffer") else 0.0
            if one.shape != other.shape or not size <= max(TOLERANCE * scale, noise):
                return f"step {number}: {name} differs by {size} of {scale}"
            rounding = "bits"
    return rounding


def outcome(index: int) -> str:
    """equal, rounding, refused, eager; anything else is a failure."""

    def made() -> tuple[Any, list[Step], bool]:
        paddle.seed(index)
        choose = random.Random(f"{seed()}-{index}")
        return RandomModel(choose, 2), random_steps(choose), choose.random() < 0.5

    model, steps, or_eager = made()
    expected: list[dict[str, Any]] = []
    try:
        run(model, steps, expected)
    except (RuntimeError, ValueError, TypeError, SystemError) as error:
        eager_error: BaseException | None = error
    else:
        eager_error = None
    model, steps, or_eager = made()
    found: list[dict[str, Any]] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            report = compile_model(model, SPEC, or_eager=or_eager)
            run(model, steps, found)
        except StaticGraphError:
            refused = "refused"
        except (RuntimeError, ValueError, TypeError, SystemError) as error:
            if type(error) is not type(eager_error):
                return f"foreign {type(error).__name__}: {str(error)[:300]}"
            refused = "an error of the model"
        else:
            is_eager = not report.compiled or any("in eager" in str(one.message) for one in warned)
            refused = "eager" if is_eager else ""
    difference = first_difference(found, expected)
    if refused == "refused" and or_eager:
        return "refused although it may be eager"
    if difference not in ("", "bits") or (not refused and len(found) != len(expected)):
        return f"WRONG {difference or len(found)} {model.description} {refused} {steps}"
    return refused or ("rounding" if difference else "equal")


def test_random_models() -> None:
    counts: Counter[str] = Counter()
    for index in range(examples(8)):
        counts[outcome(index)] += 1
        allowed = {"equal", "rounding", "refused", "eager", "an error of the model"}
        assert counts.keys() <= allowed, (index, counts)
    print(dict(counts))
    assert counts["equal"] + counts["rounding"] > 0
    assert counts["refused"] + counts["eager"] > 0
