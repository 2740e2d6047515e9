"""Chunks for a memory budget: as large as it allows, never larger, and words where none is."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest

from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.config import Config
from paddle_recompute.app.encoder import ErnieEncoder
from paddle_recompute.app.report import read_metrics
from paddle_recompute.app.trainer import Trainer, chunk_search, peak_memory
from paddle_recompute.app.trainer.chunk_search import MemoryProbe, largest_chunks
from paddle_recompute.app.trainer.peak_memory import bare_model, largest_batch, measure_peak
from paddle_recompute.app.trainer.step import Chunks, Objective, build_step
from paddle_recompute.errors import ConfigError
from tests.app.trainer.test_trainer import tiny
from tests.distributed.mortal_ranks import results_of

LONGEST = 12  # max_positive_tokens of `tiny`
PAIRS = 64
ONE_TEXT = Chunks(tokens=LONGEST)

pytestmark = pytest.mark.usefixtures("measured")
needs_peaks_of_steps = pytest.mark.skipif(
    not _memory.can_reset_peak(), reason="needs the peak of a step alone (Paddle 3 on a CPU)"
)


def config_of(budget: str | int | None, **changes: Any) -> Config:
    settings = {"contrastive__global_batch": PAIRS, "contrastive__memory_budget": budget}
    return tiny(Path("nowhere"), **{**settings, **changes})


def probe_of(budget: str | int | None, said: Any = print, **changes: Any) -> MemoryProbe:
    return MemoryProbe(config_of(budget, **changes), 100, say=said)


def found_with(peak_of: Any, budget: int) -> tuple[int | None, list[int]]:
    """Texts of the largest chunks (0: all at once), and the peaks that were asked for."""
    asked: list[int] = []

    def noted(chunks: Chunks) -> int | None:
        peak = peak_of(chunks.tokens // LONGEST if chunks else 0)
        asked.append(peak or 0)
        return peak  # type: ignore[no-any-return]

    chunks = largest_chunks(config_of(budget), budget, noted)
    if chunks is None:
        return None, asked
    assert chunks.size is None and (not chunks or chunks.tokens % LONGEST == 0)
    return (chunks.tokens or 0) // LONGEST, asked


def linear(texts: int) -> int:
    return 1000 + 100 * texts if texts else 10**6


@pytest.mark.parametrize(
    ("peak_of", "budget", "texts"),
    [
        *((linear, *case) for case in [(1099, None), (1199, 1), (1500, 5), (4700, 37)]),
        (lambda texts: 1000 + 100 * (texts or 190), 20_000, 0),
        (lambda texts: 1000 + 100 * (texts or 190), 19_999, PAIRS),
        (lambda texts: 10 if 0 < texts <= 8 else None, 1000, 8),
        # A jump, as from the loss, which is what takes most, to the chunks.
        (lambda texts: max(900, 100 * texts) if texts else 10**6, 1000, 10),
    ],
)
def test_as_many_texts_as_the_budget_allows(peak_of: Any, budget: int, texts: int | None) -> None:
    """0: all at once; None: not one."""
    found, asked = found_with(peak_of, budget)
    if peak_of is linear and texts:
        assert texts * 7 // 8 <= (found or 0) <= texts
        assert max(asked) <= max(budget, 1200)  # hardly ever beyond it
    else:
        assert found == texts


def test_too_small_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_search, "measure_peak", lambda *_: 1100)
    message = r"memory_budget: 1\.0 KiB is too little; .* one text .*1\.1 KiB.*set contrastive.tile"
    with pytest.raises(ConfigError, match=message):
        probe_of(1024).choose_chunks()


def test_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(config: Config, vocab_size: int, chunks: Chunks) -> int:
        return 1000 + 100 * (chunks.tokens // LONGEST if chunks else PAIRS)

    monkeypatch.setattr(chunk_search, "measure_peak", measured)
    said: list[str] = []
    probe = probe_of(2048, said.append)
    chunks = probe.choose_chunks()
    assert 9 * LONGEST <= chunks.tokens <= 10 * LONGEST
    assert f"each rank encodes {chunks.tokens} tokens at a time (contrastive.chunk_" in said[-1]
    assert probe.choose_chunks(ONE_TEXT) == ONE_TEXT
    assert said[-1].endswith("each rank encodes 12 tokens at a time, as before")


def test_the_plain_step_of_a_run_with_offloaded_parameters_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(config: Config, *_: Any) -> int:
        section = config.recompute
        measured_steps.append((section.enable, section.offload_parameters, section.num_shards))
        return 1000

    measured_steps: list[Any] = []
    monkeypatch.setattr(chunk_search, "measure_peak", measured)
    offloaded = {"recompute__offload_parameters": "host", "recompute__num_shards": 2}
    found = probe_of(None, train__measure_plain=True, **offloaded).measure(Chunks())
    assert found == (1000, 1000)
    assert measured_steps == [(True, "host", 2), (False, "none", 1)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "all pairs at once, of 64 .*does not fit .*; set contrastive.chunk_size or chunk_tok"),
        ({"contrastive__chunk_size": 8}, "8 pairs at a time, .*; lower contrastive.chunk_size or"),
    ],
)
def test_a_step_that_does_not_fit(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_search, "measure_peak", mock.Mock(side_effect=MemoryError))
    probe = probe_of(None, **settings)
    with pytest.raises(ConfigError, match=words):
        probe.measure(probe.choose_chunks())


@needs_peaks_of_steps
def test_training_takes_no_more_than_was_measured(tmp_path: Path) -> None:
    """Long texts, and so many pairs that the batches read ahead are noticed."""
    random = np.random.default_rng(0)
    words = {" ".join(random.choice(list("abcdefghij"), size=12)) for _ in range(1200)}
    other = str.maketrans("abcdefghij", "klmnopqrst")
    lines = [f"{word}\t{word.translate(other)}\n" for word in sorted(words)]
    (tmp_path / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    config = tiny(
        tmp_path,
        contrastive__chunk_tokens=120,
        contrastive__global_batch=256,
        contrastive__tile=64,
        contrastive__mask_false_negatives=True,
        model__num_layers=1,
        train__max_steps=2,
        train__eval_before=False,
    )
    Trainer(config).run()
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    measured = measure_peak(config, 453, Chunks(tokens=120))
    assert measured * 0.7 < max(step["peak_bytes"] for step in steps) <= measured


BUDGET = {
    "contrastive__global_batch": 16,
    "contrastive__memory_budget": "340KiB",
    "train__eval_before": False,
}


def train_within_a_budget(folder: str) -> list[Any]:
    """A run, and one that resumes it: what they gave and printed."""
    found = []
    for steps in (2, 3):
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            config = tiny(Path(folder), **BUDGET, train__max_steps=steps, train__resume="auto")
            found.append((Trainer(config).run(), shown.getvalue()))
    return found


@needs_peaks_of_steps
def test_chunks_of_a_run_are_within_the_budget_and_those_of_a_resumed_run(folder: Path) -> None:
    """In a process of its own: what other tests have left in this one would count too."""
    (found,) = results_of(train_within_a_budget, 1, folder=str(folder))
    (record, shown), (again, shown_again) = found
    tokens = record["chunk_tokens"]
    assert tokens is not None and record["chunk_size"] is None
    assert f"each rank encodes {tokens} tokens at a time (contrastive.ch" in shown
    assert record["peak_bytes"] <= 340 * 1024
    page = (folder / "run" / "report.html").read_text(encoding="utf-8")
    assert f"{tokens} tokens encoded at a time" in page
    assert again["chunk_tokens"] == tokens
    assert f"{tokens} tokens at a time, as before" in shown_again


@needs_peaks_of_steps
def test_chunks_of_pairs_are_measured_on_two() -> None:
    """The peak is that of a step in which all texts are of full length."""
    size, wide = 16, {"model__hidden_size": 64, "model__intermediate_size": 128}
    config = config_of(None, **wide, contrastive__tile=16, contrastive__hard_negatives=2)
    found, calls, encode = [], [], ErnieEncoder.forward

    def noted(self: Any, ids: Any, *more: Any) -> Any:
        calls[-1] += 1
        return encode(self, ids, *more)

    with mock.patch.object(ErnieEncoder, "forward", noted):
        for made in (Chunks, lambda tokens: Chunks(size)):
            calls.append(0)
            with mock.patch.object(peak_memory, "Chunks", made):
                found.append(measure_peak(config, 100, Chunks(size)))
    print(f"{found}, {calls} calls of the encoder")
    assert abs(found[0] - found[1]) < 0.02 * found[1]
    assert calls[0] < calls[1] * 2 // 3


@pytest.mark.parametrize("mode", ["dygraph", "static"])
def test_padding_of_another_id_is_cut_from_chunks(mode: str) -> None:
    """RoBERTa's is 1, Qwen's the last entry. In other chunks dropout would draw other masks."""
    found = []
    for pad_id in (0, 101):
        small = {"contrastive__global_batch": 8, "model__num_layers": 1, "train__verify": False}
        config = config_of(None, mode=mode, model__pad_token_id=pad_id, **small)
        chunks = Chunks(tokens=24)
        paddle.seed(2)
        model, objective = bare_model(config, 102), Objective(config, chunks)
        step = build_step(config, objective, model, 0.0, 102)
        paddle.seed(3)
        batch = largest_batch(config, 101, chunks)
        batch = {side: ids + pad_id * (ids == 0).astype("int64") for side, ids in batch.items()}
        found.append(step([batch]).loss)
    assert found[0] == found[1]
