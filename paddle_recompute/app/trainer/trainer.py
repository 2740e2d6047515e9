"""Train an encoder from a configuration, and write its checkpoint, metrics and report.

Every rank runs the same `Trainer`; only rank 0 writes files and prints. Meanwhile the other ranks
wait in `distributed.barrier`, not in a collective, which gloo ends after 30 s.

A step is a function of (seed, step, rank) and of the parameters and moments before it. The data
order depends on seed and epoch; dropout masks are drawn after ``paddle.seed`` of the three; the
learning rate depends on the step. So a checkpoint needs no random state, and a resumed run repeats
the bits of an uninterrupted one. (The masks also depend on the chunks; measured chunks are
therefore saved in the checkpoint.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import paddle

from paddle_recompute._run_folder import BEST, EVENTS, METRICS, PLAN, REPORT, begin_anew
from paddle_recompute.app.config import Config, schedule_of
from paddle_recompute.app.data import PairLoader, PreparedData, loader_for, prepare_data
from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.launch import styled
from paddle_recompute.app.report import Journal, require_bokeh, retrieval_table, write_report
from paddle_recompute.app.retrieval import encode_batches, retrieval_metrics
from paddle_recompute.app.trainer.boards import boards
from paddle_recompute.app.trainer.build import build_step, check_mode, compile_as_configured
from paddle_recompute.app.trainer.callbacks import (
    SaveCheckpoints,
    SaySkippedSteps,
    ShowProgress,
    WriteMetrics,
)
from paddle_recompute.app.trainer.claim import claimed
from paddle_recompute.app.trainer.divergence import check_vocabulary, check_weights, without_gain
from paddle_recompute.app.trainer.joining import join_ranks
from paddle_recompute.app.trainer.lanes import RecordLanes
from paddle_recompute.app.trainer.loop import Callback, Run, batches_of, step_seed, train
from paddle_recompute.app.trainer.memory_probe import MemoryProbe
from paddle_recompute.app.trainer.objective import Objective
from paddle_recompute.app.trainer.phases import Phases
from paddle_recompute.app.trainer.planned import BudgetPlanner, estimated_peaks
from paddle_recompute.app.trainer.planned_steps import PlannedSteps
from paddle_recompute.app.trainer.run_checkpoints import RunCheckpoints, write_record
from paddle_recompute.app.trainer.same_data import check_same_data
from paddle_recompute.app.trainer.told import data_figures, environment, examples
from paddle_recompute.app.trainer.validation import Validate, Validation
from paddle_recompute.checkpoint import Checkpoint
from paddle_recompute.distributed import (
    barrier,
    broadcast_from_rank0,
    equal_buffers,
)
from paddle_recompute.errors import DataError, OutputError
from paddle_recompute.offload import offload_layers
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.recompute import apply_recompute, check_patterns


class Trainer:
    """One training run, on the ranks that the environment declares.

    Args:
        config: The validated configuration. ``config.launch`` must match the running ranks.
        callbacks: Are told of every step, see `Callback`; after the trainer's own.
        sources: Where each setting comes from, by its dotted path, for the report.

    Examples:
        >>> record = Trainer(load_config("run.yaml")).run()  # doctest: +SKIP
        >>> record["recall@1"]  # doctest: +SKIP
        0.41
    """

    def __init__(
        self,
        config: Config,
        callbacks: Sequence[Callback] = (),
        *,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self._sources = dict(sources or {})
        self._callbacks = tuple(callbacks)
        self._folder = config.train.output_dir
        self._plan: RecomputePlan | None = None
        self._journal = Journal(None)
        self._amp = config.strategy.amp_configs if config.strategy.amp else None
        self._autocast: Callable[[], contextlib.AbstractContextManager[None]]
        self._autocast = contextlib.nullcontext

    def run(self) -> dict[str, Any]:
        """Train, evaluate, and write checkpoints, metrics and a report to ``train.output_dir``.

        With ``train.resume`` and no step left, the run is finished: its record is kept and
        returned. If there is none (the run was killed in its last evaluation), the model is
        evaluated.

        Returns:
            The final record, the same on every rank: ``recall@1``, ``recall@10``, ``mrr`` (also
            ``precision@1``, ``precision@10``, ``ndcg@10``, ``map``) and the first three of them
            before training with the prefix ``untrained_`` (None with
            ``train.eval_before: false``); ``pool_size``, ``queries``; ``recall@1_ceiling``,
            ``unknown_queries``, ``equal_queries`` and ``equal_answers`` (what the tokens of the
            held-out texts allow at best, see `data.Ceiling`); ``peak_bytes`` (the largest
            of all steps and ranks), ``plain_peak_bytes`` (of the step without recompute that needs
            most; None if it does not fit or ``train.measure_plain`` is false);
            ``examples_per_second`` (pairs, all ranks), ``steps``, ``skipped_steps`` (steps that
            overflowed in float16), ``loss`` (of the last step; None if that was skipped),
            ``temperature`` (if it is learned), ``chunk_size`` and ``chunk_tokens`` (what a rank
            encodes at once; both None: all its pairs), ``world_size``, ``output_dir``. With
            ``train.eval_every`` also ``best_step``, ``best_`` and the name of the metric, and
            ``stopped_early``.

        Raises:
            ConfigError: The running ranks are not those of ``config.launch``; ``train.output_dir``
                cannot be made, is in use, or holds a run that this one would write over; a step
                does not fit into the memory or into
                ``contrastive.memory_budget``; the device has no mixed precision; or a static graph
                cannot honour a setting.
            DataError: The pairs cannot be read, are too few for one step, or differ between ranks.
            CheckpointError: There is no checkpoint to resume from, or it is of another model or of
                other data.
            DependencyError: Bokeh, or a board of ``train.log_to``, is not installed.
            OutOfMemoryError: A step of several ranks does not fit; the next start has another plan.
            StoppedError: SIGTERM or SIGINT reached a rank; all ranks have ended their step, and it
                is saved.
            DivergenceError: The loss or the gradient is not finite (in float16: also after the loss
                scale was lowered); the message names the step.
        """
        self._rank, self._world_size = join_ranks(self.config)
        check_mode(self.config)
        require_bokeh()
        self._phases = Phases(self._announce)
        self._boards = boards(self.config.train.log_to)
        self._journal = Journal(self._folder / EVENTS if self._is_main else None)
        with claimed(self.config, self._rank, self._say):
            self._journal.note(
                "start",
                ranks=self._world_size,
                environment=environment(self.config),
                config=self.config.to_dict(),
                sources=self._sources,
            )
            try:
                return self._run()
            except BaseException as error:
                with contextlib.suppress(OutputError):  # `error` says more
                    self._journal.note("end", why=f"{type(error).__name__}: {error}")
                raise

    def _run(self) -> dict[str, Any]:
        self._checkpoints = RunCheckpoints(
            self.config, rank=self._rank, world_size=self._world_size, say=self._say
        )
        self._say_each(self.config.without_effect())
        checkpoint = self._checkpoints.find()
        if checkpoint is None:
            check_vocabulary(self.config)
        self._phases.begin("data", "Preparing the data")
        data = self._prepare_data(checkpoint)
        self._phases.begin("tokens", "Cutting the training pairs into tokens")
        loader = self._loader(data)
        total = total_steps(self.config, len(loader))
        self._validation = Validation.of(self.config, checkpoint)
        if checkpoint is not None and self._validation.has_ended(self.config):
            self._say(f"train.patience: {self.config.train.patience} has ended the run")
            total = min(total, checkpoint.step)
        if checkpoint is not None and checkpoint.step >= total:
            kept = self._checkpoints.record_of_ended(checkpoint, total)
            if kept is not None:
                self._show(kept)
                return kept
        if self.config.train.warmup_steps > total:
            self._say(
                f"  train.warmup_steps: {self.config.train.warmup_steps} is longer than the run of "
                f"{total} steps, which ends below its learning rate; train.decay has no effect here"
            )
        vocab_size = data.tokenizer.vocab_size
        if self.config.model.init_from is not None and checkpoint is None:
            check_weights(build_model(self.config.model, vocab_size), self.config.model.init_from)
        self._phases.begin("memory", "Measuring the memory of a step")
        estimate = partial(estimated_peaks, self.config, vocab_size)
        memory = MemoryProbe(self.config, vocab_size, say=self._say, estimate=estimate)
        chunks = memory.choose_chunks(self._checkpoints.chunks_of(checkpoint))
        plain_peak: int | None
        self._plan = None
        if self.config.recompute.enable and self.config.recompute.policy == "budget":
            planner = BudgetPlanner(self.config, vocab_size, say=self._say)
            earlier = self._checkpoints.plan_of(checkpoint)
            self._plan, plain_peak, configured_peak = planner.make(chunks, earlier)
        else:
            plain_peak, configured_peak = memory.measure(chunks)
        self._phases.begin("model", "Building the model")
        model = self._build_model(vocab_size)
        if checkpoint is not None:
            untrained = checkpoint.state["untrained"]
        else:
            untrained = {}
            if self.config.train.eval_before:
                self._phases.begin("evaluation", "Evaluating the untrained model")
                untrained = self._evaluate(model, data, "untrained")
        objective = Objective(self.config, chunks)
        trained = self._train(model, objective, data, loader, total, checkpoint, untrained)
        metrics = trained.pop("valid")
        if metrics is None:
            self._announce("Evaluating the trained model")
            metrics = self._evaluate(model, data, "trained")
        record: dict[str, Any] = {
            **metrics,
            **{f"untrained_{key}": untrained.get(key) for key in ("recall@1", "recall@10", "mrr")},
            **data.ceiling.to_dict(),
            **trained,
            "peak_bytes": max(trained["peak_bytes"] or 0, configured_peak),
            "plain_peak_bytes": plain_peak,
            "chunk_size": chunks.size,
            "chunk_tokens": chunks.tokens,
            "world_size": self._world_size,
            "output_dir": str(self._folder),
        }
        self._conclude(record)
        return record

    def _prepare_data(self, checkpoint: Checkpoint | None) -> PreparedData:
        data = prepare_data(
            self.config.data,
            seed=self.config.train.seed,
            negatives=self.config.contrastive.negatives_of_a_line,
            prompts=self.config.model.prompts,
            is_main_rank=self._is_main,
            barrier=barrier,
            # The cache may have been emptied, and a new vocabulary would be different.
            tokenizer_file=(checkpoint or self.config).tokenizer_file,
            compare=lambda sources: check_same_data(sources, checkpoint),
        )
        self._say(
            f"{len(data.train)} training pairs, {len(data.valid)} held-out pairs, "
            f"{len(data.pool)} candidates, {data.tokenizer.vocab_size} words"
        )
        self._say_each(data.notes)
        return data

    def _build_model(self, vocab_size: int) -> paddle.nn.Layer:
        paddle.seed(self.config.train.seed)
        model = build_model(self.config.model, vocab_size)
        broadcast_from_rank0(model)
        if self._world_size > 1 and (names := equal_buffers(model)):
            self._say(f"Buffers ({names[0]}, ...): rank 0's are taken for evaluation and saves")
        if self._plan is not None:
            if self.config.mode == "dygraph":
                self._plan.apply(model)
        elif self.config.recompute.offload_parameters != "none":
            self._say(str(offload_layers(model, self.config.recompute)))
        elif self.config.recompute.enable:
            self._say(str(apply_recompute(model, self.config.recompute)))
        else:
            check_patterns(model, self.config.recompute)
        return model

    def _train(
        self,
        model: paddle.nn.Layer,
        objective: Objective,
        data: PreparedData,
        loader: PairLoader,
        total: int,
        checkpoint: Checkpoint | None,
        untrained: dict[str, float],
    ) -> dict[str, Any]:
        """Run the remaining steps; returns what the final record says about them."""
        model.train()
        run = self._begun(model, objective, data, total, checkpoint)
        save = SaveCheckpoints(self._checkpoints, data, untrained, self._validation)
        validate = Validate(
            self._validation,
            lambda: self._evaluate(model, data, "trained"),
            partial(save.save, best=True),
            self._say,
        )
        barrier()
        train(
            run,
            batches_of(self.config, loader, run.done, total),
            [
                self._phases,
                validate,
                ShowProgress(),
                SaySkippedSteps(self._say),
                WriteMetrics(),
                RecordLanes(self._journal),
                save,
                *self._boards,
                *self._callbacks,
            ],
        )
        figures = run.figures
        if checkpoint is not None and run.done >= total:
            figures |= checkpoint.state.get("figures", {})
        if self.config.contrastive.learnable_temperature:
            figures["temperature"] = objective.loss.temperature
        now = self._validation
        if now.best is not None:
            figures |= {f"best_{now.metric}": now.best, "best_step": now.best_step}
            figures["stopped_early"] = now.has_ended(self.config)
        skipped = run.steps.step.num_skipped
        return {"steps": run.step, "skipped_steps": skipped, "valid": run.valid, **figures}

    def _begun(
        self,
        model: paddle.nn.Layer,
        objective: Objective,
        data: PreparedData,
        total: int,
        checkpoint: Checkpoint | None,
    ) -> Run:
        """The run before its first step, with the state of `checkpoint`, and the folder ready."""
        done = checkpoint.step if checkpoint else 0
        schedule = schedule_of(self.config, total)
        seed = self.config.train.seed
        steps = PlannedSteps(
            self.config,
            lambda plan: build_step(
                self.config,
                objective,
                model,
                schedule,
                vocab_size=data.tokenizer.vocab_size,
                amp=self._amp,
                plan=plan,
            ),
            self._plan,
            model,
            replaced=self._replan,
            seed=lambda step: paddle.seed(step_seed(seed, step, self._rank)),
        )
        self._autocast = lambda: steps.step.autocast()
        compiled = compile_as_configured(self.config, model, steps.step)
        if compiled is not None:
            self._say(f"The model is {compiled}")
        self._say(f"Gradient synchronization: {steps.step.synchronization}")
        if objective.chunks:
            self._say(f"Gradient cache: each rank encodes {objective.chunks}")
        if self._amp is not None:
            self._say(f"Mixed precision: {self._amp.dtype}, level {self._amp.level}")
        if checkpoint is not None:
            self._checkpoints.restore(checkpoint, model, objective.loss, steps.step)
            for _ in range(done):  # the schedule depends on the step only and is not saved
                schedule.step()
        elif self._is_main:
            begin_anew(self._folder, self._say, overwrite=self.config.train.overwrite)
        self._journal.open()
        self._journal.note("steps", done=done, total=total)
        if self._is_main and self._plan is not None:
            self._plan.save(self._folder / PLAN)
        return Run(
            self.config, self._folder, self._rank, total, done, model, objective, steps, schedule
        )

    def _replan(self, plan: RecomputePlan, why: str) -> None:
        self._plan = plan
        if self._is_main:
            plan.save(self._folder / PLAN)
        self._say(f"{why} with another {plan}")

    def _loader(self, data: PreparedData) -> PairLoader:
        loader = loader_for(
            self.config,
            data.train,
            data.tokenizer,
            local_batch=self.config.local_batch,
            rank=self._rank,
            num_ranks=self._world_size,
        )
        if len(loader) == 0:
            raise DataError(
                f"{len(data.train)} training pairs do not fill one batch of "
                f"contrastive.global_batch = {self.config.contrastive.global_batch}; give more "
                "pairs or lower it"
                + (
                    "; data.no_duplicates: true puts no query or positive into a batch twice"
                    if self.config.data.no_duplicates
                    else ""
                )
            )
        self._say_each(loader.notes())
        self._journal.note("data", **data_figures(data, loader))
        return loader

    def _evaluate(self, model: paddle.nn.Layer, data: PreparedData, when: str) -> dict[str, float]:
        """Retrieval metrics on the held-out pairs; the ranks share the work."""
        equal_buffers(model)
        encode = partial(
            encode_batches,
            model,
            data.tokenizer,
            batch_size=self.config.train.eval_batch,
            over_ranks=True,
        )
        with self._autocast():
            limits, (of_query, of_document) = self.config.data, self.config.model.prompts
            query = encode(
                [pair.query for pair in data.valid],
                max_tokens=limits.max_query_tokens,
                prompt=of_query,
            )
            pool = encode(data.pool, max_tokens=limits.max_positive_tokens, prompt=of_document)
        self._journal.note("examples", when=when, queries=examples(query, pool, data))
        target = np.array(data.target, dtype=np.int64)
        return retrieval_metrics(query, pool, target, ks=(1, 10), over_ranks=True)

    def _conclude(self, record: dict[str, Any]) -> None:
        """Rank 0 writes the report and the record and shows the table; the other ranks wait."""
        if self._is_main:
            write_record(self._folder, record)
        self._show(record)
        for note in without_gain(self.config, record):
            self._say(note)
        if self._is_main:
            self._journal.note("end", why="finished")
            write_report([self._folder], is_running=False)
        barrier()

    def _show(self, record: dict[str, Any]) -> None:
        self._say(retrieval_table(record))
        best = [("best", f"{BEST}/step-{record['best_step']}")] if "best_step" in record else []
        for name, path in (
            ("checkpoint", f"checkpoint/step-{record['steps']}"),
            *best,
            ("metrics", METRICS),
            ("report", REPORT),
        ):
            self._say(f"{name:<12}{self._folder / path}")

    @property
    def _is_main(self) -> bool:
        return self._rank == 0

    def _say_each(self, sentences: list[str]) -> None:
        for sentence in sentences:
            self._say(f"  {sentence}")

    def _say(self, text: str) -> None:
        if self._is_main:
            print(text, flush=True)
            self._journal.note("said", text=text)

    def _announce(self, text: str) -> None:
        """Say what happens now."""
        if self._is_main:
            print(styled(text, bold=True), flush=True)
            self._journal.note("said", text=text)


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run: ``max_steps`` or ``num_epochs``, whichever ends first."""
    by_epochs = config.train.num_epochs and config.train.num_epochs * steps_per_epoch
    return min(limit for limit in (config.train.max_steps, by_epochs) if limit is not None)
