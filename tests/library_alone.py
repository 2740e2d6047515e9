"""A user's environment with Paddle, numpy and safetensors alone: run by `make wheel-install-test`.

The application's packages cannot be imported here; nor can anything of the application.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

ABSENT = {"pydantic", "yaml", "click", "tqdm", "tokenizers", "bokeh", "jinja2"}


class Absent(MetaPathFinder):
    """Finds none of the packages of `ABSENT`, as if they were not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name.split(".")[0] in ABSENT or name.startswith("paddle_recompute.app."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())

import paddle  # noqa: E402

import paddle_recompute as pr  # noqa: E402
from paddle_recompute.errors import DependencyError  # noqa: E402

static_graph = pr.static_graph  # without an import of its own


def model_of() -> paddle.nn.Layer:
    return paddle.nn.Sequential(*[paddle.nn.Linear(8, 8) for _ in range(4)])


def mean_square(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def step_of(model: paddle.nn.Layer, **how: Any) -> pr.TrainStep:
    return pr.TrainStep(model, paddle.optimizer.AdamW(parameters=model.parameters()), **how)


def main() -> None:
    batch = paddle.randn([16, 8])
    layer = paddle.nn.Linear(8, 8)
    pr.recompute(layer, batch).sum().backward()
    assert layer.weight.grad is not None

    encoder = model_of()
    pr.apply_recompute(encoder, pr.RecomputeConfig(checkpoints=["*"]))
    cache = pr.GradCache(encoder, pr.ContrastiveLoss(0.1), chunk_size=4)
    assert step_of(encoder, grad_cache=cache)([(batch, batch + 0.1)]).loss > 0

    if not paddle.__version__.startswith("2.6"):
        found = pr.plan(
            model_of(), batch, mean_square, memory_budget="1GiB", checkpoints=["*"], verify=False
        )
        assert found.extra_seconds == 0

    chain = pr.OffloadSequential(model_of(), num_shards=2)
    assert mean_square(chain, batch).item() > 0

    static = static_graph.StaticConfig(recompute=pr.RecomputeConfig(checkpoints=["*"]))
    program = static_graph.StaticTrainStep(static, model_of, mean_square)
    assert program([batch]).loss > 0

    paddle.enable_static()
    main_program, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main_program, startup):
        x = paddle.static.data("x", [16, 8])
        model = model_of()
        pr.apply_recompute(model, pr.RecomputeConfig(checkpoints=["*"]))
        strategy = static_graph.distributed_strategy(static, model)
        static_graph.minimize(paddle.optimizer.SGD(0.1), mean_square(model, x), strategy)

    for name in ("load_config", "Trainer", "build_model"):
        try:
            getattr(pr, name)
        except (DependencyError, ModuleNotFoundError) as error:
            assert isinstance(error, DependencyError), error
            assert "pip install 'paddle-recompute[train]'" in str(error), error
        else:
            raise AssertionError(f"{name} needs the application's packages")


if __name__ == "__main__":
    main()
