"""The evaluation of a run: before, during and after training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute.app.config import Config
from paddle_recompute.app.data import PreparedData
from paddle_recompute.app.encoder import encoder_of
from paddle_recompute.app.retrieval import encode_batches, retrieval_metrics
from paddle_recompute.app.trainer.events import Events
from paddle_recompute.app.trainer.loop import Callback, Run
from paddle_recompute.distributed import equal_buffers, values_of_ranks

NUM_EXAMPLES = 8
NUM_HITS = 3
_MOST_CHARACTERS = 200


class Evaluation(Callback):
    """Retrieval on the held-out pairs; the ranks share the work and call it together.

    As a callback it evaluates every ``train.eval_every`` steps, saves the best, and ends the run.

    Args:
        config: Of the run.
        model: The encoder.
        data: Of the run.
        events: Receives the nearest candidates of some queries.
        save_best: Saves the best checkpoint; all ranks call it together.
    """

    def __init__(
        self,
        config: Config,
        model: paddle.nn.Layer,
        data: PreparedData,
        events: Events,
        save_best: Callable[[Run], None],
    ) -> None:
        self._config, self._model, self._data = config, model, data
        self._events, self._save_best = events, save_best
        self._autocast: Callable[[], contextlib.AbstractContextManager[None]]
        self._autocast = contextlib.nullcontext

    def __call__(self, when: str) -> dict[str, float]:
        """The metrics.

        Args:
            when: ``"untrained"`` or ``"trained"``, for the report.
        """
        limits, (of_query, of_document) = self._config.data, self._config.model.prompts
        equal_buffers(self._model)
        asked = [pair.query for pair in self._data.valid]
        sides = (
            ("query", asked, limits.max_query_tokens, of_query),
            ("positive", self._data.pool, limits.max_positive_tokens, of_document),
        )
        with self._autocast():
            query, pool = (
                encode_batches(
                    encoder_of(self._model, side),
                    self._data.tokenizer,
                    texts,
                    max_tokens=longest,
                    prompt=prompt,
                    batch_size=self._config.train.eval_batch,
                    over_ranks=True,
                )
                for side, texts, longest, prompt in sides
            )
        self._events.note("examples", when=when, queries=examples(query, pool, self._data))
        target = np.array(self._data.target, dtype=np.int64)
        found = retrieval_metrics(query, pool, target, ks=(1, 10))
        # Of other processors, the last bits may be others; all ranks must decide the same.
        of_ranks: list[dict[str, float]] = values_of_ranks(found, "the metrics")
        return of_ranks[0]

    def on_start(self, run: Run) -> None:
        self._autocast = lambda: run.steps.step.autocast()
        if run.done == 0 and run.untrained and run.config.train.eval_every is not None:
            run.best.add(0, run.untrained[run.best.metric])
            self._save_best(run)

    def after_step(self, run: Run) -> None:
        run.valid = None
        if not run.evaluates:
            return
        run.steps.step.write_back()
        run.valid = self("trained")
        now = run.best
        if now.add(run.step, run.valid[now.metric]):
            self._save_best(run)
        elif now.has_ended(run.config):
            run.ended = True
            self._events.say(
                f"Step {run.step} ends the run: {now.metric} was not above {now.best:.4f} of step "
                f"{now.best_step} in {now.since} evaluations (train.patience)"
            )


def examples(
    query: NDArray[np.float32], pool: NDArray[np.float32], data: PreparedData
) -> list[dict[str, Any]]:
    """The nearest candidates of some held-out queries, the same ones in each evaluation.

    Args:
        query: ``[held-out pairs, dim]``, of length 1.
        pool: ``[candidates, dim]``, of length 1.
        data: Of the run.
    """
    found = []
    for row in range(0, len(query), -(-len(query) // NUM_EXAMPLES)):
        scores = pool @ query[row]
        nearest = np.argsort(-scores, kind="stable")[:NUM_HITS]
        found.append(
            {
                "query": data.valid[row].query[:_MOST_CHARACTERS],
                "answer": data.valid[row].positive[:_MOST_CHARACTERS],
                "rank": int(np.count_nonzero(scores >= scores[data.target[row]])),
                "hits": [
                    {"text": data.pool[hit][:_MOST_CHARACTERS], "score": float(scores[hit])}
                    for hit in nearest
                ],
            }
        )
    return found
