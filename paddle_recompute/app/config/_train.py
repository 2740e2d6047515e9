"""``train``: the training loop, its checkpoints and its evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paddle_recompute.app.config._section import Section, Values
from paddle_recompute.app.config._types import Count, UserPath
from paddle_recompute.options import Fault


class TrainConfig(Section):
    """The training loop: length, learning rate, checkpoints, evaluation."""

    @staticmethod
    def _has_an_end(v: Values) -> Iterator[Fault]:
        if v["max_steps"] is None and v["num_epochs"] is None:
            yield Fault("max_steps", None, "required if num_epochs is not given")

    @staticmethod
    def _removes_or_goes_on(v: Values) -> Iterator[Fault]:
        if v["overwrite"] and v["resume"] is True:
            yield Fault(
                "overwrite",
                True,
                "removes the run that train.resume: true goes on with; remove one of them",
            )

    @staticmethod
    def _watches_what_is_evaluated(v: Values) -> Iterator[Fault]:
        for name in ("patience", "best_metric"):
            default = TrainConfig.model_fields[name].default
            if v["eval_every"] is None and v[name] != default:
                yield Fault(name, v[name], "has no effect without eval_every; set it")

    rules = (_has_an_end, _removes_or_goes_on, _watches_what_is_evaluated)

    max_steps: Count | None = Field(None, description="optimizer steps; none: num_epochs decides")
    num_epochs: Count | None = Field(
        None, description="passes over the training pairs; with max_steps: whichever ends first"
    )
    learning_rate: float = Field(gt=0, description="peak learning rate of AdamW")
    scale_learning_rate_from: Count | None = Field(
        None,
        description="global batch for which learning_rate was tuned; the rate is multiplied by "
        "global_batch / this value; none: no scaling",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        0,
        description="the rate grows in equal parts up to the highest one, which this step has; 0 "
        "and 1: the first step has it",
    )
    decay: Literal["linear", "cosine", "constant"] = Field(
        "linear",
        description="linear, cosine: down to 0 one step after the last; constant: no decay",
    )
    weight_decay: float = Field(
        0.01, ge=0, description="weight decay of AdamW; biases and LayerNorm parameters have none"
    )
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="largest global norm of the gradient; a larger gradient is scaled down to "
        "it; none: no clipping",
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="seed of the initial weights, the split, the data order and dropout"
    )
    output_dir: UserPath = Field(
        Path("outputs"), description="folder for checkpoints, metrics and report"
    )
    log_to: list[Literal["visualdl", "tensorboard", "wandb"]] = Field(
        default_factory=list,
        description="boards that get the metrics too; each needs the extra of its name",
    )
    log_every: Count = Field(10, description="optimizer steps between metrics records")
    on_oom: Literal["stop", "replan"] = Field(
        "stop",
        description="when a step runs out of memory; replan, with recompute.policy: budget in "
        "dygraph: reserve 5 % more and plan again; one process repeats the step, several ranks end "
        "and go on with that plan when they are started again; stop: end the run",
    )
    save_every: Count | None = Field(
        None, description="optimizer steps between checkpoints; none: one checkpoint, at the end"
    )
    keep: Count = Field(2, description="checkpoints that stay, the newest ones")
    resume: bool | Literal["auto"] = Field(
        False,
        description="true: continue from the newest checkpoint in output_dir/checkpoint; every "
        "rank must be able to read it; auto: the same, and start anew where there is none; false: "
        "start anew, and refuse a folder with a run in it",
    )
    overwrite: bool = Field(
        False,
        description="true: remove the run in output_dir, when the new one begins to train, instead "
        "of going on with it or refusing the folder",
    )
    measure_plain: bool = Field(
        True,
        description="true: before training, measure the memory of a step without recompute, to "
        "report what is saved; false: do not, for example because that step does not fit and "
        "the system would kill the process (CPU)",
    )
    compile: Literal["none", "to_static", "auto"] = Field(
        "none",
        description="to_static: the model runs as a Program of paddle.jit.to_static, with "
        "recompute in it; auto: the same, or eager execution with a line that says why; none: "
        "eager execution",
    )
    verify: bool = Field(
        True,
        description="true: each Program (train.compile, mode: static) is compared with eager "
        "execution in steps 1, 10, 100 and 1,000, and with each new shape, which costs one step of "
        "each; false: Paddle's conversion is trusted, and may be wrong without a word",
    )
    eval_every: Count | None = Field(
        None,
        description="optimizer steps between evaluations on the held-out pairs, the last step "
        "included; the best checkpoint is kept in output_dir/best; none: evaluation at the end",
    )
    best_metric: Literal[
        "recall@1", "recall@10", "precision@1", "precision@10", "ndcg@10", "map", "mrr"
    ] = Field("mrr", description="the metric that the best checkpoint has the highest value of")
    patience: Count | None = Field(
        None,
        description="evaluations in a row without a higher best_metric that end the run; none: it "
        "trains to its end",
    )
    eval_batch: Count = Field(256, description="texts encoded at once in evaluation, per rank")
    eval_before: bool = Field(True, description="true: the untrained model is evaluated too")
