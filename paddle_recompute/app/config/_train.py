"""``train``: the training loop, its checkpoints and its evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paddle_recompute.app.config._section import Broken, Section, Values
from paddle_recompute.app.config._types import Count, UserPath
from paddle_recompute.options import apart, needs


def _has_an_end(v: Values) -> Broken:
    if v["max_steps"] is None and v["num_epochs"] is None:
        yield "max_steps", "required if num_epochs is not given"


class TrainConfig(Section):
    """The training loop: length, learning rate, checkpoints, evaluation.

    Attributes:
        max_steps: Optimizer steps; None: `num_epochs` decides.
        num_epochs: Passes over the training pairs; with `max_steps`: whichever ends first.
        learning_rate: Peak learning rate of AdamW.
        scale_learning_rate_from: Global batch for which `learning_rate` was tuned; the rate is
            multiplied by global_batch / this value.
        warmup_steps: The rate grows in equal parts up to the highest one, which this step has; 0
            and 1: the first step has it.
        decay: Linear, cosine: down to 0 one step after the last; constant: no decay.
        weight_decay: Of AdamW; biases and LayerNorm parameters have none.
        clip_grad_norm: Largest global norm of the gradient; a larger gradient is scaled down to it.
        seed: Of the initial weights, the split, the data order and dropout.
        output_dir: Folder for checkpoints, metrics and report.
        log_to: Boards that get the metrics too; each needs the extra of its name.
        log_every: Optimizer steps between metrics records.
        on_oom: When a step runs out of memory; replan, with recompute.policy: budget in dygraph:
            reserve 5 % more and plan again; one process repeats the step, several ranks end and go
            on with that plan when they are started again; stop: end the run.
        save_every: Optimizer steps between checkpoints; None: one checkpoint, at the end.
        keep: Checkpoints that stay, the newest ones.
        resume: True: continue from the newest checkpoint in output_dir/checkpoint; every rank must
            be able to read it; auto: the same, and start anew where there is none; False: start
            anew, and refuse a folder with a run in it.
        overwrite: True: remove the run in `output_dir`, when the new one begins to train, instead
            of going on with it or refusing the folder.
        measure: True: before training, measure the memory of the largest step, so that a step that
            does not fit is refused at once; auto: on a GPU only; False: do not. A resumed run keeps
            its figures.
        measure_plain: True: with `measure`, also that of a step without recompute, to report what
            is saved; False: do not, for example because that step does not fit and the
            system would kill the process (CPU).
        compile: to_static: the model runs as a Program of paddle.jit.to_static, with recompute in
            it; auto: the same, or eager execution with a line that says why.
        verify: True: each Program (`compile`, mode: static) is compared with eager execution in
            steps 1, 10, 100 and 1,000, and with each new shape, which costs one step of each;
            False: Paddle's conversion is trusted, and may be silently wrong.
        eval_every: Optimizer steps between evaluations on the held-out pairs, the last step
            included; the best checkpoint is kept in output_dir/best; None: evaluation at the end.
        best_metric: The metric that the best checkpoint has the highest value of.
        patience: Evaluations in a row without a higher `best_metric` that end the run.
        eval_batch: Texts encoded at once in evaluation, per rank.
        eval_before: True: the model is evaluated before training, too; with `eval_every` step 0
            may be the best.
    """

    rules = (
        _has_an_end,
        *needs("eval_every", "patience", "best_metric"),
        *apart("resume=true", "overwrite", because="it removes the run to go on with"),
    )

    max_steps: Count | None = None
    num_epochs: Count | None = None
    learning_rate: float = Field(gt=0, description="peak learning rate of AdamW")
    scale_learning_rate_from: Count | None = None
    warmup_steps: int = Field(0, ge=0, le=2**31 - 1)
    decay: Literal["linear", "cosine", "constant"] = "linear"
    weight_decay: float = Field(0.01, ge=0)
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    seed: int = Field(0, ge=0, lt=2**31)
    output_dir: UserPath = Path("outputs")
    log_to: list[Literal["visualdl", "tensorboard", "wandb"]] = Field(default_factory=list)
    log_every: Count = 10
    on_oom: Literal["stop", "replan"] = "stop"
    save_every: Count | None = None
    keep: Count = 2
    resume: bool | Literal["auto"] = False
    overwrite: bool = False
    measure: bool | Literal["auto"] = "auto"
    measure_plain: bool = True
    compile: Literal["none", "to_static", "auto"] = "none"
    verify: bool = True
    eval_every: Count | None = None
    best_metric: Literal[
        "recall@1", "recall@10", "precision@1", "precision@10", "ndcg@10", "map", "mrr"
    ] = "mrr"
    patience: Count | None = None
    eval_batch: Count = 256
    eval_before: bool = True
