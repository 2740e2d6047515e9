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
from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from paddle_recompute._paddle.cpu_settings import use_cpu_settings_and_say_so
from paddle_recompute._run_folder import BEST, METRICS, PLAN, REPORT, begin_anew
from paddle_recompute.app.config import Config, schedule_of
from paddle_recompute.app.data import (
    DataDigest,
    PairLoader,
    Position,
    PreparedData,
    build_loader,
    check_vocabulary,
    prepare_data,
)
from paddle_recompute.app.report import require_bokeh, retrieval_table, write_report
from paddle_recompute.app.trainer.best import Best
from paddle_recompute.app.trainer.boards import boards
from paddle_recompute.app.trainer.budget_plan import PlannedSteps, earlier_plan, make_budget_plan
from paddle_recompute.app.trainer.checkpoints import RunCheckpoints, write_record
from paddle_recompute.app.trainer.chunk_search import MemoryProbe
from paddle_recompute.app.trainer.divergence import check_weights, without_gain
from paddle_recompute.app.trainer.evaluation import Evaluation
from paddle_recompute.app.trainer.events import Events, data_figures, environment
from paddle_recompute.app.trainer.loop import Callback, Run, batches_of, train
from paddle_recompute.app.trainer.network import NetworkLimit
from paddle_recompute.app.trainer.recorder import Recorder
from paddle_recompute.app.trainer.resume import (
    Resume,
    Resumed,
    check_same_as_before,
    chunks_of,
    what_is_left,
)
from paddle_recompute.app.trainer.setup import (
    check_same_on_ranks,
    join_ranks,
    run_folder,
    seeded_model,
    wrap,
)
from paddle_recompute.app.trainer.step import (
    Objective,
    build_step,
    check_mode,
    compile_as_configured,
)
from paddle_recompute.distributed import barrier, broadcast_from_rank0, equal_buffers
from paddle_recompute.errors import OutputError
from paddle_recompute.planner import RecomputePlan

PEAKS = "plain_peak_bytes", "measured_bytes"
"""Measured before training: of a step without recompute, and as configured."""


