"""Chunks for a memory budget: as large as it allows, never larger, and words where none is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer import Trainer, memory_probe
from paddle_recompute.app.trainer.memory_probe import (
    CLOSE_ESTIMATE,
    MemoryProbe,
    Peaks,
    chunks_within_budget,
    measure_step,
)
from paddle_recompute.app.trainer.metrics import read_metrics
from paddle_recompute.app.trainer.objective import Chunks
from paddle_recompute.app.trainer.planned import estimated_peaks
from paddle_recompute.errors import ConfigError
from paddle_recompute.planner import Job
from tests.app.trainer.test_trainer import tiny

LONGEST = 12  # max_positive_tokens of `tiny`
PAIRS = 64

needs_peaks_of_steps = pytest.mark.skipif(
    not _memory.can_reset_peak(), reason="needs the peak of a step alone (Paddle 3 on a CPU)"
)


def config_of(budget: str | int | None, **changes: Any) -> Config:
    settings = {"contrastive__global_batch": PAIRS, "contrastive__memory_budget": budget}
    return tiny(Path("nowhere"), **{**settings, **changes})


def costs(fixed: int, per_text: int, at_once: int) -> Any:
    """A step that takes `fixed` and `per_text` for each text of a chunk; notes what is asked."""
    asked: list[Chunks] = []

    def peak_of(chunks: Chunks) -> int:
        asked.append(chunks)
        return at_once if not chunks else fixed + per_text * (chunks.tokens // LONGEST)

    return peak_of, asked


@pytest.mark.parametrize(("budget", "texts"), [(1100, 1), (1199, 1), (1500, 5), (4700, 37)])
def test_as_many_texts_as_the_budget_allows(budget: int, texts: int) -> None:
    peak_of, asked = costs(fixed=1000, per_text=100, at_once=10**6)
    chunks, peak = chunks_within_budget(config_of(budget), peak_of)
    assert chunks.tokens % LONGEST == 0 and chunks.size is None
    found = chunks.tokens // LONGEST
    assert texts * 7 // 8 <= found <= texts
    assert peak == 1000 + 100 * found <= budget
    assert max(peak_of(one) for one in [*asked]) <= max(budget, 1200)  # hardly ever beyond it


def test_all_pairs_at_once_only_where_they_fit() -> None:
    peak_of, _ = costs(fixed=1000, per_text=100, at_once=20_000)
    assert chunks_within_budget(config_of(20_000), peak_of) == (Chunks(), 20_000)
    assert chunks_within_budget(config_of(19_999), peak_of) == (
        Chunks(tokens=PAIRS * LONGEST),
        1000 + 100 * PAIRS,
    )


def test_a_step_that_does_not_fit_ends_the_search() -> None:
    def peak_of(chunks: Chunks) -> int | None:
        return None if not chunks or chunks.tokens > 8 * LONGEST else 10

    assert chunks_within_budget(config_of(1000), peak_of) == (Chunks(tokens=8 * LONGEST), 10)


def test_a_jump_in_the_peak_is_noticed() -> None:
    """As from the loss, which is what takes most, to the chunks."""

    def peak_of(chunks: Chunks) -> int:
        return max(900, 100 * chunks.tokens // LONGEST) if chunks else 10**6

    chunks, peak = chunks_within_budget(config_of(1000), peak_of)
    assert (chunks, peak) == (Chunks(tokens=8 * LONGEST), 900)


@pytest.mark.parametrize(
    ("tile", "words"), [(None, "global_batch, or set contrastive.tile"), (4, "global_batch, or tr")]
)
def test_too_small_a_budget(tile: int | None, words: str) -> None:
    peak_of, _ = costs(fixed=1000, per_text=100, at_once=0)
    message = rf"memory_budget: 1\.0 KiB is too little; a step .* one text .*1\.1 KiB.*{words}"
    with pytest.raises(ConfigError, match=message):
        chunks_within_budget(config_of(1024, contrastive__tile=tile), peak_of)


@needs_peaks_of_steps
def test_measured_peaks_stay_within_the_budget() -> None:
    said: list[str] = []
    small = {"contrastive__global_batch": 24, "train__measure_plain": False}
    free = MemoryProbe(config_of(None, **small), 100, say=said.append)
    least = free._peak_of_a_step(Chunks(tokens=LONGEST), recompute=True)
    most = free._peak_of_a_step(Chunks(), recompute=True)
    assert least is not None and most is not None and least < most
    budget = (least + most) // 2
    probe = MemoryProbe(config_of(budget, **small), 100, say=said.append)
    chunks = probe.choose_chunks()
    assert LONGEST < chunks.tokens < 24 * LONGEST
    _, peak = probe.measure(chunks)
    assert least < peak <= budget
    assert peak > budget * 0.7
    words = f"each rank encodes {chunks.tokens} tokens at a time (contrastive.chunk_tokens: "
    assert any("contrastive.memory_budget: " in line and words in line for line in said)
    assert probe.choose_chunks(Chunks(tokens=24)) == Chunks(tokens=24)
    assert said[-1].endswith("each rank encodes 24 tokens at a time, as before")


@needs_peaks_of_steps
@pytest.mark.parametrize("policy", ["all", "budget"])
def test_chunks_are_found_by_estimates_and_verified_by_a_step(policy: str) -> None:
    small = {"contrastive__global_batch": 24, "recompute__policy": policy}
    if policy == "budget":
        small["recompute__memory_budget"] = "1GiB"
    free = MemoryProbe(config_of(None, **small), 100, say=print)
    for chunks in (Chunks(tokens=LONGEST), Chunks(tokens=6 * LONGEST), Chunks()):
        estimated = estimated_peaks(config_of(None, **small), 100, chunks)
        measured = [free._peak_of_a_step(chunks, recompute=one) for one in (False, True)]
        # This step is so small that vectors and identifiers count: 4 KiB.
        assert estimated == pytest.approx(measured, rel=CLOSE_ESTIMATE, abs=4096), chunks
    least = free._peak_of_a_step(Chunks(tokens=LONGEST), recompute=True)
    most = free._peak_of_a_step(Chunks(), recompute=True)
    assert least is not None and most is not None
    config, asked = config_of((least + most) // 2, **small), []

    def estimate(chunks: Chunks) -> Peaks | None:
        asked.append(chunks)
        return estimated_peaks(config, 100, chunks)

    probe = MemoryProbe(config, 100, say=print, estimate=estimate)
    chunks = probe.choose_chunks()
    assert len(asked) > 2 >= len(probe._peaks)  # few steps were run
    peak = probe._peaks[chunks, True]
    assert peak is not None and 0.7 * (least + most) // 2 < peak <= (least + most) // 2


@needs_peaks_of_steps
@pytest.mark.parametrize("error", [0.0, 0.005, 0.02])
def test_the_plain_step_is_run_only_where_the_estimate_of_the_other_is_wrong(error: float) -> None:
    config, chunks = config_of(None, train__measure_plain=True), Chunks(tokens=4 * LONGEST)
    true = MemoryProbe(config, 100, say=print).measure(chunks)

    def estimate(chunks: Chunks) -> Peaks:
        return Peaks(12345, int(true[1] * (1 + error)))

    probe = MemoryProbe(config, 100, say=print, estimate=estimate)
    plain = 12345 if error <= CLOSE_ESTIMATE else true[0]
    assert probe.measure(chunks) == (plain, true[1])
    assert len(probe._peaks) == (1 if error <= CLOSE_ESTIMATE else 2)


@needs_peaks_of_steps
def test_a_block_that_does_not_fit_leaves_the_chunks_to_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def runs_out(job: Job, **_: Any) -> None:
        raise MemoryError("a block takes more than there is")

    monkeypatch.setattr(Job, "measure", runs_out)
    assert estimated_peaks(config_of(None), 100, Chunks()) is None


@needs_peaks_of_steps
def test_an_estimate_reads_no_weights() -> None:
    config = config_of(None, model__init_from="nowhere/model.safetensors")
    assert estimated_peaks(config, 100, Chunks()) is not None


@needs_peaks_of_steps
def test_no_batch_takes_more_than_the_dearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of any one length, in chunks of the same tokens."""
    config, chunks = config_of(None), Chunks(tokens=8 * LONGEST)
    dearest = measure_step(config, vocab_size=100, recompute=True, chunks=chunks)
    make = memory_probe.largest_batch
    for length in (2, 5, 8, LONGEST):

        def of_one_length(*arguments: Any, length: int = length) -> Any:
            whole = make(arguments[0], arguments[1], Chunks())
            for ids in whole.values():
                ids[:, length:] = 0
            return whole

        monkeypatch.setattr(memory_probe, "largest_batch", of_one_length)
        peak = measure_step(config, vocab_size=100, recompute=True, chunks=chunks)
        # A chunk of lengths that leave no remainder may have a text more.
        assert peak < 1.02 * dearest, length


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "64 pairs per rank and micro-batch does not fit .*chunk_size or chunk_tokens to enc"),
        ({"contrastive__chunk_size": 8}, "8 pairs at a time does .*lower contrastive.chunk_si"),
        ({"contrastive__chunk_tokens": 24}, "24 tokens at a time does .*lower contrastive.chunk"),
    ],
)
def test_a_step_that_does_not_fit(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*arguments: Any, **options: Any) -> int:
        raise MemoryError

    monkeypatch.setattr(memory_probe, "measure_step", measure)
    probe = MemoryProbe(config_of(None, **settings), 100, say=print)
    with pytest.raises(ConfigError, match=words):
        probe.measure(probe.choose_chunks())


@needs_peaks_of_steps
@pytest.mark.parametrize("chunks", [{}, {"contrastive__chunk_tokens": 120}])
def test_training_takes_no_more_than_was_measured(chunks: dict[str, int], tmp_path: Path) -> None:
    """Long texts, and so many pairs that the batches read ahead are noticed."""
    random = np.random.default_rng(0)
    words = {" ".join(random.choice(list("abcdefghij"), size=12)) for _ in range(1200)}
    other = str.maketrans("abcdefghij", "klmnopqrst")
    lines = [f"{word}\t{word.translate(other)}\n" for word in sorted(words)]
    (tmp_path / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    config = tiny(
        tmp_path,
        **chunks,
        contrastive__global_batch=256,
        contrastive__tile=64,
        contrastive__mask_false_negatives=True,
        model__num_layers=1,
        train__max_steps=6,
        train__eval_before=False,
        train__measure_plain=False,
    )
    Trainer(config).run()
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    _, measured = MemoryProbe(config, vocab_size=281, say=print).measure(
        Chunks(tokens=chunks.get("contrastive__chunk_tokens"))
    )
    largest = max(step["peak_bytes"] for step in steps)
    assert measured * 0.7 < largest <= measured