class Trainer:
    """One training run, on the ranks that the environment declares.

    Args:
        config: The validated configuration. ``config.launch`` must match the running ranks.
        callbacks: Called for every step, see `Callback`; after the trainer's own.
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

    def run(self) -> dict[str, Any]:
        """Train, evaluate, and write checkpoints, metrics and a report to ``train.output_dir``.

        With ``train.resume`` and no step left, the run is finished: its record is kept and
        returned. If there is none (the run was killed in its last evaluation), the model is
        evaluated.

        On a CPU it calls `use_cpu_settings`, and logs once what that has set;
        ``PADDLE_RECOMPUTE_CPU_SETTINGS=0`` switches it off.

        Returns:
            The final record, the same on every rank: ``recall@1``, ``recall@10``, ``mrr`` (also
            ``precision@1``, ``precision@10``, ``ndcg@10``, ``map``) and the first three of them
            before training with the prefix ``untrained_`` (None with
            ``train.eval_before: false``); ``pool_size``, ``queries``; ``peak_bytes`` (the largest
            of all steps and ranks; None on Paddle 2.6 on a CPU without ``train.measure``),
            ``plain_peak_bytes`` (of the step without recompute that needs most; None if it does
            not fit or is not measured: ``train.measure``, ``train.measure_plain``);
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
        self._rank = join_ranks(self.config)
        use_cpu_settings_and_say_so()
        check_mode(self.config)
        require_bokeh()
        self._boards = boards(self.config.train.log_to)
        self._events = Events(self.config, self._rank)
        with run_folder(self.config, self._rank, self._events.say):
            self._events.note(
                "start",
                ranks=self.config.world_size,
                environment=environment(self.config),
                config=self.config.to_dict(),
                sources=self._sources,
            )
            try:
                return self._run()
            except BaseException as error:
                with contextlib.suppress(OutputError):  # `error` says more
                    self._events.note("end", why=f"{type(error).__name__}: {error}")
                raise

    def _run(self) -> dict[str, Any]:
        self._events.say(*self.config.without_effect(), indent="  ")
        self._resume = Resume(self.config, self._rank, self._events.say)
        resumed = self._resume.find()
        data, loader = self._load(resumed)
        best, position, total = what_is_left(self.config, resumed, loader, self._events.say)
        if resumed is not None and resumed.step >= total:
            kept = self._resume.record_of_ended(resumed.step, total)
            if kept is not None:
                self._show(kept)
                return kept
        objective, plan, peaks = self._measure(data.tokenizer.vocab_size, resumed)
        model = self._build_model(data.tokenizer.vocab_size, plan)
        checkpoints = RunCheckpoints(self.config, self._rank)
        evaluate = Evaluation(self.config, model, data, self._events, checkpoints.save_best)
        untrained = self._evaluate_before(evaluate, resumed)
        run = self._begin(model, objective, data, plan, best, position, total, untrained, resumed)
        if any(peaks):
            run.figures |= dict(zip(PEAKS, peaks, strict=True))
        callbacks = [
            self._events,
            evaluate,
            Recorder(),
            NetworkLimit(self._events.say),
            checkpoints,
            *self._boards,
            *self._callbacks,
        ]
        train(run, batches_of(self.config, loader, run.done, total, run.position), callbacks)
        if run.valid is None:
            self._events.say("Evaluating the trained model", bold=True)
            run.valid = evaluate("trained")
        record = self._record(run)
        self._conclude(record)
        return record

    def _load(self, resumed: Resumed | None) -> tuple[PreparedData, PairLoader]:
        """The pairs, the same on all ranks and as before, and the batches of this rank.

        The weights to begin with are checked here, before anything that takes long.
        """
        if resumed is None:
            check_vocabulary(self.config)

        def compare(sources: Mapping[str, DataDigest]) -> None:
            check_same_on_ranks(sources)
            if resumed is not None:
                checkpoint = resumed.checkpoint
                saved = resumed.state.data or {}
                check_same_as_before(sources, saved, checkpoint.folder, checkpoint.weights_file)

        self._events.say("Preparing the data", bold=True)
        # The cache may have been emptied, and a new vocabulary would be different.
        saved_tokenizer = resumed.checkpoint.tokenizer_file if resumed is not None else None
        data = prepare_data(
            self.config, self._rank, barrier, tokenizer_file=saved_tokenizer, compare=compare
        )
        self._events.say(
            f"{len(data.train)} training pairs, {len(data.valid)} held-out pairs, "
            f"{len(data.pool)} candidates, {data.tokenizer.vocab_size} words"
        )
        self._events.say(*data.notes, indent="  ")
        self._events.say("Cutting the training pairs into tokens", bold=True)
        loader = build_loader(self.config, data, self._rank)
        self._events.say(*loader.notes(), indent="  ")
        self._events.note("data", **data_figures(data, loader))
        if resumed is None and self.config.model.init_from is not None:
            model = seeded_model(self.config, data.tokenizer.vocab_size)
            check_weights(model, self.config.model.init_from)  # the measurement takes minutes
        return data, loader

    def _measure(
        self, vocab_size: int, resumed: Resumed | None
    ) -> tuple[Objective, RecomputePlan | None, tuple[int | None, int | None]]:
        """The loss in its chunks, the plan, and the peaks: without recompute, and as configured.

        A resumed run has its peaks in its checkpoint.
        """
        probe = MemoryProbe(self.config, vocab_size, say=self._events.say)
        chunks = probe.choose_chunks(chunks_of(resumed, self.config))
        objective = Objective(self.config, chunks)
        broadcast_from_rank0(objective.loss)
        section = self.config.recompute
        if not section.enable or section.policy != "budget":
            measures = self.config.measures and resumed is None
            return objective, None, probe.measure(chunks) if measures else (None, None)
        saved = resumed.checkpoint.state if resumed is not None else None
        plan, *peaks = make_budget_plan(
            self.config,
            vocab_size,
            chunks,
            say=self._events.say,
            earlier=earlier_plan(self.config, saved),
        )
        return objective, plan, (peaks[0], peaks[1])

    def _build_model(self, vocab_size: int, plan: RecomputePlan | None) -> paddle.nn.Layer:
        self._events.say("Building the model", bold=True)
        model = seeded_model(self.config, vocab_size)
        broadcast_from_rank0(model)
        if self.config.world_size > 1 and (names := equal_buffers(model)):
            self._events.say(
                f"Buffers ({names[0]}, ...): rank 0's are taken for evaluation and saves"
            )
        self._events.say(*filter(None, [wrap(model, self.config, plan)]))
        return model

    def _evaluate_before(self, evaluate: Evaluation, resumed: Resumed | None) -> dict[str, float]:
        if resumed is not None:
            return resumed.state.untrained
        if not self.config.train.eval_before:
            return {}
        self._events.say("Evaluating the model before training", bold=True)
        return evaluate("untrained")

    def _begin(
        self,
        model: paddle.nn.Layer,
        objective: Objective,
        data: PreparedData,
        plan: RecomputePlan | None,
        best: Best,
        position: Position,
        total: int,
        untrained: dict[str, Any],
        resumed: Resumed | None,
    ) -> Run:
        """The run before its first step, with the state that it goes on from; its folder ready."""
        config, rank, say = self.config, self._rank, self._events.say
        done = resumed.step if resumed is not None else 0
        if config.train.warmup_steps > total:
            say(
                f"  train.warmup_steps: {config.train.warmup_steps} is longer than the run of "
                f"{total} steps, which ends below its learning rate; train.decay has no effect here"
            )
        schedule = schedule_of(config, total)
        step = build_step(config, objective, model, schedule, data.tokenizer.vocab_size, plan)
        steps = PlannedSteps(config, step, plan, model, rank=rank, replaced=self._replan)
        compiled = compile_as_configured(config, model, step)
        if compiled is not None:
            say(f"The model is {compiled}")
        say(f"Gradient synchronization: {step.synchronization}")
        if objective.chunks:
            say(f"Gradient cache: each rank encodes {objective.chunks}")
        if config.strategy.amp:
            amp = config.strategy.amp_configs
            say(f"Mixed precision: {amp.dtype}, level {amp.level}")
        run = Run(
            config,
            rank,
            total,
            done,
            data,
            model,
            objective,
            steps,
            schedule,
            untrained,
            best,
            position,
        )
        run.count()
        if resumed is not None:
            run.figures |= resumed.state.figures
            self._resume.restore(resumed, run)
            for _ in range(done):  # the schedule depends on the step only and is not saved
                schedule.step()
        elif run.is_main:
            begin_anew(self._folder, say, overwrite=config.train.overwrite)
        self._events.open()
        self._events.note("steps", done=done, total=total)
        if run.is_main and plan is not None:
            plan.save(self._folder / PLAN)
        barrier()
        return run

    def _replan(self, plan: RecomputePlan, why: str) -> None:
        if self._rank == 0:
            plan.save(self._folder / PLAN)
        self._events.say(f"{why} with another {plan}")

    def _record(self, run: Run) -> dict[str, Any]:
        """The final record."""
        plain_peak, configured_peak = (run.figures.pop(name, None) for name in PEAKS)
        assert run.valid is not None
        learned = {}
        if self.config.contrastive.learnable_temperature:
            learned = {"temperature": run.objective.loss.temperature}
        return {
            **run.valid,
            **{
                f"untrained_{key}": run.untrained.get(key)
                for key in dict.fromkeys(("recall@1", "recall@10", "mrr", run.best.metric))
            },
            "steps": run.step,
            "skipped_steps": run.steps.step.num_skipped,
            **run.figures,
            **learned,
            **run.best.figures(self.config),
            "peak_bytes": max(run.figures["peak_bytes"] or 0, configured_peak or 0) or None,
            "plain_peak_bytes": plain_peak,
            "chunk_size": run.objective.chunks.size,
            "chunk_tokens": run.objective.chunks.tokens,
            "world_size": self.config.world_size,
            "output_dir": str(self._folder),
        }

    def _conclude(self, record: dict[str, Any]) -> None:
        """Rank 0 writes the report and the record and shows the table; the other ranks wait."""
        if self._rank == 0:
            write_record(self._folder, record)
        self._show(record)
        self._events.say(*without_gain(self.config, record))
        if self._rank == 0:
            self._events.note("end", why="finished")
            write_report([self._folder], is_running=False)
        barrier()

    def _show(self, record: dict[str, Any]) -> None:
        best = [("best", f"{BEST}/step-{record['best_step']}")] if "best_step" in record else []
        written = (
            ("checkpoint", f"checkpoint/step-{record['steps']}"),
            *best,
            ("metrics", METRICS),
            ("report", REPORT),
        )
        self._events.say(
            retrieval_table(record),
            *(f"{name:<12}{self._folder / path}" for name, path in written),
        )
